"""Attention over cells against the definition, written out for each sequence: float64, one row after the other."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.attention.reference import Reference, attend_dense
from kvcellar.attention.sdpa import BLOCK, Sdpa
from kvcellar.cache.group import Group
from kvcellar.cache.layouts import Causal, Chunked, Sliding
from kvcellar.cache.memory import Memory
from kvcellar.contracts import Backend, Layout, Plane, Scoring
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span

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

    def __post_init__(self) -> None:
        _, kv_heads, size, value_size = self.shape
        planes = (Plane("k", kv_heads, size), Plane("v", kv_heads, value_size))
        self.memory = Memory(
            [Group("g", self.layout, planes, (7,))],
            cells={"g": self.cells},
            dtype=self.dtype,
            device="cpu",
            backend=self.backend,
        )
        self.numbers = torch.Generator().manual_seed(1)
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        self.runs = 0

    def draw(self, *shape: int) -> Tensor:
        return (self.spread * torch.randn(shape, generator=self.numbers)).to(self.dtype)

    def begin(self, feeds: dict[int, int]) -> Tensor:
        """Open a step in which each sequence gets so many tokens; the queries [T,H,D]."""
        heads, kv_heads, size, value_size = self.shape
        starts = {seq: self.memory.length(seq) for seq in feeds}
        plan = self.memory.begin(
            Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items()))
        )
        self.runs = max(len(segment.runs) for segment in plan.groups[0].segments)
        rows = sum(feeds.values())
        k, v = self.draw(rows, kv_heads, size), self.draw(rows, kv_heads, value_size)
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
        dense = self.memory.attend_dense(7, q, k, v, scoring)
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


@pytest.mark.parametrize("scoring", scorings(1, 1))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", [Sdpa(), Reference()], ids=lambda backend: backend.name)
def test_prompts_and_single_tokens_of_unequal_sequences(backend, shape, layout, scoring) -> None:
    texts = Texts(layout, shape, 64, backend=backend)
    scores = scorings(shape[0], shape[2])[scoring]
    for feeds in ({0: 7, 1: 1}, {2: 3, 0: 1}, {0: 1, 1: 1, 2: 1}, {1: 9, 2: 2}, {2: 1}):
        texts.step(feeds, scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scoring", scorings(1, 1))
def test_half_precision(dtype, scoring) -> None:
    texts = Texts(Sliding(9), (6, 2, 32, 16), 64, dtype=dtype)
    for feeds in ({0: 12, 1: 5}, {1: 1, 0: 1}, {0: 3}):
        texts.step(feeds, scorings(6, 32)[scoring])


def test_scores_beyond_the_largest_half_are_no_nan() -> None:
    """60 * 60 * 64 is more than float16 has; one key wins."""
    texts = Texts(Causal(), (2, 1, 64, 8), 32, dtype=torch.float16)
    texts.begin({0: 4})
    q = torch.full((4, 2, 64), 60.0, dtype=torch.float16)
    texts.memory.put(7, q[:, :1] * torch.tensor([1, 0.5, 0.9, -1])[:, None, None].half(), texts.known[0][1])
    got = texts.memory.attend(7, q, Scoring(1.0))
    torch.testing.assert_close(got, texts.known[0][1][:1].expand(4, 2, 8))


@pytest.mark.parametrize("layout", [Causal(), Sliding(7), Sliding(BLOCK + 9), Chunked(50), Chunked(BLOCK)], ids=str)
@pytest.mark.parametrize("new", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_a_prompt_of_several_blocks(layout, new) -> None:
    texts = Texts(layout, (4, 2, 8, 8), 2 * (2 * BLOCK + 99))
    texts.step({0: 5, 1: 3}, Scoring(0.4))
    q = texts.begin({1: 1, 0: new})
    k, v, visible = texts.memory.get(7).dense()
    expected = attend_dense(q, k, v, visible, Scoring(0.4))  # judged row by row above
    torch.testing.assert_close(texts.memory.attend(7, q, Scoring(0.4)), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(texts.memory.attend_dense(7, q, k, v, Scoring(0.4)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 40], ids=["short runs", "long runs"])
def test_cells_in_many_pieces(layout, tokens) -> None:
    """Sequences that grow side by side in a pool without room to spare lie in pieces, which are read in two ways."""
    layout = Sliding(4 * tokens) if isinstance(layout, Sliding) else layout
    texts, most = Texts(layout, (4, 2, 8, 12), 26 * tokens), 0
    for turn in range(12):
        for seq in range(5):
            if texts.memory.free()["g"] < tokens:
                oldest = max(texts.memory.sequences, key=texts.memory.length)
                texts.memory.drop(oldest)
                del texts.known[oldest]
            texts.step({seq: tokens - turn % 2 * (tokens > 1)}, Scoring(0.5))
            most = max(most, texts.runs)
    assert most > 2 or isinstance(layout, Chunked), "this test wants sequences in pieces"


@settings(derandomize=True, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    shape=st.sampled_from([param.values[0] for param in SHAPES]),
    scoring=st.sampled_from(sorted(scorings(1, 1))),
    steps=st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 8), min_size=1), min_size=1, max_size=4),
    accepted=st.integers(0, 8),
)
def test_any_steps(layout, shape, scoring, steps, accepted) -> None:
    """Shared prefixes, steps of which a part is kept, and whatever comes after."""
    texts = Texts(layout, shape, 200)
    scores = scorings(shape[0], shape[2])[scoring]
    for feeds in steps:
        texts.step(feeds, scores)
    source = next(iter(steps[0]))
    kept = texts.memory.fork(source, 9, texts.memory.length(source))
    texts.known[9] = tuple(x[:kept] for x in texts.known[source])
    texts.begin({9: 8})
    texts.memory.commit({9: accepted})
    texts.known[9] = tuple(x[: kept + accepted] for x in texts.known[9])
    texts.step({9: 2, source: 3}, scores)


@pytest.mark.parametrize("backend", [Sdpa(), Reference()], ids=lambda backend: backend.name)
def test_keys_that_were_computed_from_what_is_stored(backend) -> None:
    """As in MLA: other heads and sizes than the planes have."""
    texts = Texts(Sliding(5), (4, 1, 16, 4), 40, backend=backend)
    texts.step({0: 6, 1: 2}, Scoring(0.5))
    texts.begin({1: 3, 0: 1})
    latent, rope, visible = texts.memory.get(7).dense()
    k = torch.cat([latent @ texts.draw(16, 20), rope], -1).expand(-1, 4, -1)  # [N,4,24]
    v = (latent @ texts.draw(16, 28)).expand(-1, 4, -1)
    q = texts.draw(4, 4, 24)
    for scoring in scorings(4, 24).values():
        expected = attend_dense(q.double(), k.double(), v.double(), visible, scoring).float()
        got = texts.memory.attend_dense(7, q, k, v, scoring)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_queries_need_not_be_contiguous(layout) -> None:
    """A model hands them over as [H,T,D] turned."""
    texts = Texts(layout, (4, 2, 8, 8), 32)
    q = texts.begin({0: 6, 1: 1})
    got = texts.memory.attend(7, q.transpose(0, 1).contiguous().transpose(0, 1), Scoring(0.5))
    torch.testing.assert_close(got, texts.memory.attend(7, q, Scoring(0.5)), atol=0, rtol=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, Sliding(BLOCK // 2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("new", [BLOCK + 1, BLOCK + 5])
def test_one_call_says_what_products_say(new, shape, layout) -> None:
    """What runs where torch has kernels of the device's own, run here."""
    texts = Texts(layout, shape, 600, backend=Sdpa(fused=True))
    texts.step({0: 4, 1: 2}, Scoring(0.6))
    texts.step({0: new, 1: 1}, Scoring(0.6))


@pytest.mark.parametrize("fused", [False, True])
def test_a_row_alone_in_its_block_sees_no_other_sequence_through_computed_keys(fused) -> None:
    texts = Texts(Causal(), (4, 2, 8, 8), 400, backend=Sdpa(fused=fused))
    q = texts.begin({0: BLOCK, 1: 1})
    k, v, visible = texts.memory.get(7).dense()
    expected = attend_dense(q.double(), k.double(), v.double(), visible, Scoring(0.5)).float()
    torch.testing.assert_close(texts.memory.attend_dense(7, q, k, v, Scoring(0.5)), expected, atol=2e-5, rtol=1e-5)


def test_attending_changes_nothing_of_what_is_stored() -> None:
    texts = Texts(Causal(), (4, 2, 8, 8), 32)
    q = texts.begin({0: 6, 1: 1})
    before = [texts.memory.get(7).stored(name).codes.clone() for name in ("k", "v")]
    for scoring in scorings(4, 8).values():
        kept = q.clone()
        texts.memory.attend(7, q, scoring)
        assert torch.equal(q, kept)
    assert all(torch.equal(texts.memory.get(7).stored(n).codes, b) for n, b in zip(("k", "v"), before, strict=True))
