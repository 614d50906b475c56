"""A reserved step: the worst there can be, tried without touching anything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import CapacityTooSmall, WrongStage
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Scoring
from kvcellar.memory.spans import Span
from tests.cache.tagged import Tagged
from tests.laws.watch import nothing_changes

law = settings(derandomize=True, deadline=None, max_examples=30)


@law
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(0, 30),
    st.sampled_from([Sdpa, Reference]),
)
def test_it_reads_all_that_positions_let_it_see_and_changes_nothing(feeds, there: int, backend) -> None:
    tagged = Tagged(backend(), 64)
    if there:
        tagged.step({0: there, 7: 2})
    batch = Batch(tuple(Feed(seq, Span(at, at + n)) for seq, (at, n) in enumerate(feeds)))
    with nothing_changes(tagged.memory):
        plan = tagged.memory.begin(batch, reserve=True)
        assert plan.feeds == batch.feeds
        for index, group in enumerate(tagged.groups):
            cells: set[int] = set()
            for feed, segment in zip(batch.feeds, plan.groups[index].segments, strict=True):
                lowest = group.layout.lowest(feed.pos.start)
                mine = [cell for run in segment.runs for cell in range(run.cell, run.end)]
                assert (segment.first, len(mine), len(set(mine))) == (lowest, feed.pos.end - lowest, len(mine))
                assert all(1 <= cell <= 64 for cell in mine)
                assert len(mine) == 1 or len(segment.runs) > 1, "it is not scattered"
                assert sum(run.n for run in segment.new) == len(feed.pos)
                cells |= set(mine)
            needs = sum(feed.pos.end - group.layout.lowest(feed.pos.start) for feed in batch.feeds)
            assert len(cells) == min(64, needs), "sequences have more in common than they must"
        tagged.put([12345] * plan.tokens)
        for layer in range(2 * len(tagged.groups)):
            q = torch.ones(plan.tokens, 4, 4)
            assert tagged.memory.attend(layer, q, Scoring(1.0)).shape == (plan.tokens, 4, 8)
            assert tagged.memory.get(layer).dense()[2].shape[0] == plan.tokens
        tagged.memory.check()
        tagged.memory.abandon()
    tagged.check()


def test_it_cannot_be_kept_nor_another_step_begun_beside_it() -> None:
    tagged = Tagged(Sdpa())
    tagged.step({0: 3})
    batch = Batch((Feed(0, Span(9, 10)),))
    with nothing_changes(tagged.memory):
        tagged.memory.begin(batch, reserve=True)
        with pytest.raises(WrongStage, match="reserved"):
            tagged.memory.commit()
        with pytest.raises(WrongStage):
            tagged.begin({0: 1})
        tagged.memory.abandon()
    tagged.step({0: 1})
    tagged.check()


def test_a_full_memory_can_be_reserved_and_a_position_that_no_memory_holds_cannot() -> None:
    tagged = Tagged(Sdpa(), 16, names=["full", "window"])
    tagged.step({0: 16})
    with nothing_changes(tagged.memory):
        tagged.memory.begin(Batch((Feed(0, Span(12, 16)), Feed(1, Span(15, 16)))), reserve=True)
        tagged.memory.abandon()
        with pytest.raises(CapacityTooSmall, match=r"17 cells in group full, which has 16.*context or step_tokens"):
            tagged.memory.begin(Batch((Feed(1, Span(16, 17)),)), reserve=True)
