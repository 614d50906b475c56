"""Rows that only ask: they see what is there, get no cell, and leave everything as it was."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.attention.reference import Reference
from kvcellar.attention.sdpa import Sdpa
from kvcellar.errors import BadRequest, UnknownSequence
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span
from tests.cache.told import Told, sees
from tests.laws.watch import nothing_changes

law = settings(derandomize=True, deadline=None, max_examples=30)


@law
@given(
    st.integers(1, 20),
    st.integers(-4, 3),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([Sdpa, Reference]),
)
def test_a_row_that_asks_sees_what_is_there_beside_rows_that_store(length, off, rows, new, first, backend) -> None:
    told = Told(backend(), 128)
    told.step({0: length, 1: 3})
    start = max(0, length + off)
    query = Feed(0, Span(start, start + rows), stores=False)
    feeds = [query, *([Feed(1, Span(3, 3 + new))] if new else [])]
    batch = Batch(tuple(feeds if first else reversed(feeds)))
    held = {group.name: told.memory.held(0)[group.name] for group in told.groups}
    lacks = any(g.layout.lowest(start) < held[g.name].start for g in told.groups)
    blind = any(not any(sees(g.layout, start + rows - 1, k) for k in range(length)) for g in told.groups)
    if lacks or blind:
        with nothing_changes(told.memory), pytest.raises(BadRequest, match=r"a query at \d+ of sequence 0"):
            told.memory.begin(batch)
        return
    plan = told.memory.begin(batch)
    assert (plan.tokens, plan.stored, len(plan.storing)) == (rows + new, new, new)
    told.put(written := list(range(900, 900 + new)))
    now = {0: told.tokens[0], 1: told.tokens[1] + written}
    for group in told.groups:
        wanted = [
            {now[feed.seq][k] for k in range(len(now[feed.seq])) if sees(group.layout, q, k)}
            for feed in batch.feeds
            for q in range(feed.pos.start, feed.pos.end)
        ]
        for layer in group.layers:
            assert told.visible(layer) == wanted, str(group.layout)
            told.attends(layer)
    told.memory.commit()
    told.tokens = now
    told.check()


def test_after_rows_that_only_ask_nothing_has_changed() -> None:
    told = Told(Sdpa())
    told.step({0: 9})
    for end in (told.memory.commit, told.memory.abandon):
        with nothing_changes(told.memory):
            plan = told.memory.begin(Batch((Feed(0, Span(8, 9), stores=False),)))
            assert plan.groups[0].segments[0].new == ()
            assert told.visible(0) == [set(told.tokens[0])]
            with pytest.raises(BadRequest, match="this step stores"):
                told.put([5])
            end()


def test_nothing_of_it_can_be_accepted() -> None:
    told = Told(Sdpa())
    told.step({0: 9})
    told.memory.begin(Batch((Feed(0, Span(8, 9), stores=False),)))
    with pytest.raises(BadRequest, match="sequences \\[0\\] store nothing"):
        told.memory.commit({0: 1})
    told.memory.commit()
    told.check()


def test_a_sequence_that_is_not_there_cannot_be_asked() -> None:
    told = Told(Sdpa())
    with pytest.raises(UnknownSequence):
        told.memory.begin(Batch((Feed(3, Span(0, 1), stores=False),)))


def test_a_fork_brings_no_more_than_the_limit() -> None:
    told = Told(Sdpa(), names=["full"], limits={2: 4})
    told.step({1: 10, 2: 1})
    with nothing_changes(told.memory), pytest.raises(BadRequest, match=r"sequence 2 may have 4 tokens; .* fork .* 10"):
        told.memory.fork(1, 2, 10)
    with nothing_changes(told.memory), pytest.raises(BadRequest, match="fork would bring 5"):
        told.memory.fork(1, 2, 5)
    assert told.memory.fork(1, 2, 4) == 4
    assert told.memory.fork(1, 3, 10) == 10


def test_a_sequence_has_its_limit_and_asking_does_not_count() -> None:
    told = Told(Sdpa(), names=["full"], limits={0: 5})
    told.step({0: 5, 1: 9})
    with nothing_changes(told.memory), pytest.raises(BadRequest, match=r"sequence 0 may have 5 tokens; .* 6"):
        told.begin({0: 1})
    told.memory.begin(Batch((Feed(0, Span(5, 6), stores=False),)))
    told.memory.abandon()
    everyone = Told(Sdpa(), names=["full"], limits=4)
    with pytest.raises(BadRequest, match="sequence 7 may have 4 tokens"):
        everyone.begin({7: 5})
