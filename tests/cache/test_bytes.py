"""The bytes that a memory reports are those of its tensors."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from kvcellar.errors import CapacityTooSmall
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.pool import Pool
from kvcellar.memory.kv.states import States
from kvcellar.memory.memory import Memory
from kvcellar.memory.shapes import Arrangement, Kind, Plane, Recurrent, StatePlane, Storage
from tests.cache.tagged import Tagged
from tests.laws.watch import Wishes, nothing_changes

GROUPS = [
    Group("full", Causal(), (Plane("k", 2, 24), Plane("v", 2, 40)), (0, 3, 5)),
    Group("window", Sliding(8), (Plane("k", 1, 64), Plane("v", 1, 16)), (1, 2)),
]
TURNED = Storage("int4", hadamard=True)
CELLS = {"full": 33, "window": 17}


def storages() -> dict[int, int]:
    """Bytes of every storage that some tensor of this process holds, by where it is."""
    gc.collect()
    there = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    tensors = [tensor for tensor in there if tensor.device.type == "cpu" and tensor.layout is torch.strided]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arrangement", ["token", "head"])
def test_bytes_are_those_of_the_storages(dtype: torch.dtype, arrangement: Arrangement) -> None:
    memory = Memory(GROUPS, cells=CELLS, dtype=dtype, device="cpu", backend=Wishes(arrangement))
    mine = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for held in memory.storage.stores
        for layer in held.group.layers
        for plane in held.group.planes
        for tensor in held.pool.planes(layer)[plane.name]._tensors
    }
    assert memory.storage.bytes == sum(mine.values())
    places = {name: cells + 1 for name, cells in CELLS.items()}
    assert memory.storage.bytes == sum(group.bytes_per_cell(dtype.itemsize) * places[group.name] for group in GROUPS)


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
    assert sum(new.values()) == memory.storage.bytes
    assert memory.storage.bytes == sum(group.bytes(CELLS[group.name], 4) for group in groups)


def test_a_cap_that_the_planes_do_not_fit_is_refused_before_they_are_made() -> None:
    fits = Tagged(Sdpa(), 30, names=["full"]).memory.storage
    need = fits.bytes + fits.staging
    Tagged(Sdpa(), 30, names=["full"], max_bytes=need)
    with mock.patch.object(torch, "empty", side_effect=AssertionError):
        with pytest.raises(CapacityTooSmall, match=f"{need} bytes would be needed: {fits.bytes} for planes"):
            Tagged(Sdpa(), 30, names=["full"], max_bytes=need - 1)
    tagged = Tagged(Sdpa(), 30, names=["full"], max_bytes=need + 7)
    with nothing_changes(tagged.memory), pytest.raises(CapacityTooSmall, match="step_tokens"):
        tagged.memory.storage.leave_room(8)
    tagged.memory.storage.leave_room(7)


def test_scales_are_counted() -> None:
    planes = (Plane("k", 2, 64, Storage("int8")), Plane("v", 2, 64, Storage("int4")))
    memory = Memory(
        [Group("full", Causal(), planes, (0,))], cells={"full": 9}, dtype=torch.float32, device="cpu", backend=Sdpa()
    )
    assert memory.storage.bytes == 10 * 2 * ((64 + 2) + (32 + 2))


ROW = (StatePlane("state", (64, 64), "float32"), StatePlane("conv", (64, 3), "bfloat16"))


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from Linux's /proc")
@pytest.mark.parametrize("arrangement", ["token", "head"])
@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_cells_and_rows_take_no_memory_before_they_are_used(arrangement: Arrangement, kind: Kind) -> None:
    storage = Storage(kind, hadamard=kind == "int4")
    groups = [Group("full", Causal(), (Plane("k", 2, 64, storage), Plane("v", 2, 64, storage)), (0, 1, 2))]
    before = resident()
    memory = Memory(
        groups,
        cells={"full": 300_000 if kind == "float32" else 2_000_000},
        dtype=torch.float32,
        device="cpu",
        backend=Wishes(arrangement),
        recurrent=Recurrent({3: ROW, 4: ROW}),
        rows=8000,
    )
    assert memory.storage.bytes > 700 << 20
    assert resident() - before < 32 << 20
    memory.check()


@pytest.fixture
def undefined_is_nan() -> Iterator[None]:
    """What torch allocates without a value is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("undefined_is_nan")
@pytest.mark.parametrize("arrangement", ["token", "head"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8", "int8", "int4"])
def test_only_the_null_place_is_defined_when_planes_are_made(arrangement: Arrangement, kind: Kind) -> None:
    group = Group("full", Causal(), (Plane("k", 2, 64, Storage(kind)),), (0,))
    pool = Pool(group, Wishes(arrangement), cells=9, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(pool.planes(0)["k"].values(torch.tensor([0])), torch.zeros(1, 2, 64))
    assert pool.planes(0)["k"].values(torch.tensor([9])).ne(0).all()


@pytest.mark.usefixtures("undefined_is_nan")
def test_only_the_null_row_is_defined_when_states_are_made() -> None:
    states = States(Recurrent({3: ROW}), rows=2, device=torch.device("cpu"))
    states.check()
    assert all(plane[1:].isnan().all() for plane in states._planes[3].values())
