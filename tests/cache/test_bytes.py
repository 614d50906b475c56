"""Bytes that a memory says it takes are those of the tensors that are really there."""

import gc

import pytest
import torch

from kvcellar.attention.sdpa import Sdpa
from kvcellar.cache.group import Group
from kvcellar.cache.layouts import Causal, Sliding
from kvcellar.cache.memory import Memory
from kvcellar.contracts import Arrangement, Plane, Storage

GROUPS = [
    Group("full", Causal(), (Plane("k", 2, 24), Plane("v", 2, 40)), (0, 3, 5)),
    Group("window", Sliding(8), (Plane("k", 1, 64), Plane("v", 1, 16)), (1, 2)),
]
TURNED = Storage("int4", hadamard=True)
CELLS = {"full": 33, "window": 17}


class Wishes(Sdpa):
    def __init__(self, arrangement: Arrangement, padding: int) -> None:
        self.arrangement, self.padding = arrangement, padding


def storages() -> dict[int, int]:
    """Bytes of every storage that some tensor of this process holds, by where it is."""
    gc.collect()
    there = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    tensors = [tensor for tensor in there if tensor.device.type == "cpu" and tensor.layout is torch.strided]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("arrangement", "padding"), [("token", 1), ("head", 1), ("transposed", 16)])
def test_bytes_are_those_of_the_storages(dtype: torch.dtype, arrangement: Arrangement, padding: int) -> None:
    memory = Memory(GROUPS, cells=CELLS, dtype=dtype, device="cpu", backend=Wishes(arrangement, padding))
    mine = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for held in memory._held
        for layer in held.group.layers
        for plane in held.group.planes
        for tensor in held.pool.stored(layer, plane.name)._tensors
    }
    assert memory.bytes == sum(mine.values())
    places = {name: -(-(cells + 1) // padding) * padding for name, cells in CELLS.items()}
    assert memory.bytes == sum(group.bytes_per_cell(dtype.itemsize) * places[group.name] for group in GROUPS)


ROTATED = [
    Group("full", Causal(), (Plane("k", 2, 24, TURNED), Plane("v", 2, 24, TURNED)), (0, 3, 5)),
    Group("window", Sliding(8), (Plane("k", 1, 64, TURNED), Plane("v", 1, 16)), (1, 2)),
]


@pytest.mark.parametrize("groups", [GROUPS, ROTATED], ids=["as computed", "rotated"])
def test_a_memory_takes_nothing_beside_what_it_says(groups: list[Group]) -> None:
    before = storages()
    memory = Memory(groups, cells=CELLS, dtype=torch.float32, device="cpu", backend=Sdpa())
    after = storages()
    new = {where: size for where, size in after.items() if where not in before}
    assert sum(new.values()) == memory.bytes
    assert memory.bytes == sum(group.bytes(CELLS[group.name], 4, Sdpa()) for group in groups)
    memory.resize("full", 50)
    after = storages()
    assert sum(size for where, size in after.items() if where not in before) == memory.bytes


def test_scales_are_counted() -> None:
    planes = (Plane("k", 2, 64, Storage("int8")), Plane("v", 2, 64, Storage("int4")))
    memory = Memory(
        [Group("full", Causal(), planes, (0,))], cells={"full": 9}, dtype=torch.float32, device="cpu", backend=Sdpa()
    )
    assert memory.bytes == 10 * 2 * ((64 + 2) + (32 + 2))
