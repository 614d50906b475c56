"""What frees memory for a step, in the order in which it is tried."""

from types import SimpleNamespace

from benchmarks.replay import Replay, Turn
from kvcellar.memory.plan import Feed
from kvcellar.memory.spans import Span
from tests.prefix.test_cost import some


def test_rows_that_the_store_reads_are_given_up_for_a_step() -> None:
    replay = Replay("hybrid", cells=10_000, rows=8, spare=0)
    replay.serve(Turn(some(0, 1040), [1]))
    manager, memory = replay.manager, replay.manager.memory
    readings = [memory.claims.reading(node.claim, Span(node.start, node.end)) for node in manager.prefixes.tree.nodes()]
    stopped: list[object] = []

    def stop_reading() -> bool:
        if not readings:
            return False
        readings.pop().close()
        stopped.append(1)
        return True

    manager.cache.store = SimpleNamespace(stop_reading=stop_reading, restores=None, pump=lambda budget, **how: False)
    while manager.prefixes.evict_row():
        pass
    free = memory.rows.free or 0
    assert free < 8, "the readings hold no rows"

    places = {seq: manager.prefixes.begin(seq, "", b"") for seq in range(64)}

    def feeds(count: int, *checkpoints: int) -> tuple[Feed, ...]:
        few = [Feed(seq, Span(0, 512), checkpoints=checkpoints) for seq in range(count)]
        return manager.cache.with_rows(few, manager.evict, places)

    assert {feed.checkpoints for feed in feeds(free, 256)} == {()}
    assert not stopped, "a checkpoint that may be left out stopped the store"
    feeds(free + 1)
    assert stopped == [1]
    assert (memory.rows.free or 0) > free
