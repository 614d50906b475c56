"""A row's result, bit for bit, whatever is computed with it; and what cells that it does not see cannot do to it."""

import ctypes
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.kernels.compiled import Native
from kvcellar.memory.attention import cpu
from kvcellar.memory.attention.cpu import CHUNK, Cpu
from kvcellar.memory.attention.reference import attend_dense
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.history import StepTables
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec, Plane, Scoring, StoredAs
from kvcellar.memory.spans import Span

ASK = AttentionSpec(6, 2, 40, 40, dtype="bfloat16", device="cpu")
pytestmark = pytest.mark.skipif(Cpu().refuse(ASK) is not None, reason=f"not compiled here: {Cpu().refuse(ASK)}")
TOKENS = CHUNK + 100
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
STORED = st.sampled_from(["auto", "float32", "bfloat16", "int8", "k=int8+hadamard,v=int4", "k=fp8,v=int8", "int4"])
SHAPES = st.sampled_from([(6, 2, 40, 24), (3, 3, 64, 64), (20, 1, 33, 31), (2, 1, 160, 136), (7, 1, 256, 192)])
LAYOUTS = st.sampled_from([Causal(), Sliding(70), Sliding(CHUNK + 9), Chunked(200)])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Read:
    """A text of TOKENS tokens, with its keys, values and queries, and a memory for it and others."""

    def __init__(
        self, layout: Layout, shape: tuple[int, int, int, int], dtype: torch.dtype, stored: str, *, latent: bool = False
    ) -> None:
        self.heads, groups, size, value_size = shape
        self.latent = latent
        self.q = drawn(1, TOKENS, self.heads, size + value_size * latent).to(dtype)
        self.k, self.v = drawn(2, TOKENS, groups, size).to(dtype), drawn(3, TOKENS, groups, value_size).to(dtype)
        way = StoredAs.parse(stored)
        planes = (Plane("k", groups, size, way.k), Plane("v", groups, value_size, way.v))
        group = Group("g", layout, planes, (0,))
        self.kept = Memory([group], cells={"g": 4 * TOKENS}, dtype=dtype, device="cpu", backend=Cpu())
        self.scoring = Scoring(0.2, sinks=torch.linspace(-1, 1, self.heads))

    def cut(self, marks: list[int], beside: int = 0) -> Tensor:
        """[TOKENS,H,Dv], read in steps that begin at `marks`; other sequences get so many tokens in each step."""
        out: list[Tensor] = []
        for a, b in pairwise([0, *marks, TOKENS]):
            feeds = [Feed(0, Span(a, b))]
            if beside:
                at = self.kept.length(1) if self.kept.has(1) else 0
                feeds.insert(0, Feed(1, Span(at, at + beside)))
            self.kept.begin(Batch(tuple(feeds)))
            rows = [torch.cat([9 * x[:beside], x[a:b]]) for x in (self.q, self.k, self.v)]
            self.kept.put(0, *rows[1:])
            out.append(self.attend(rows[0])[beside:])
            self.kept.commit()
        self.kept.clear()
        return torch.cat(out)

    def attend(self, q: Tensor) -> Tensor:
        if not self.latent:
            return self.kept.attend(0, q, self.scoring)
        history = self.kept.get(0)
        return history.backend.attend_latent(q[None], history, self.scoring)[0]


