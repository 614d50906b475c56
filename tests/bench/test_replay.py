"""Traces of requests compute hardly more than an ideal cache does. Counts are the same on every machine."""

import random
from itertools import product

import pytest

from kvcellar.bench.replay import CHUNK, KINDS, TRACES, Turn, clairvoyant, ideal, replay

# Prompts of a quarter of their length have checkpoints as far apart as others: so more is computed between them.
MOST = {"full": 1.02, "sliding": 1.3, "chunked": 1.3, "hybrid": 1.3}
# Windows are as long as in whole prompts, and take four times the share of the cells.
TENTH = {"full": 1.25, "sliding": 1.4, "chunked": 1.25, "hybrid": 1.25}


@pytest.mark.parametrize(("trace", "kind"), list(product(TRACES, KINDS)))
def test_with_all_cells_a_trace_computes_what_an_ideal_cache_does_and_little_more(trace, kind) -> None:
    found = replay(trace, kind, scale=0.25)
    assert found.ideal <= found.computed <= MOST[kind] * found.ideal


@pytest.mark.parametrize(("trace", "kind"), list(product(TRACES, KINDS)))
def test_in_a_tenth_of_the_cells_a_trace_computes_little_more_than_with_the_best_choice(trace, kind) -> None:
    found = replay(trace, kind, share=0.1, scale=0.25)
    assert found.computed <= TENTH[kind] * found.clairvoyant


@pytest.mark.parametrize("kind", KINDS)
def test_eight_chats_in_turn_compute_little_more_in_room_for_four(kind) -> None:
    found = replay("chats", kind, share=0.5, scale=0.25)
    assert found.computed <= 1.15 * found.clairvoyant


def fewest(turns: list[Turn], cells: int, there: frozenset[tuple[int, ...]] = frozenset()) -> int:
    """What the best choice of chunks to keep computes, by trying all: prefixes of whole chunks, closed upwards."""
    if not turns:
        return 0
    (prompt, answer, _), rest = turns[0], turns[1:]
    text = (*prompt, *answer[:-1])
    most = (len(prompt) - 1) // CHUNK
    found = next((n for n in range(most) if text[: (n + 1) * CHUNK] not in there), most)
    now = there | {text[: end * CHUNK] for end in range(1, len(text) // CHUNK + 1)}
    best = min(fewest(rest, cells, kept) for kept in closed(now) if len(kept) * CHUNK <= cells)
    return len(prompt) - found * CHUNK + best


def closed(chunks: frozenset[tuple[int, ...]]) -> set[frozenset[tuple[int, ...]]]:
    """The largest sets that have, with each chunk, those before it, after one eviction after the other."""
    found, rest = {chunks}, [chunks]
    while rest:
        one = rest.pop()
        for leaf in one:
            less = one - {leaf}
            if not any(other[: len(leaf)] == leaf for other in less) and less not in found:
                found.add(less)
                rest.append(less)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_clairvoyant_cache_is_as_good_as_the_best_choice(seed) -> None:
    draw = random.Random(seed)
    texts = [[draw.randrange(9) for _ in range(CHUNK * 2)] for _ in range(3)]
    turns = [Turn([*draw.choice(texts), *[10 + at] * CHUNK], [1]) for at in range(5)]
    for cells in (2 * CHUNK, 4 * CHUNK):
        assert clairvoyant(turns, cells) >= fewest(turns, cells)
        assert clairvoyant(turns, cells) <= fewest(turns, cells) + CHUNK
    assert ideal(turns) <= clairvoyant(turns, 1000 * CHUNK)
