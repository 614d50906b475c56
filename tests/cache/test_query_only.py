"""Rows that only ask: they see what is there, get no cell, and leave everything as it was."""

import pytest

from kvcellar.attention.sdpa import Sdpa
from kvcellar.errors import BadRequest, UnknownSequence
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span
from tests.cache.told import Told
from tests.laws.watch import nothing_changes


def test_after_rows_that_only_ask_nothing_has_changed() -> None:
    told = Told(Sdpa())
    told.step({0: 9})
    for end in (told.memory.commit, told.memory.abandon):
        with nothing_changes(told.memory):
            plan = told.memory.begin(Batch((Feed(0, Span(8, 9), stores=False),)))
            assert plan.groups[0].segments[0].new == ()
            assert told.visible(0) == [set(told.tokens[0])]
            with pytest.raises(BadRequest, match=r"is \[0, 2, 4\] of floats"):
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
    with nothing_changes(told.memory), pytest.raises(BadRequest, match="after this fork it would have 5"):
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
