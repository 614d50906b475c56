"""Attention over cells against the definition, written out for each sequence: float64, one row after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.memory.attention import buckets
from kvcellar.memory.attention.buckets import room
from kvcellar.memory.attention.products import BLOCK
from kvcellar.memory.attention.reference import Reference, attend_dense
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.shapes import Scoring
from tests.attention.texts import LAYOUTS, SHAPES, Texts, assert_scores_are_as_exact_as_float32, scorings

every_backend = pytest.mark.parametrize(
    "backend", [Sdpa(), Sdpa(fused=True), Reference()], ids=["sdpa", "fused", "reference"]
)
both_ways = pytest.mark.parametrize("fused", [False, True], ids=["products", "fused"])


@pytest.mark.parametrize("scoring", scorings(1, 1))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@every_backend
def test_prompts_and_single_tokens_of_unequal_sequences(backend, shape, layout, scoring) -> None:
    texts = Texts(layout, shape, 64, backend=backend)
    scores = scorings(shape[0], shape[2])[scoring]
    for feeds in ({0: 7, 1: 1}, {2: 3, 0: 1}, {0: 1, 1: 1, 2: 1}, {1: 9, 2: 2}, {2: 1}):
        texts.step(feeds, scores)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scoring", scorings(1, 1))
def test_half_precision(dtype, scoring, fused) -> None:
    texts = Texts(Sliding(9), (6, 2, 32, 16), 64, dtype=dtype, backend=Sdpa(fused=fused))
    for feeds in ({0: 12, 1: 5}, {1: 1, 0: 1}, {0: 3}):
        texts.step(feeds, scorings(6, 32)[scoring])


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.Tensor]]:
    """What torch.bmm is called with: of each product the type, and the left side."""
    seen: list[tuple[torch.dtype, torch.Tensor]] = []
    real = torch.bmm

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.dtype is b.dtype
        seen.append((a.dtype, a))
        return real(a, b)

    monkeypatch.setattr(torch, "bmm", watched)
    return seen


@pytest.mark.parametrize(("multiplies", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_whole_blocks_are_multiplied_in_bfloat16_where_the_cpu_does_that(
    multiplies, wanted, products, monkeypatch
) -> None:
    """And weights are rounded to bfloat16 everywhere, so that results differ only by the order of sums."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: multiplies)
    texts = Texts(Causal(), (4, 2, 16, 16), 2 * BLOCK + 99, dtype=torch.bfloat16)
    for feeds, types in (({0: 12, 1: 1}, {torch.float32}), ({1: 1, 0: BLOCK + 2}, {torch.float32, wanted})):
        products.clear()
        texts.step(feeds, scorings(4, 16)["plain"])
        weights = products[1::2]  # behind the queries
        assert {dtype for dtype, _ in products[::2]} == {torch.float32}
        assert {dtype for dtype, _ in weights} == types
        assert all(torch.equal(w.float(), w.bfloat16().float()) for _, w in weights)


