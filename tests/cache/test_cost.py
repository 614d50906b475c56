"""What bookkeeping costs, counted in lines of Python that run in it: runs and sequences, never cells or positions."""

import pytest
import torch

from benchmarks.zeros import put_zeros
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span
from tests.counted import lines

PLANES = (Plane("k", 1, 8), Plane("v", 1, 8))


def memory_of(cells: int) -> Memory:
    groups = [
        Group("full", Causal(), PLANES, (0,)),
        Group("window", Sliding(64), PLANES, (1,)),
        Group("chunk", Chunked(128), PLANES, (2,)),
    ]
    names = [group.name for group in groups]
    return Memory(groups, cells=dict.fromkeys(names, cells), dtype=torch.float32, device="meta", backend=Reference())


def step(memory: Memory, sizes: dict[int, int]) -> None:
    put_zeros(memory, begin(memory, sizes))
    memory.commit()


def begin(memory: Memory, sizes: dict[int, int]) -> Plan:
    starts = {seq: memory.length(seq) for seq in sizes}
    return memory.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in sizes.items())))


def lines_of_step(memory: Memory, sizes: dict[int, int]) -> int:
    """Of `begin` and `commit`; what is put between them is not counted."""
    plans: list[Plan] = []
    begun = lines(lambda: plans.append(begin(memory, sizes)))
    put_zeros(memory, plans[0])
    return begun + lines(memory.commit)


@pytest.fixture(scope="module")
def memories() -> list[Memory]:
    """32 sequences that use most of 10^4, 10^5 and 10^6 cells, all of them equally far into a chunk."""
    made = [memory_of(cells) for cells in (10**4, 10**5, 10**6)]
    for memory in made:
        for seq in range(32):
            step(memory, {seq: memory.storage.capacity()["full"] * 9 // 10 // 32 // 128 * 128 + 7})
        step(memory, dict.fromkeys(range(32), 1))
    return made


def test_a_step_costs_the_same_in_a_million_cells(memories: list[Memory]) -> None:
    costs = [lines_of_step(memory, dict.fromkeys(range(32), 1)) for _ in range(3) for memory in memories]
    assert max(costs) - min(costs) < 10, "now and then a free stretch changes its size class"
    assert max(costs) < 32 * 600, "some hundred lines for each sequence, in three groups"


def test_sharing_and_giving_back_cost_the_same_in_a_million_cells(memories: list[Memory]) -> None:
    def share(memory: Memory) -> None:
        kept = memory.fork(3, 99, memory.length(3) - 1)
        memory.remove(99, Span(memory.can_cut(99, kept - 1), kept))
        memory.drop(99)

    costs = [lines(lambda m=memory: share(m)) for memory in memories]
    assert costs[0] == costs[1] == costs[2]
    assert costs[0] < 1000


def test_sharing_costs_runs_not_tokens() -> None:
    """Twice the runs, twice the lines at most; twice the tokens in them, not one line more."""

    def cost(runs: int, tokens: int) -> int:
        memory = memory_of(100_000)
        for _ in range(runs):  # two sequences in turn, which lie behind each other: every turn is a run
            step(memory, {0: tokens})
            step(memory, {1: tokens})
            memory.fork(1, 2, memory.length(1))
            memory.drop(2)
        return lines(lambda: (memory.fork(0, 3, memory.length(0)), memory.drop(3)))

    assert cost(4, 200) == cost(4, 400)
    assert cost(8, 200) <= 2 * cost(4, 200)


def test_past_forks_do_not_make_the_next_one_dearer() -> None:
    memory = memory_of(10_000)
    step(memory, {0: 1000})
    first = lines(lambda: (memory.fork(0, 1, 700), memory.drop(1)))
    for upto in range(937, 1000):
        memory.fork(0, 1, upto)
        memory.drop(1)
    assert lines(lambda: (memory.fork(0, 1, 700), memory.drop(1))) == first


def test_a_long_life_does_not_make_a_step_dearer() -> None:
    memory = memory_of(2000)
    costs: list[int] = []
    for round_ in range(40):
        for seq in range(4):
            if memory.length(seq) > 300:
                memory.drop(seq)
        for _ in range(20):
            step(memory, dict.fromkeys(range(4), 1))
        costs.append(lines_of_step(memory, dict.fromkeys(range(4), 1)))
        assert round_ < 10 or costs[-1] <= 2 * max(costs[:10])
    memory.check()


def test_a_piece_of_compaction_costs_what_it_moves_beside_any_number_of_claims() -> None:
    def cost(claims: int) -> list[int]:
        memory = memory_of(20_000)
        for number in range(claims):
            start = memory.length(number % 4)
            step(memory, {number % 4: 8})
            memory.claims.make(number % 4, Span(start, start + 8))
        for seq in range(4):
            memory.drop(seq)
        moved: list[int] = []
        costs = [lines(lambda: moved.append(memory.storage.compact(64, "full"))) for _ in range(4)]
        assert all(moved)
        return costs[1:]  # the first one finds what lies in place already

    assert max(cost(300)) < 1.5 * max(cost(60))
