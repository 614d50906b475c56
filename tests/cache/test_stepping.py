"""A step as a block, which is abandoned unless it was committed."""

import pytest

from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.cache.tagged import Tagged
from tests.laws.watch import nothing_changes


def test_a_step_that_is_open_at_the_end_of_its_block_is_abandoned() -> None:
    tagged = Tagged(Sdpa())
    tagged.step({0: 9})
    batch = Batch((Feed(0, Span(9, 12)), Feed(1, Span(0, 2))))
    with nothing_changes(tagged.memory), tagged.memory.stepping(batch):
        pass
    with nothing_changes(tagged.memory), pytest.raises(KeyError, match="of the block"), tagged.memory.stepping(batch):
        raise KeyError("of the block")
    with tagged.memory.stepping(batch) as plan:
        assert plan.tokens == 5
        tagged.put(range(5))
        tagged.memory.commit()
    assert (tagged.memory.step, tagged.memory.length(0), tagged.memory.length(1)) == (None, 12, 2)