@pytest.mark.parametrize("layout", [Causal(), Sliding(BLOCK + 9), Chunked(2 * BLOCK)], ids=str)
def test_products_in_bfloat16_have_few_shapes(layout, products, monkeypatch) -> None:
    """oneDNN compiles a kernel for each of them, and keeps it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    texts = Texts(layout, (2, 1, 8, 8), 12 * BLOCK, dtype=torch.bfloat16)
    for n in (5, BLOCK, BLOCK + 1, 3 * BLOCK - 7, BLOCK + 50, 2 * BLOCK + 3):
        texts.step({0: n}, scorings(2, 8)["plain"])
    shapes = {w.shape for dtype, w in products if dtype is torch.bfloat16}
    assert len([w for dtype, w in products if dtype is torch.bfloat16]) > len(shapes) > 0
    assert {shape[:2] for shape in shapes} == {(1, 2 * BLOCK)}
    assert all(shape[2] % BLOCK == 0 for shape in shapes)


def test_the_keys_that_a_block_is_multiplied_with_are_of_few_numbers() -> None:
    rooms = [room(n, BLOCK) for n in range(1, 1 << 17)]
    assert all(n <= room <= max(BLOCK, n + BLOCK, n * 9 / 8) for n, room in enumerate(rooms, 1))
    assert len(set(rooms)) == 8 + 8 * 7  # up to 1024, and for each doubling up to 131072


def test_scores_beyond_the_largest_half_are_no_nan() -> None:
    """60 * 60 * 64 is more than float16 has; one key wins."""
    texts = Texts(Causal(), (2, 1, 64, 8), 32, dtype=torch.float16)
    q = torch.full((4, 2, 64), 60.0, dtype=torch.float16)
    texts.begin({0: 4}, (q[:, :1] * torch.tensor([1, 0.5, 0.9, -1])[:, None, None].half(), texts.draw(4, 1, 8)))
    got = texts.memory.attend(7, q, Scoring(1.0))
    torch.testing.assert_close(got, texts.known[0][1][:1].expand(4, 2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [2, 9])
def test_scores_are_as_exact_as_float32(dtype, tokens) -> None:
    assert_scores_are_as_exact_as_float32(Sdpa(), dtype, tokens)


@every_backend
@pytest.mark.parametrize("scoring", scorings(1, 1))
def test_a_row_that_sees_nothing_is_zero(backend, scoring) -> None:
    texts = Texts(Causal(), (4, 2, 8, 12), 32, backend=backend)
    q = texts.begin({0: 3})
    k, v, visible = texts.memory.get(7).dense()
    visible[1] = False
    got = texts.memory.attend(7, q, scorings(4, 8)[scoring], dense=(k, v))
    assert got[1].eq(0).all()
    assert got[0].ne(0).any()
    assert got.isfinite().all()


@both_ways
@pytest.mark.parametrize("layout", [Causal(), Sliding(7), Sliding(BLOCK + 9), Chunked(50), Chunked(BLOCK)], ids=str)
@pytest.mark.parametrize("new", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_a_prompt_of_several_blocks(layout, new, fused, monkeypatch) -> None:
    monkeypatch.setattr(buckets, "ROWS", BLOCK)
    texts = Texts(layout, (4, 2, 8, 8), 2 * (2 * BLOCK + 99), backend=Sdpa(fused=fused))
    texts.step({0: 5, 1: 3}, Scoring(0.4))
    q = texts.begin({1: 1, 0: new})
    k, v, visible = texts.memory.get(7).dense()
    expected = attend_dense(q, k, v, visible, Scoring(0.4))  # judged row by row above
    torch.testing.assert_close(texts.memory.attend(7, q, Scoring(0.4)), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(texts.memory.attend(7, q, Scoring(0.4), dense=(k, v)), expected, atol=1e-5, rtol=1e-5)


@both_ways
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 40], ids=["short runs", "long runs"])
def test_cells_in_many_pieces(layout, tokens, fused) -> None:
    """Sequences that grow side by side in a pool without room to spare lie in pieces, which are read in two ways."""
    layout = Sliding(4 * tokens) if isinstance(layout, Sliding) else layout
    texts, most = Texts(layout, (4, 2, 8, 12), 26 * tokens, backend=Sdpa(fused=fused)), 0
    for turn in range(12):
        for seq in range(5):
            if texts.memory.free()["g"] < tokens:
                oldest = max(texts.memory.sequences, key=texts.memory.length)
                texts.memory.drop(oldest)
                del texts.known[oldest]
            texts.step({seq: tokens - turn % 2 * (tokens > 1)}, Scoring(0.5))
            most = max(most, texts.runs)
    assert most > 2 or isinstance(layout, Chunked), "this test needs sequences in pieces"


@settings(derandomize=True, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    shape=st.sampled_from([param.values[0] for param in SHAPES]),
    scoring=st.sampled_from(sorted(scorings(1, 1))),
    steps=st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 8), min_size=1), min_size=1, max_size=4),
    accepted=st.integers(0, 8),
    fused=st.booleans(),
)
def test_any_steps(layout, shape, scoring, steps, accepted, fused) -> None:
    """Shared prefixes, steps of which a part is kept, and whatever comes after."""
    texts = Texts(layout, shape, 200, backend=Sdpa(fused=fused))
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


@every_backend
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
        got = texts.memory.attend(7, q, scoring, dense=(k, v))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@both_ways
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_queries_need_not_be_contiguous(layout, fused) -> None:
    """A model hands them over as [H,T,D] turned."""
    texts = Texts(layout, (4, 2, 8, 8), 32, backend=Sdpa(fused=fused))
    q = texts.begin({0: 6, 1: 1})
    got = texts.memory.attend(7, q.transpose(0, 1).contiguous().transpose(0, 1), Scoring(0.5))
    torch.testing.assert_close(got, texts.memory.attend(7, q, Scoring(0.5)), atol=0, rtol=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, Sliding(BLOCK // 2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("new", [BLOCK + 1, BLOCK + 5])
def test_one_call_equals_products(new, shape, layout) -> None:
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
    torch.testing.assert_close(texts.memory.attend(7, q, Scoring(0.5), dense=(k, v)), expected, atol=2e-5, rtol=1e-5)


def test_attending_changes_nothing_of_what_is_stored() -> None:
    texts = Texts(Causal(), (4, 2, 8, 8), 32)
    q = texts.begin({0: 6, 1: 1})
    stored = [texts.memory.get(7).planes[name].codes.view(torch.int32) for name in ("k", "v")]  # free cells may be NaN
    before = [codes.clone() for codes in stored]
    for scoring in scorings(4, 8).values():
        kept = q.clone()
        texts.memory.attend(7, q, scoring)
        assert torch.equal(q, kept)
    assert all(map(torch.equal, stored, before))
