"""Step tables have the same addresses in every step of the same size, and hold what belongs to the open one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zeros import put_zeros
from kvcellar.memory.attention.buckets import PADDED
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.history import SMALLEST, Backend, StepTables
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=70), min_size=1, max_size=8))
def test_what_is_filled_lies_where_it_lay_and_zeros_lie_behind_it(rows: list[list[int]]) -> None:
    tables, seen = StepTables(torch.device("cpu"), torch.float32), dict[int, int]()
    for row in rows:
        for values in (torch.tensor(row, dtype=torch.long), row):
            filled = tables.fill("row", values)
            bucket = max(SMALLEST, 1 << (len(row) - 1).bit_length())
            assert filled.tolist() == row
            assert seen.setdefault(bucket, filled.data_ptr()) == filled.data_ptr()
            whole = filled.as_strided((bucket,), (1,))
            assert whole[len(row) :].tolist() == [0] * (bucket - len(row))


def memory(backend: Backend) -> Memory:
    planes = (Plane("k", 2, 8), Plane("v", 2, 8))
    group = Group("g", Causal(), planes, (0, 1))
    return Memory([group], cells={"g": 4000}, dtype=torch.float32, device="cpu", backend=backend)


def decode(kept: Memory, seqs: list[int]) -> list[int]:
    """Addresses of what a decode step reads: where it writes, and the tensors that the backend made."""
    feeds = (Feed(seq, Span(kept.length(seq), kept.length(seq) + 1)) for seq in seqs)
    put_zeros(kept, kept.begin(Batch(tuple(feeds))))
    step = kept.get(0).step
    assert kept.get(1).step is step
    made = step.prepared if isinstance(step.prepared[0], slice) else step.prepared[0]
    found = [step.cells.data_ptr(), *(x.data_ptr() for x in (made.cells, made.bias))]
    kept.commit()
    return found


def read(kept: Memory, lengths: list[int]) -> None:
    for seq, length in enumerate(lengths):
        put_zeros(kept, kept.begin(Batch((Feed(seq, Span(0, length)),))))
        kept.commit()


def test_decode_steps_of_a_bucket_read_the_same_addresses() -> None:
    kept = memory(Sdpa(fused=True))
    read(kept, [100, 60, 33])
    first = decode(kept, [0, 1, 2])
    put_zeros(kept, kept.begin(Batch((Feed(0, Span(101, 161)),))))  # another kind of step in between
    kept.commit()
    kept.drop(0)
    read(kept, [100])
    assert decode(kept, [0, 1, 2]) == first


@pytest.mark.parametrize("lengths", [[1000, 1, 1, 1, 1, 1, 1, 1], [800, 400, 200, 100, 50, 25, 12, 6], [500] * 7])
def test_padding_is_bounded(lengths: list[int]) -> None:
    kept = memory(Sdpa(fused=True))
    read(kept, lengths)
    feeds = (Feed(seq, Span(length, length + 1)) for seq, length in enumerate(lengths))
    kept.begin(Batch(tuple(feeds)))
    prepared = kept.get(0).step.prepared
    buckets = [prepared] if isinstance(prepared[0], slice) else prepared
    gathered = sum(bucket.cells.numel() // 2 for bucket in buckets)  # of two heads each
    assert gathered <= PADDED * 9 / 8 * (sum(lengths) + 8 * len(lengths))
    assert len(buckets) <= 3
