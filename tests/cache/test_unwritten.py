"""A step is kept only if every layer has put all planes of its new tokens: else cells would show what was in them."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.zeros import put_zeros
from kvcellar.errors import WrongStage
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal, Input, Sliding
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span
from tests.cache.test_cost import lines
from tests.laws.watch import nothing_changes

K, V, INDEX = Plane("k", 1, 4), Plane("v", 1, 8), Plane("index", 1, 2)
OLD, NEW = 7.0, 1.0


def memory_of(*groups: Group, cells: int = 8) -> Memory:
    """Without groups: two full layers with a third plane, one sliding layer, one layer of an input."""
    groups = groups or (
        Group("full", Causal(), (K, V, INDEX), (0, 2)),
        Group("window", Sliding(4), (K, V), (1,)),
        Group("cross", Input(3), (K, V), (7,)),
    )
    names = [group.name for group in groups]
    return Memory(groups, cells=dict.fromkeys(names, cells), dtype=torch.float32, device="cpu", backend=Reference())


def begin(memory: Memory, feeds: dict[int, int]) -> Plan:
    starts = {seq: memory.length(seq) for seq in feeds}
    return memory.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items())))


def put(memory: Memory, plan: Plan, value: float, layers: tuple[int, ...] = (0, 1, 2)) -> None:
    rows = plan.stored
    for layer in layers:
        memory.put(layer, torch.full((rows, 1, 4), value), torch.full((rows, 1, 8), value))
        if layer != 1:
            memory.put(layer, index=torch.full((rows, 1, 2), value))


UNWRITTEN: dict[str, tuple[Callable[[Memory, Plan], object], str]] = {
    "nothing": (
        lambda m, p: None,
        r"layers 0 \(k, v, index\), 2 \(k, v, index\) of group full; layers 1 \(k, v\) of group window",
    ),
    "one layer only": (
        lambda m, p: put(m, p, NEW, (0,)),
        r"put: layers 2 \(k, v, index\) of group full; layers 1 \(k, v\) of group window\.",
    ),
    "all but one group": (lambda m, p: put(m, p, NEW, (0, 2)), r"put: layers 1 \(k, v\) of group window\."),
    "all but k and index of a layer": (
        lambda m, p: (put(m, p, NEW, (0, 1)), m.put(2, v=torch.ones(p.stored, 1, 8))),
        r"put: layers 2 \(k, index\) of group full\.",
    ),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_a_step_that_was_not_put_whole_is_refused_stays_open_and_can_be_completed(name: str) -> None:
    act, says = UNWRITTEN[name]
    memory = memory_of()
    plan = begin(memory, {0: 2, 1: 1})
    act(memory, plan)
    for accepted in (None, {0: 1, 1: 0}):
        with nothing_changes(memory), pytest.raises(WrongStage, match=says):
            memory.commit(accepted)
    assert memory.step is not None
    assert memory.step is not None
    for group in memory.storage.groups:
        for layer in group.layers if not group.of_input else ():
            for plane in group.planes:
                if (layer, plane.name) not in memory.step.written:
                    memory.put(layer, **{plane.name: torch.ones(plan.stored, plane.heads, plane.size)})
    memory.commit()
    memory.check()
    assert (memory.length(0), memory.length(1)) == (2, 1)


def test_what_a_dropped_sequence_left_in_cells_is_never_seen() -> None:
    memory = memory_of()
    put(memory, begin(memory, {0: 8}), OLD)
    memory.commit()
    memory.drop(0)
    begin(memory, {1: 8})
    with pytest.raises(WrongStage, match="before all planes were put"):
        memory.commit()
    memory.abandon()
    memory.check()
    assert not memory.sequences
    assert memory.free() == memory.storage.capacity()
    put(memory, begin(memory, {1: 6}), NEW)
    memory.commit()
    put(memory, begin(memory, {1: 1}), NEW)
    for layer in (0, 1, 2):
        assert all(plane.eq(NEW).all() for plane in memory.get(layer).dense()[:2])
    memory.commit()


def test_a_step_that_keeps_no_token_needs_nothing() -> None:
    memory = memory_of()
    begin(memory, {0: 3, 1: 2})
    memory.commit({0: 0, 1: 0})
    assert (memory.length(0), memory.length(1)) == (0, 0)
    assert memory.free() == memory.storage.capacity()


def test_rows_that_only_ask_need_nothing() -> None:
    memory = memory_of()
    put(memory, begin(memory, {0: 3}), NEW)
    memory.commit()
    memory.begin(Batch((Feed(0, Span(2, 3), stores=False),)))
    memory.commit()
    memory.begin(Batch((Feed(0, Span(2, 3), stores=False), Feed(1, Span(0, 1)))))
    with pytest.raises(WrongStage, match="before all planes were put"):
        memory.commit()
    memory.commit({1: 0})
    assert (memory.length(0), memory.length(1)) == (3, 0)


def test_layers_that_read_the_planes_of_others_put_nothing() -> None:
    """Only layers of a group store: a layer that shares the K/V of layer 0 is in none."""
    memory = memory_of(Group("full", Causal(), (K, V), (0,)))
    put_zeros(memory, begin(memory, {0: 3}))
    memory.commit()
    assert memory.length(0) == 3


def test_to_see_that_all_was_put_costs_groups_not_layers() -> None:
    """Twice the layers, not one line more."""

    def cost(layers: int) -> int:
        memory = memory_of(Group("full", Causal(), (K, V), tuple(range(layers))))
        put_zeros(memory, begin(memory, {0: 3}))
        return lines(memory.commit)

    assert cost(4) == cost(8)
