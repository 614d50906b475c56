"""Traces of requests compute hardly more than an ideal cache does. Counts are the same on every machine."""

import random

import pytest

from benchmarks.policies import few
from benchmarks.replay import FIRST, KINDS, TRACES, Turn, Writer, clairvoyant, ideal, last_use, replay
from kvcellar.memory.policy import NEAREST

SOME = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in TRACES]
MOST = {"full": 1.02, "sliding": 1.0, "chunked": 1.0, "hybrid": 1.04}
GROWING = 1.25  # of files that grow by fewer tokens than checkpoints are apart
# Windows are as long as in whole prompts, and take four times the share of the cells.
TENTH = {"full": 1.25, "sliding": 1.4, "chunked": 1.25, "hybrid": 1.25}
BY_LAST_USE = 1.2  # or this, over last use: what comes back at random, and growing files
AT_RANDOM = 1.1  # of `users`, over `informed`, whatever the kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trace", SOME)
def test_with_all_cells_a_trace_computes_what_an_ideal_cache_does_and_little_more(trace, kind) -> None:
    found = replay(trace, kind, scale=0.25, spare=NEAREST)
    most = GROWING if (trace, kind) == ("completion", "hybrid") else MOST[kind]
    assert found.ideal <= found.computed <= most * found.ideal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trace", SOME)
def test_in_a_tenth_of_the_cells_a_trace_computes_little_more_than_with_the_best_choice(trace, kind) -> None:
    found = replay(trace, kind, share=0.1, scale=0.25)
    if trace == "users":
        assert found.computed <= AT_RANDOM * informed(list(TRACES[trace](Writer(1, 0.25))), 750, found.cells)
    else:
        assert found.computed <= max(TENTH[kind] * found.clairvoyant, BY_LAST_USE * found.last_use)


def informed(turns: list[Turn], system: int, cells: int) -> int:
    """What a cache of full attention computes for `users` that is told which conversations can still go on: it keeps
    no tokens of others, and evicts those that were used last of all. All that can go on are equally likely to: without
    knowing who comes back, no choice computes less on average."""
    texts, kept, computed = dict[int, list[int]](), dict[int, int](), system
    for turn in turns:
        before, known = texts.get(turn.conversation, []), kept.pop(turn.conversation, 0)
        goes_on = bool(before) and turn.prompt[: len(before)] == before
        computed += len(turn.prompt) - system - (known if goes_on else 0)
        texts[turn.conversation] = [*turn.prompt, *turn.answer]
        kept[turn.conversation] = len(texts[turn.conversation]) - system
        for user in kept:  # in order of their last use
            kept[user] -= min(kept[user], max(0, system + sum(kept.values()) - cells))
    return computed


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_users_who_come_back_at_random_compute_little_more_than_where_it_is_known_who_can(seed) -> None:
    turns = list(TRACES["users"](Writer(seed, 0.25)))
    found = replay("users", "full", share=0.1, scale=0.25, seed=seed)
    assert found.computed <= 1.05 * informed(turns, 750, found.cells)


@pytest.mark.parametrize(
    "kind", [kind if kind in ("full", "hybrid") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_eight_chats_in_turn_compute_little_more_in_room_for_four(kind) -> None:
    found = replay("chats", kind, share=0.5, scale=0.25)
    assert found.computed <= 1.15 * found.clairvoyant


@pytest.mark.parametrize("rounds", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_that_chats_take_turns_is_known_in_their_second_round(kind, rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACES, "chats", few(rounds))
    found = replay("chats", kind, share=0.5, scale=0.25)
    assert found.last_use > 1.6 * found.clairvoyant
    assert found.computed <= 1.25 * found.clairvoyant


def fewest(turns: list[Turn], cells: int, there: frozenset[tuple[int, ...]] = frozenset()) -> int:
    """What the best choice of tokens to keep computes, by trying all: prefixes, closed upwards."""
    if not turns:
        return 0
    (prompt, answer, _), rest = turns[0], turns[1:]
    text = (*prompt, *answer[:-1])
    found = next((n for n in range(len(prompt) - 1) if text[: n + 1] not in there), len(prompt) - 1)
    now = there | {text[:end] for end in range(1, len(text) + 1)}
    best = min(fewest(rest, cells, kept) for kept in closed(now) if len(kept) <= cells)
    return len(prompt) - found + best


def closed(prefixes: frozenset[tuple[int, ...]]) -> set[frozenset[tuple[int, ...]]]:
    """The largest sets that have, with each prefix, those before it, after one eviction after the other."""
    found, rest = {prefixes}, [prefixes]
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
    texts = [[draw.randrange(9) for _ in range(2)] for _ in range(3)]
    turns = [Turn([*draw.choice(texts), 10 + at], [1]) for at in range(5)]
    for cells in (3, 4):
        assert clairvoyant(turns, cells) == fewest(turns, cells) <= last_use(turns, cells)
    assert ideal(turns) == clairvoyant(turns, 1000) == last_use(turns, 1000)


def test_what_was_used_last_longest_ago_goes_first() -> None:
    one, other, third = ([first, 1, 2, 3] for first in (7, 8, 9))
    turns = [Turn(text, [1]) for text in (one, other, one, third, one, other)]
    assert last_use(turns, 8) == 4 + 4 + 1 + 4 + 1 + 4
