"""A memory of a million cells, 95 % full, with 64 sequences that come and go for many steps.

Now and then a piece is compacted, and the middle of a sequence removed.

Nothing is stored (meta device): what is watched is the bookkeeping. There is never a `CacheFull` while free cells
suffice, the bytes stay as they are, and a step costs the same at the end as at the beginning: in calls, not in seconds.
"""

import sys
from collections.abc import Callable
from random import Random

import pytest
import torch

from benchmarks.zeros import put_zeros
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal, Sliding
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.shapes import Plane, Rotation
from kvcellar.memory.spans import Span
from tests.laws.watch import Allocations

CELLS, LINES, WRITERS, CHUNK, FULL, STEPS = 1_000_000, 64, 8, 1024, 0.95, 3_000
PLANES = (Plane("k", 1, 4), Plane("v", 1, 4))


class Crowd:
    """64 sequences that read a prompt and then write, some of them in every step, in turns.

    Who has written enough leaves, and another one comes.
    """

    def __init__(self) -> None:
        self.random = Random(7)
        groups = [
            Group("full", Causal(), PLANES, (0,), {0: {"k": Rotation((1.0, 0.1))}}, no_shift=None),
            Group("window", Sliding(256, 512), PLANES, (1,), no_shift=None),
        ]
        cells = {"full": CELLS, "window": LINES * 512 + CHUNK + LINES}
        cap = sum(group.bytes(cells[group.name], 2) for group in groups) + groups[0].staging(CELLS, 2)
        self.memory = Memory(
            groups, cells=cells, dtype=torch.float16, device="meta", backend=Reference(), max_bytes=cap
        )
        self.prompt: dict[int, int] = {}  # by sequence
        self.answer: dict[int, int] = {}
        self.next = self.turn = self.last = 0  # `last` of the open step's sequences
        self.lowest = CELLS
        self.moved = 0
        while len(self.prompt) < LINES:
            self._arrive(int(FULL * CELLS) * (len(self.prompt) + 1) // LINES)
        while self._unread():
            self.step()
        self.lowest = CELLS

    def step(self) -> None:
        put_zeros(self.memory, self.begin())
        self.commit()

    def begin(self) -> Plan:
        memory = self.memory
        for seq in [seq for seq in self.prompt if memory.length(seq) >= self.prompt[seq] + self.answer[seq]]:
            memory.drop(seq)
            del self.prompt[seq], self.answer[seq]
            self._arrive(int(FULL * CELLS))
        feeds: list[Feed] = []
        budget, self.turn = CHUNK, self.turn + 1
        for place, (seq, prompt) in enumerate(self.prompt.items()):
            at = memory.length(seq)
            n = min(prompt - at, budget) if at < prompt else (place + self.turn) % (LINES // WRITERS) == 0
            budget -= n if at < prompt else 0
            if n:
                feeds.append(Feed(seq, Span(at, at + n)))
        self.last = feeds[-1].seq
        need = sum(len(feed.pos) for feed in feeds)
        assert min(memory.free().values()) >= need, "the test needs more cells than are free"
        return memory.begin(Batch(tuple(feeds)))

    def commit(self) -> None:
        memory = self.memory
        memory.commit({self.last: 0} if self.random.random() < 0.01 else None)
        assert memory.storage.bytes + memory.storage.scratch + memory.storage.staging <= (memory.storage.max_bytes or 0)
        self.lowest = min(self.lowest, memory.free()["full"])

    def tidy(self) -> None:
        """A piece of compaction, and a removal from the middle of a sequence: both within the bound."""
        memory = self.memory
        with Allocations() as edits:
            self.moved += memory.storage.compact(4 * CHUNK)
            seq = self.random.choice([seq for seq in memory.sequences if memory.length(seq) > 512])
            length = memory.length(seq)
            assert memory.remove(seq, Span(length - 200, length - 190)) == length - 10
        assert 0 < memory.storage.bytes + memory.storage.scratch + edits.most <= (memory.storage.max_bytes or 0)

    def _unread(self) -> int:
        return sum(max(0, prompt - self.memory.length(seq)) for seq, prompt in self.prompt.items())

    def _arrive(self, full: int) -> None:
        """A new sequence, now and then with the beginning of another; as long as it takes to use `full` cells."""
        seq, self.next = self.next, self.next + 1
        known = 0
        if self.random.random() < 0.3 and self.memory.sequences:
            known = self.memory.fork(self.random.choice(self.memory.sequences), seq, 1 << 60)
        used = CELLS - self.memory.free()["full"] + self._unread()
        self.answer[seq] = 20 + self.random.randrange(400)
        self.prompt[seq] = known + max(1, full - used)


def calls(work: Callable[[], None]) -> int:
    """Python and C functions called in it."""
    count = 0

    def seen(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def play(steps: int) -> None:
    crowd = Crowd()
    costs: list[int] = []
    for number in range(steps):
        if number % 50:
            crowd.step()
        else:
            plans: list[Plan] = []
            begun = calls(lambda plans=plans: plans.append(crowd.begin()))
            put_zeros(crowd.memory, plans[0])
            costs.append(begun + calls(crowd.commit))
        if number % 100 == 99:
            crowd.tidy()
        if number % (steps // 4) == 0:
            crowd.memory.check()
    crowd.memory.check()
    assert crowd.next > LINES + steps // 100, "sequences came and went"
    assert crowd.moved > CELLS // 100, "compaction had something to do"
    assert crowd.lowest < 0.06 * CELLS, f"the memory was {1 - crowd.lowest / CELLS:.0%} full at most"
    early, late = sorted(costs[: len(costs) // 4]), sorted(costs[-len(costs) // 4 :])
    assert late[len(late) // 2] < 1.25 * early[len(early) // 2], "a step costs more as time goes on"
    crowd.memory.clear()
    crowd.memory.check()
    assert crowd.memory.free() == crowd.memory.storage.capacity()


def test_a_full_memory_serves_a_crowd_at_the_same_cost() -> None:
    play(STEPS)


@pytest.mark.slow
def test_a_full_memory_serves_a_crowd_for_long_at_the_same_cost() -> None:
    play(100_000)