@settings(derandomize=True, deadline=None, max_examples=10)
@given(LAYOUTS, SHAPES, DTYPES, STORED, st.sets(st.integers(1, TOKENS - 1), max_size=9), st.integers(0, 20))
def test_a_row_has_the_same_bits_however_a_text_is_cut_and_whatever_is_beside_it(
    layout, shape, dtype, stored, marks, beside
) -> None:
    read = Read(layout, shape, dtype, stored)
    assert torch.equal(read.cut(sorted(marks), beside), read.cut([]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [Causal(), Sliding(70)], ids=str)
def test_tokens_one_by_one_have_the_bits_of_the_whole_text(layout, dtype) -> None:
    read = Read(layout, (6, 2, 40, 24), dtype, "auto")
    assert torch.equal(read.cut([400, *range(CHUNK - 20, CHUNK + 20)]), read.cut([]))


@pytest.mark.parametrize("beside", [0, 1], ids=["cells in order", "cells apart"])
@pytest.mark.parametrize("stored", ["auto", "int8", "k=int8+hadamard,v=int4", "k=int4,v=fp8", "k=fp8,v=int8"])
def test_a_few_rows_read_codes_with_the_bits_of_packed_ones(stored, beside) -> None:
    """Of sizes whose codes are not packed for up to 8 rows: one block of scales, two, and a last one of 64."""
    for shape in ((8, 2, 64, 64), (7, 1, 256, 192), (2, 2, 192, 128)):
        read = Read(Sliding(CHUNK + 9), shape, torch.bfloat16, stored)
        assert torch.equal(read.cut([400, 403, 480, *range(CHUNK - 9, CHUNK + 9)], beside), read.cut([]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("marks", [[], [TOKENS - 1], [TOKENS - 30]])
def test_threads_that_share_the_keys_of_one_sequence_change_no_bit(marks, dtype, monkeypatch) -> None:
    read = Read(Causal(), (6, 2, 40, 24), dtype, "auto")
    alone = read.cut(marks)
    monkeypatch.setattr(cpu, "PER_THREAD", 1)
    torch.set_num_threads(5)  # one again for the next test
    assert torch.equal(read.cut(marks), alone)


@pytest.mark.parametrize("stored", ["auto", "int8", "k=int4+hadamard,v=fp8", "v=int8"])
@pytest.mark.parametrize("shape", [(12, 1, 136, 32), (3, 1, 64, 16), (20, 1, 33, 7)], ids=str)
def test_rows_that_attend_to_latents_have_the_same_bits_too(shape, stored, monkeypatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        read = Read(Sliding(CHUNK + 9), shape, dtype, stored, latent=True)
        whole = read.cut([])
        assert torch.equal(read.cut([400, 403, 480, *range(CHUNK - 9, CHUNK + 9)], 3), whole)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "PER_THREAD", 1)
            torch.set_num_threads(5)  # one again for the next test
            assert torch.equal(read.cut([TOKENS - 1]), whole)
        torch.set_num_threads(1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("stored", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [Causal(), Sliding(70)], ids=str)
def test_what_is_not_finite_reaches_only_rows_that_see_it(layout, dtype, stored, value) -> None:
    """A key or a value of a later token, or of one before the window, in the same tile of rows."""
    for plane in ("k", "v"):
        read = Read(layout, (6, 2, 40, 24), dtype, stored)
        sound = read.cut([])
        getattr(read, plane)[100, 1, 3] = value
        got = read.cut([])
        reaches = range(100, 170 if isinstance(layout, Sliding) else TOKENS)
        untouched = [row for row in range(TOKENS) if row not in reaches]
        assert torch.equal(got[untouched], sound[untouched])
        assert not got[reaches, 3:].isfinite().all(-1).any() or plane == "k"


@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_in_latents_reaches_only_rows_that_see_it(dtype, plane) -> None:
    read = Read(Sliding(70), (12, 1, 136, 32), dtype, "auto", latent=True)
    sound = read.cut([])
    getattr(read, plane)[100, 0, 3] = torch.nan
    got = read.cut([])
    untouched = [row for row in range(TOKENS) if row not in range(100, 170)]
    assert torch.equal(got[untouched], sound[untouched])
    assert not got[100:170].isfinite().all(-1).any()


@settings(derandomize=True, deadline=None, max_examples=6)
@given(LAYOUTS, SHAPES, DTYPES, STORED, st.booleans())
def test_every_storage_is_read_about_as_exactly_as_by_sdpa(layout, shape, dtype, stored, softcap) -> None:
    """Root mean square of the differences from attention in float64."""
    read, start = Read(layout, shape, dtype, stored), TOKENS - 40
    scoring = replace(read.scoring, softcap=2.0 if softcap else None)
    for a, b in ((0, start), (start, TOKENS)):
        read.kept.begin(Batch((Feed(0, Span(a, b)),)))
        read.kept.put(0, read.k[a:b], read.v[a:b])
        if b < TOKENS:
            read.kept.commit()
    history, q = read.kept.get(0), read.q[start:]
    expected = attend_dense(q.double(), *history.dense(), scoring)
    portable = Sdpa().prepare(history.step.plan, StepTables(torch.device("cpu"), dtype))
    ours, theirs = read.kept.attend(0, q, scoring), portable.attend(q[None], history, scoring)[0]
    error = [float((got.double() - expected).square().mean().sqrt()) for got in (ours, theirs)]
    assert error[0] <= 1.2 * error[1] + 1e-7


def test_a_native_call_is_good_for_later_steps() -> None:
    """Its arguments stay; what the step is comes from tables at fixed addresses."""
    read = Read(Causal(), (6, 2, 40, 24), torch.float32, "auto")
    q, out = torch.empty(1, 6, 40), torch.empty(1, 6, 24)
    native, backend = None, Cpu()
    for pos in range(40):
        read.kept.begin(Batch((Feed(0, Span(pos, pos + 1)),)))
        read.kept.put(0, read.k[pos : pos + 1], read.v[pos : pos + 1])
        history = read.kept.get(0)
        native = native or backend.native(history, read.scoring, q, out)
        q.copy_(read.q[pos : pos + 1])
        assert call(native) == 0
        assert torch.equal(out, read.kept.attend(0, q, read.scoring))
        read.kept.commit()


def call(native: Native) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(native.function)(native.address)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["auto", "k=float32,v=bfloat16", "int8", "k=int8+hadamard,v=int4", "fp8", "int4"])
def test_a_native_call_stores_the_same_bits(stored, dtype) -> None:
    """Of vectors with outliers, tiny and huge numbers, zeros, what is not finite; while some rows store nothing."""
    for shape in ((6, 2, 40, 24), (3, 3, 160, 33)):
        read, other = Read(Causal(), shape, dtype, stored), Read(Causal(), shape, dtype, stored)
        k, v = read.k[:60].clone(), read.v[:60].clone()
        for x in (k, v):
            for row, times in enumerate((0.0, 1e-9, 1e-5, 1e4, 1e9, 3e38, torch.nan)):
                x[row] *= times
            x[10, 1, 3], x[11, 0, 5], x[12] = torch.inf, -torch.nan, -0.0
        for memory in (read.kept, other.kept):
            memory.begin(Batch((Feed(1, Span(0, 9)),)))
            memory.put(0, k[:9], v[:9])
            memory.commit()
            memory.begin(Batch((Feed(1, Span(3, 7), stores=False), Feed(0, Span(0, 56)))))
        read.kept.put(0, k[4:], v[4:])
        native = Cpu().native_put(other.kept.get(0), k, v)
        assert call(native) == 0
        cells = other.kept.get(0).step.cells
        for name in ("k", "v"):
            pairs = zip(*(one.kept.get(0).planes[name].content(cells) for one in (read, other)), strict=True)
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
