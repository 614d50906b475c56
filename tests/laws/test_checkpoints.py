"""Checkpoints inside one feed are those of a feed that was cut there: the same bits, in any layout, of any state.

The obvious path feeds the same tokens in pieces that end at the checkpoints, and makes a claim after each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.errors import BadRequest, CacheFull, NotSupported
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.record import Record
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Recurrent, StatePlane
from kvcellar.memory.spans import Span
from tests.laws.watch import nothing_changes

PLANES = (Plane("k", 2, 4), Plane("v", 1, 3))
LAYOUTS = {"causal": Causal(), "window": Sliding(4), "wide": Sliding(5, 9), "one": Sliding(1), "chunk": Chunked(4)}
STATE = Recurrent({20: (StatePlane("sum", (2,), "float32"),), 21: (StatePlane("sum", (2,), "float32"),)})


def memory(names: Sequence[str], *, recurrent: bool, rows: int = 60) -> Memory:
    return Memory(
        [Group(name, LAYOUTS[name], PLANES, (layer,)) for layer, name in enumerate(names)],
        cells=dict.fromkeys(names, 400),
        dtype=torch.float32,
        device="cpu",
        backend=Sdpa(),
        recurrent=STATE if recurrent else None,
        rows=rows if recurrent else 0,
    )


def values(seq: int, pos: Span, layer: int, heads: int, size: int) -> Tensor:
    """[n,heads,size], which depend on the token alone."""
    tokens = torch.arange(pos.start, pos.end).float() + 1000 * seq + 7 * layer
    return tokens.view(-1, 1, 1) + torch.arange(heads * size).view(heads, size) / 16


def state(seq: int, end: int, layer: int) -> Tensor:
    """[2], after so many tokens."""
    return torch.tensor([1000.0 * seq + end, float(layer * end)])


def step(made: Memory, feeds: Sequence[Feed], accepted: Mapping[int, int] | None = None) -> dict[int, int]:
    plan = made.begin(Batch(tuple(feeds)))
    for group in made.storage.groups:
        (layer,) = group.layers
        k, v = (
            torch.cat([values(feed.seq, feed.pos, layer, plane.heads, plane.size) for feed in feeds])
            for plane in group.planes
        )
        made.put(layer, k, v)
    for layer in STATE.layers if plan.states else ():

        def at(indices: Sequence[int], counts: Sequence[int], layer: int = layer) -> dict[str, Tensor]:
            assert list(counts) == sorted(counts, reverse=True)
            some = [(feeds[i].seq, feeds[i].pos.start + n) for i, n in zip(indices, counts, strict=True)]
            return {"sum": torch.stack([state(seq, end, layer) for seq, end in some])}

        ends = torch.stack([state(feed.seq, feed.pos.end, layer) for feed in feeds])
        made.states.write(layer, plan.states, {"sum": ends}, at=at)
    return made.commit(accepted)


def read_out(made: Memory, claim: int) -> tuple[Record, list[list[int]]]:
    with made.claims.reading(claim) as reading:
        return replace(reading.record, stretches=()), [chunk.tolist() for chunk in reading]


def claimed_in_pieces(made: Memory, feed: Feed, kept: int) -> int:
    """The claim that the obvious path makes of the first `kept` tokens of a feed."""
    places = [pos for pos in feed.checkpoints if pos <= feed.pos.start + kept]
    ends = sorted({*places, feed.pos.start + kept})
    claims: list[int] = []
    start = feed.pos.start
    for end in ends:
        step(made, [Feed(feed.seq, Span(start, end))])
        claims.append(made.claims.make(feed.seq, Span(start, end), [end] if end in places else []))
        start = end
    for following in claims[1:]:
        made.claims.join(claims[0], following)
    return claims[0]


FEED = st.tuples(st.integers(1, 12), st.sets(st.integers(1, 12), max_size=4), st.integers(0, 12))


NAMES = (["causal", "window"], ["wide", "chunk"], ["causal", "one", "chunk", "wide"])


@pytest.mark.parametrize(("names", "recurrent"), [*product(NAMES, (False, True)), ([], True)])
@settings(derandomize=True, deadline=None, max_examples=15)
@given(before=st.lists(st.integers(0, 9), min_size=2, max_size=2), given=st.lists(FEED, min_size=2, max_size=2))
def test_checkpoints_inside_a_feed_are_those_of_pieces(names, recurrent, before, given) -> None:
    made, dumb = memory(names, recurrent=recurrent), memory(names, recurrent=recurrent)
    feeds: list[Feed] = []
    accepted: dict[int, int] = {}
    for seq, (length, (n, inside, kept)) in enumerate(zip(before, given, strict=True)):
        for one in (made, dumb):
            if length:
                step(one, [Feed(seq, Span(0, length))])
        places = tuple(length + pos for pos in sorted(inside) if pos <= n)
        feeds.append(Feed(seq, Span(length, length + n), revertible=True, checkpoints=places))
        accepted[seq] = min(kept, n)
    claims = step(made, feeds, accepted)
    made.check()
    assert claims.keys() == {feed.seq for feed in feeds if feed.checkpoints and accepted[feed.seq]}
    for feed in feeds:
        if feed.seq in claims:
            wanted = claimed_in_pieces(dumb, feed, accepted[feed.seq])
            assert read_out(made, claims[feed.seq]) == read_out(dumb, wanted)
    only_claims_stay(made, {seq: claim for seq, claim in claims.items() if not before[seq]})


def only_claims_stay(made: Memory, whole: Mapping[int, int]) -> None:
    """Sequences go; of claims that begin at 0 each checkpoint can be resumed at. Then nothing is held."""
    for seq in list(made.sequences):
        made.drop(seq)
    made.check()
    for seq, claim in whole.items():
        for pos in made.claims.of(claim).checkpoints:
            made.claims.assemble(100 * (1 + seq) + pos, [claim], pos)
            made.check()
    made.clear()
    made.check()
    assert made.free() == made.storage.capacity()
    assert made.rows.free == made.rows.capacity


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_step_that_is_given_up_leaves_no_checkpoint(recurrent: bool) -> None:
    made = memory(["causal", "window"], recurrent=recurrent)
    step(made, [Feed(0, Span(0, 5))])
    with nothing_changes(made):
        made.begin(Batch((Feed(0, Span(5, 12), checkpoints=(6, 9, 12)),)))
        made.check()
        made.abandon()
    assert not list(made.claims)


def test_a_checkpoint_inside_a_feed_takes_a_row_and_one_too_many_is_said_before() -> None:
    made = memory([], recurrent=True, rows=3)
    feed = Feed(0, Span(0, 6), checkpoints=(2, 4, 5))
    with nothing_changes(made), pytest.raises(CacheFull, match="rows"):
        made.begin(Batch((feed,)))
    claims = step(made, [feed._replace(checkpoints=(2, 4))])
    assert made.rows.free == 0
    made.claims.drop_checkpoint(claims[0], 2)
    assert made.rows.free == 1


def test_a_layer_that_cannot_say_what_a_part_leaves_is_named_and_the_step_stays_open() -> None:
    made = memory([], recurrent=True)
    plan = made.begin(Batch((Feed(0, Span(0, 6), checkpoints=(2,)),)))
    for layer in STATE.layers:
        made.states.write(layer, plan.states, {"sum": torch.ones(1, 2)})
    with pytest.raises(NotSupported, match="nor be a checkpoint: layer 20"):
        made.commit()
    made.abandon()
    made.check()
    assert made.rows.free == made.rows.capacity


@pytest.mark.parametrize("places", [(0,), (7,), (3, 2), (2, 2), (-1,)])
def test_checkpoints_that_are_not_inside_the_feed_are_refused(places: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match="has checkpoints behind 0 up to its end"):
        Batch((Feed(0, Span(0, 6), checkpoints=places),))
    with pytest.raises(BadRequest, match="stores its tokens"):
        Batch((Feed(0, Span(0, 6), stores=False, checkpoints=(3,)),))
    with pytest.raises(BadRequest, match="looks ahead: there can be no checkpoint"):
        Batch((Feed(0, Span(0, 6), checkpoints=(3,)),), ((0, Span(2, 5)),))
