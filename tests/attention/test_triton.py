"""The kernel for GPUs, on a device or by Triton's interpreter, judged by the definition of attention in float64."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvcellar.memory.attention.blocks import SPLIT
from kvcellar.memory.attention.reference import attend_dense
from kvcellar.memory.attention.triton import Triton
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Scoring, StoredAs
from kvcellar.memory.spans import Span
from tests.attention.interpreted import DEVICE, interpreted, products_in_bfloat16
from tests.attention.texts import LAYOUTS, Texts, scorings

pytestmark = [interpreted, pytest.mark.usefixtures(products_in_bfloat16.__name__)]

STEPS = ({0: 7, 1: 1}, {2: 3, 0: 1}, {0: 1, 1: 1, 2: 1}, {1: 9, 2: 2})
GRID = [  # query heads, KV heads, key size, value size
    (torch.float32, (4, 4, 16, 16), LAYOUTS[0], "both"),
    (torch.float32, (6, 2, 24, 8), LAYOUTS[1], "sinks"),
    (torch.float32, (1, 1, 3, 1), LAYOUTS[3], "plain"),
    (torch.bfloat16, (5, 1, 8, 40), LAYOUTS[2], "softcap"),
    (torch.bfloat16, (16, 1, 160, 136), LAYOUTS[0], "sinks"),
    (torch.float16, (6, 2, 24, 8), LAYOUTS[3], "both"),
]


@pytest.mark.parametrize(("dtype", "shape", "layout", "scoring"), GRID, ids=str)
def test_prompts_and_single_tokens_of_unequal_sequences(dtype, shape, layout, scoring) -> None:
    texts = Texts(layout, shape, 128, dtype=dtype, backend=Triton(device=DEVICE), device=DEVICE)
    how = scorings(shape[0], shape[2])[scoring]
    how = how if how.sinks is None else replace(how, sinks=how.sinks.to(DEVICE))
    for feeds in STEPS:
        texts.step(feeds, how)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Read:
    """A text with its keys, values and queries, which is read in steps."""

    def __init__(
        self, layout: Layout, way: str, dtype: torch.dtype, *, tokens: int, sizes: tuple[int, int] = (40, 24)
    ) -> None:
        self.q, self.k, self.v = (
            drawn(number, tokens, heads, size).to(dtype)
            for number, heads, size in ((1, 6, sizes[0]), (2, 2, sizes[0]), (3, 2, sizes[1]))
        )
        self.tokens, self.scoring = tokens, Scoring(0.2, sinks=torch.linspace(-1, 1, 6, device=DEVICE))
        stored = StoredAs.parse(way)
        group = Group("g", layout, (Plane("k", 2, sizes[0], stored.k), Plane("v", 2, sizes[1], stored.v)), (0,))
        self.kept = Memory([group], cells={"g": 2 * tokens}, dtype=dtype, device=DEVICE, backend=Triton(device=DEVICE))

    def cut(self, marks: list[int], start: int = 0) -> tuple[Tensor, Tensor]:
        """[tokens-start,H,Dv], read in steps that begin at `marks`, and what is expected in float64."""
        got, wanted = [], []
        for a, b in pairwise([0, *marks, self.tokens]):
            self.kept.begin(Batch((Feed(0, Span(a, b)),)))
            self.kept.put(0, self.k[a:b], self.v[a:b])
            if a >= start:
                got.append(self.kept.attend(0, self.q[a:b], self.scoring))
                wanted.append(attend_dense(self.q[a:b].double(), *self.kept.get(0).dense(), self.scoring))
            self.kept.commit()
        self.kept.clear()
        return torch.cat(got), torch.cat(wanted)


@pytest.mark.parametrize(
    ("way", "sizes"),
    [
        ("int8", (40, 24)),
        ("k=int8+hadamard,v=int4", (33, 31)),
        ("k=fp8,v=int8", (40, 24)),
        ("int4", (160, 136)),
        ("k=bfloat16,v=fp8", (24, 160)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored_in_fewer_bits_is_read_as_stored(way, sizes, dtype) -> None:
    got, wanted = Read(Sliding(17), way, dtype, tokens=30, sizes=sizes).cut([4, 20, 21])
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), wanted, atol=bound, rtol=bound)


LONG = 2 * SPLIT + 77


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Causal(), torch.float32), (Sliding(SPLIT + 5), torch.bfloat16), (Chunked(SPLIT + 20), torch.float32)],
    ids=str,
)
def test_several_splits_are_one_softmax_however_they_are_divided(layout, dtype, monkeypatch) -> None:
    """By programs of their own, or one after the other in one: the same bits."""
    from kvcellar.memory.attention import triton_launch

    def read() -> tuple[Tensor, Tensor]:
        return Read(layout, "auto", dtype, tokens=LONG).cut([LONG - 7, LONG - 1], LONG - 7)

    apart, wanted = read()
    monkeypatch.setattr(triton_launch, "PROGRAMS", 0)
    assert torch.equal(read()[0], apart)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(apart.double(), wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize("layout", [Causal(), Chunked(20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.bfloat16])
def test_a_row_has_the_same_bits_however_a_text_is_cut(layout, dtype) -> None:
    """Where its tiles have as many rows. Products in float32 are BLAS' in the interpreter, which keeps no order."""
    read = Read(layout, "auto", dtype, tokens=60)
    whole, _ = read.cut([])
    assert torch.equal(read.cut([7, 30])[0], whole)
    few, _ = read.cut([40, 44, 45], 40)
    assert torch.equal(read.cut([40, *range(41, 46)], 40)[0][:5], few[:5])


@pytest.mark.parametrize("way", ["auto", "int8"])
def test_what_is_not_finite_reaches_only_rows_that_see_it(way) -> None:
    for plane in ("k", "v"):
        read = Read(Sliding(10), way, torch.float32, tokens=50)
        sound, _ = read.cut([])
        getattr(read, plane)[20, 1, 3] = torch.nan
        got, _ = read.cut([])
        assert torch.equal(got[:20], sound[:20])
        assert torch.equal(got[30:], sound[30:])
        assert not got[20:30, 3:].isfinite().any()
        assert torch.equal(got[:, :3], sound[:, :3])


def test_queries_may_lie_as_a_model_left_them() -> None:
    read = Read(Causal(), "auto", torch.float32, tokens=6)
    read.kept.begin(Batch((Feed(0, Span(0, 6)),)))
    read.kept.put(0, read.k, read.v)
    wanted = read.kept.attend(0, read.q, read.scoring)
    for order in ((1, 0, 2), (2, 0, 1), (1, 2, 0)):
        turned = read.q.permute(order).contiguous().permute([order.index(axis) for axis in range(3)])
        assert torch.equal(read.kept.attend(0, turned, read.scoring), wanted)
