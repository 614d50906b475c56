"""Temporary memory of a shift and a compaction: never more than `staging`, however much is moved."""

import pytest
import torch

from benchmarks.zeros import put_zeros
from kvcellar.errors import CacheFull
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.group import PIECE, Group
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Rotation, StoredAs
from kvcellar.memory.spans import Span
from tests.laws.watch import Allocations, nothing_changes

WAYS = ("auto", "float64", "bfloat16", "fp8", "int8", "int4", "int8+hadamard", "k=int4+hadamard,v=float16")


def memory(text: str, dtype: torch.dtype, size: int, cells: int) -> Memory:
    stored = StoredAs.parse(text)
    planes = (Plane("k", 2, size, stored.k), Plane("v", 2, size // 2, stored.v))
    rotation = Rotation(tuple(0.5**i for i in range(size // 2)))
    group = Group("full", Causal(), planes, (0, 1), {layer: {"k": rotation} for layer in (0, 1)}, no_shift=None)
    return Memory([group], cells={"full": cells}, dtype=dtype, device="cpu", backend=Sdpa())


def read(kept: Memory, seq: int, count: int) -> None:
    put_zeros(kept, kept.begin(Batch((Feed(seq, Span(kept.length(seq), kept.length(seq) + count)),))))
    kept.commit()


@pytest.mark.parametrize("text", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("size", [4, 80, 192])
@pytest.mark.parametrize("cells", [8, 6 * PIECE])
def test_no_edit_takes_more_than_is_said(text: str, dtype: torch.dtype, size: int, cells: int) -> None:
    kept = memory(text, dtype, size, cells)
    part = cells // 4
    for seq in (0, 1, 0):
        read(kept, seq, part)
    with Allocations() as shift:
        kept.remove(0, Span(part - 1, part))
    kept.drop(1)
    with Allocations() as compaction:
        while kept.storage.compact(cells):
            pass
    kept.check()
    assert 0 < shift.most <= kept.storage.staging
    assert 0 < compaction.most <= kept.storage.staging


@pytest.mark.parametrize("text", WAYS)
@pytest.mark.parametrize("free", [0, 5])
def test_keys_that_are_turned_in_place_take_what_they_held_and_no_more(text: str, free: int) -> None:
    kept = memory(text, torch.float32, 80, 3 * PIECE)
    read(kept, 0, 3 * PIECE - free)
    in_place = 3 * PIECE - 2 * free - 7
    with Allocations() as shift:
        kept.remove(0, Span(0, 7))
    kept.check()
    assert shift.most <= kept.storage.staging + in_place * kept.storage.groups[0].undo(4)


@pytest.mark.parametrize("less", [0, 1])
def test_they_are_turned_only_if_the_cap_has_room_for_what_they_held(less: int) -> None:
    kept = memory("int8+hadamard", torch.float32, 80, 64)
    read(kept, 0, 64)
    kept.storage.max_bytes = kept.storage.bytes + kept.storage.staging + 60 * kept.storage.groups[0].undo(4) - less
    if less:
        with nothing_changes(kept), pytest.raises(CacheFull, match="need 60 cells"):
            kept.remove(0, Span(0, 4))
    else:
        assert kept.remove(0, Span(0, 4)) == 60


def test_how_much_is_moved_does_not_matter() -> None:
    taken: list[int] = []
    for pieces in (1, 3):
        kept = memory("auto", torch.float16, 4, 8 * PIECE)
        read(kept, 0, pieces * PIECE + 1)
        with Allocations() as shift:
            kept.remove(0, Span(0, 1))
        taken.append(shift.most)
    assert taken[0] == taken[1]
