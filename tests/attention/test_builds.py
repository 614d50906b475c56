"""The kernel compiled for several instruction sets, judged by dense attention in float64 over a grid."""

import os
import platform
import shutil

import pytest
import torch

from kvcellar.kernels.compiled import COMPILERS
from kvcellar.memory.attention.cpu import Cpu
from kvcellar.memory.attention.reference import attend_dense
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec, Plane, Scoring, StoredAs
from kvcellar.memory.spans import Span

BUILDS = {"native": "", "AVX-512 without BF16": "-mno-avx512bf16", "AVX2": "-mno-avx512f", "portable": "-mno-avx"}
SHAPES = [(14, 2, 64, 64), (4, 4, 128, 96), (9, 1, 40, 72), (2, 1, 256, 256), (2, 2, 33, 31), (2, 1, 512, 64)]
LAYOUTS = [Causal(), Sliding(70), Chunked(64)]
STORED = ["auto", "float32", "k=bfloat16", "int8", "k=int4+hadamard,v=fp8"]
LATENTS = [(8, 512, 64), (20, 136, 16), (3, 33, 7)]  # heads, rank, tail
STEPS = ({0: 90, 1: 3}, {1: 1, 0: 1}, {0: 5, 2: 17}, {1: 40, 2: 1, 0: 2})
SPEC = AttentionSpec(14, 2, 64, 64, dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module", params=BUILDS)
def backend(request) -> Cpu:
    """Compiled once for all tests, and kept in the user's cache."""
    options = BUILDS[request.param]
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if options and platform.machine() != "x86_64":
        pytest.skip("the instruction sets named here are those of x86-64")
    made = Cpu({**os.environ, "CXX": f"{compiler} {options}"} if options and compiler else os.environ)
    if (reason := made.refuse(SPEC)) is not None:
        pytest.skip(f"not compiled here: {reason}")
    return made


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_build_computes_attention(backend, shape, layout, stored) -> None:
    heads, groups, size, value_size = shape
    scoring = Scoring(size**-0.5, softcap=3.0, sinks=torch.linspace(-2, 2, heads))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        way = StoredAs.parse(stored)
        planes = (Plane("k", groups, size, way.k), Plane("v", groups, value_size, way.v))
        kept = Memory([Group("g", layout, planes, (0,))], cells={"g": 300}, dtype=dtype, device="cpu", backend=backend)
        numbers = torch.Generator().manual_seed(1)
        for number, feeds in enumerate(STEPS):
            starts = {seq: kept.length(seq) if kept.has(seq) else 0 for seq in feeds}
            kept.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items())))
            rows = sum(feeds.values())
            kept.put(0, *(torch.randn(rows, p.heads, p.size, generator=numbers).to(dtype) for p in planes))
            q = torch.randn(rows, heads, size, generator=numbers).to(dtype)
            for one in (Scoring(size**-0.5), scoring)[number % 2 :]:
                expected = attend_dense(q.double(), *kept.get(0).dense(), one)
                got = kept.attend(0, q, one)
                torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)
            kept.commit()


@pytest.mark.parametrize("stored", ["auto", "k=float32", "k=int4+hadamard,v=fp8", "k=int8", "v=int8"])
@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_every_build_attends_to_latents_and_their_tails(backend, shape, stored) -> None:
    """All heads share the vectors of both planes, side by side, as keys, and those of the first as values."""
    heads, rank, tail = shape
    capped = Scoring(0.2, softcap=3.0, sinks=torch.linspace(-2, 2, heads))
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        way = StoredAs.parse(stored)
        planes = (Plane("k", 1, rank, way.k), Plane("v", 1, tail, way.v))
        kept = Memory(
            [Group("g", Sliding(70), planes, (0,))], cells={"g": 300}, dtype=dtype, device="cpu", backend=backend
        )
        numbers = torch.Generator().manual_seed(1)
        for number, feeds in enumerate(STEPS):
            starts = {seq: kept.length(seq) if kept.has(seq) else 0 for seq in feeds}
            kept.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items())))
            rows = sum(feeds.values())
            kept.put(0, *(torch.randn(rows, p.heads, p.size, generator=numbers).to(dtype) for p in planes))
            q = (torch.randn(rows, heads, rank + tail, generator=numbers) / (rank + tail) ** 0.5).to(dtype)
            history = kept.get(0)
            latents, tails, visible = history.dense()
            for one in (Scoring(1.0), capped)[number % 2 :]:
                expected = attend_dense(q.double(), torch.cat([latents, tails], -1), latents, visible, one)
                got = history.backend.attend_latent(q[None], history, one)[0]
                torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)
            kept.commit()
