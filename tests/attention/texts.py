"""Sequences of random keys and values, and the attention over them by its definition, in float64."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Scoring
from kvcellar.memory.spans import Span

LAYOUTS = [Causal(), Sliding(5), Sliding(4, 9), Chunked(6)]
SHAPES = [  # query heads, KV heads, key size, value size
    pytest.param((4, 4, 16, 16), id="a KV head each"),
    pytest.param((6, 2, 24, 8), id="three share one, short values"),
    pytest.param((5, 1, 8, 40), id="all share one, long values"),
    pytest.param((1, 1, 3, 1), id="one head"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def sees(layout: Layout, q: int, k: int) -> bool:
    if isinstance(layout, Sliding):
        return q - layout.window < k <= q
    if isinstance(layout, Chunked):
        return k <= q and k // layout.size == q // layout.size
    return k <= q


@dataclass
class Texts:
    """Sequences with all their keys and values, and a memory that is fed with them."""

    layout: Layout
    shape: tuple[int, int, int, int]
    cells: int
    dtype: torch.dtype = torch.float32
    backend: Backend = field(default_factory=Sdpa)
    spread: float = 1.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        _, kv_heads, size, value_size = self.shape
        planes = (Plane("k", kv_heads, size), Plane("v", kv_heads, value_size))
        self.memory = Memory(
            [Group("g", self.layout, planes, (7,))],
            cells={"g": self.cells},
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
        )
        self.numbers = torch.Generator().manual_seed(1)
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        self.runs = 0

    def draw(self, *shape: int) -> Tensor:
        return (self.spread * torch.randn(shape, generator=self.numbers)).to(self.device, self.dtype)

    def begin(self, feeds: dict[int, int], new: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Open a step in which each sequence gets so many tokens, with any K/V or `new` ones; the queries [T,H,D]."""
        heads, kv_heads, size, value_size = self.shape
        starts = {seq: self.memory.length(seq) for seq in feeds}
        plan = self.memory.begin(
            Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items()))
        )
        self.runs = max(len(segment.runs) for segment in plan.groups[0].segments)
        rows = sum(feeds.values())
        k, v = new or (self.draw(rows, kv_heads, size), self.draw(rows, kv_heads, value_size))
        self.memory.put(7, k, v)
        for seq, new_k, new_v in zip(feeds, k.split(list(feeds.values())), v.split(list(feeds.values())), strict=True):
            old_k, old_v = self.known.get(seq, (new_k[:0], new_v[:0]))
            self.known[seq] = torch.cat([old_k, new_k]), torch.cat([old_v, new_v])
        return self.draw(rows, heads, size)

    def expected(self, q: Tensor, feeds: dict[int, int], scoring: Scoring) -> Tensor:
        """[T,H,Dv], float64."""
        heads, kv_heads, *_ = self.shape
        out: list[Tensor] = []
        for seq, rows in zip(feeds, q.split(list(feeds.values())), strict=True):
            k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in self.known[seq])  # [N,H,D]
            for pos, row in enumerate(rows.double(), len(k) - len(rows)):
                seen = [at for at in range(len(k)) if sees(self.layout, pos, at)]
                scores = scoring.scale * torch.einsum("hd,nhd->hn", row, k[seen])
                if scoring.softcap is not None:
                    scores = scoring.softcap * (scores / scoring.softcap).tanh()
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
                weights = scores.softmax(1)[:, : len(seen)]
                out.append(torch.einsum("hn,nhe->he", weights, v[seen]))
        return torch.stack(out)

    def step(self, feeds: dict[int, int], scoring: Scoring) -> None:
        q = self.begin(feeds)
        got = self.memory.attend(7, q, scoring)
        assert got.dtype == self.dtype
        error = TOLERANCE[self.dtype] * max(1.0, self.spread)
        torch.testing.assert_close(got.double(), self.expected(q, feeds, scoring), atol=error, rtol=error)
        k, v, _ = self.memory.get(7).dense()
        dense = self.memory.attend(7, q, scoring, dense=(k, v))
        torch.testing.assert_close(dense, got, atol=error, rtol=error)
        self.memory.commit()


def scorings(heads: int, size: int) -> dict[str, Scoring]:
    sinks = torch.linspace(-2, 2, heads)
    plain = Scoring(size**-0.5)
    return {
        "plain": plain,
        "scale": Scoring(0.7),
        "softcap": replace(plain, softcap=1.5),
        "sinks": replace(plain, sinks=sinks),
        "both": Scoring(0.3, softcap=2.0, sinks=sinks),
    }


def assert_scores_are_as_exact_as_float32(backend: Backend, dtype: torch.dtype, tokens: int) -> None:
    """256 and 257 are the same number in bfloat16. The other keys are far below."""
    texts = Texts(Causal(), (2, 1, 8, 1), 32, dtype=dtype, backend=backend)
    k = torch.full((tokens, 1, 8), -1.0, dtype=dtype)
    k[0], k[1], k[1, 0, 0] = 1, 1, 1 + 1 / 32
    texts.begin({0: tokens}, (k, torch.arange(tokens, dtype=dtype)[:, None, None] % 2))
    got = texts.memory.attend(7, torch.full((tokens, 2, 8), 32.0, dtype=dtype), Scoring(1.0))
    wanted = torch.tensor([0.0, 1.0]).softmax(0)[1]
    torch.testing.assert_close(got[1:].float(), wanted.expand(tokens - 1, 2, 1), atol=3e-3, rtol=0)
