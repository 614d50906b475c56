"""Query-only rows see what is stored, get no cell, and change nothing."""

import pytest

from kvcellar.errors import BadRequest, UnknownSequence
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.cache.tagged import Tagged
from tests.laws.watch import nothing_changes


def test_after_rows_that_only_ask_nothing_has_changed() -> None:
    tagged = Tagged(Sdpa())
    tagged.step({0: 9})
    for end in (tagged.memory.commit, tagged.memory.abandon):
        with nothing_changes(tagged.memory):
            plan = tagged.memory.begin(Batch((Feed(0, Span(8, 9), stores=False),)))
            assert plan.groups[0].segments[0].new == ()
            assert tagged.visible(0) == [set(tagged.tokens[0])]
            with pytest.raises(BadRequest, match=r"is \[0, 2, 4\] of floats"):
                tagged.put([5])
            end()


def test_nothing_of_it_can_be_accepted() -> None:
    tagged = Tagged(Sdpa())
    tagged.step({0: 9})
    tagged.memory.begin(Batch((Feed(0, Span(8, 9), stores=False),)))
    with pytest.raises(BadRequest, match="sequences \\[0\\] store nothing"):
        tagged.memory.commit({0: 1})
    tagged.memory.commit()
    tagged.check()


def test_a_sequence_that_is_not_there_cannot_be_asked() -> None:
    tagged = Tagged(Sdpa())
    with pytest.raises(UnknownSequence):
        tagged.memory.begin(Batch((Feed(3, Span(0, 1), stores=False),)))


def test_a_fork_brings_no_more_than_the_limit() -> None:
    tagged = Tagged(Sdpa(), names=["full"], limits={2: 4})
    tagged.step({1: 10, 2: 1})
    with (
        nothing_changes(tagged.memory),
        pytest.raises(BadRequest, match=r"sequence 2 may have 4 tokens; .* fork .* 10"),
    ):
        tagged.memory.fork(1, 2, 10)
    with nothing_changes(tagged.memory), pytest.raises(BadRequest, match="after this fork it would have 5"):
        tagged.memory.fork(1, 2, 5)
    assert tagged.memory.fork(1, 2, 4) == 4
    assert tagged.memory.fork(1, 3, 10) == 10


def test_a_sequence_has_its_limit_and_asking_does_not_count() -> None:
    tagged = Tagged(Sdpa(), names=["full"], limits={0: 5})
    tagged.step({0: 5, 1: 9})
    with nothing_changes(tagged.memory), pytest.raises(BadRequest, match=r"sequence 0 may have 5 tokens; .* 6"):
        tagged.begin({0: 1})
    tagged.memory.begin(Batch((Feed(0, Span(5, 6), stores=False),)))
    tagged.memory.abandon()
    everyone = Tagged(Sdpa(), names=["full"], limits=4)
    with pytest.raises(BadRequest, match="sequence 7 may have 4 tokens"):
        everyone.begin({7: 5})
