"""A layer packed for oneDNN, as without a compiler, returns what the plain one does, the plain weight is gone, and
oneDNN compiles few kernels."""

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.frontend.engine import Engine
from kvcellar.kernels import packed
from kvcellar.kernels.packed import BLOCK, PADDED, PackedLinear, Packing, padded
from kvcellar.memory.attention.choose import backends

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = sorted(BOUND, key=str)
packable = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
pytestmark = packable


def pack(model: nn.Module) -> Packing:
    """On a machine without a compiler."""
    return packed.pack(model, environment={"PATH": ""})


def supported(dtype: torch.dtype) -> bool:
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def stack(dtype: torch.dtype, *layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (17, 33), (5, 1), (130, 7)])
def test_packed_equals_plain(inner: int, outer: int, bias: bool, dtype: torch.dtype):
    if not supported(dtype):
        pytest.skip(f"oneDNN has no {dtype} here")
    model = stack(dtype, nn.Linear(inner, outer, bias=bias))
    inputs = [
        torch.randn(*shape, inner, dtype=dtype) for shape in [(1,), (3,), (300,), (2, 3), (0,), (1, 0), (1, 2, 3)]
    ]
    inputs.append(torch.randn(5, 2 * inner, dtype=dtype)[:, ::2])  # rows that are not contiguous
    expected = [model(x) for x in inputs]
    assert pack(model).layers == 1
    for x, plain in zip(inputs, expected, strict=True):
        got = model(x)
        assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
        torch.testing.assert_close(
            got, plain, rtol=0, atol=BOUND[dtype] * float(plain.abs().amax() if plain.numel() else 1)
        )


@contextmanager
def calls() -> Iterator[list[tuple[int, ...]]]:
    """What oneDNN is called with: the shape of the rows, and that of the weight."""
    seen: list[tuple[int, ...]] = []
    real = torch.ops.mkldnn._linear_pointwise

    def watched(rows: Tensor, packed: Tensor, *more: object) -> Tensor:
        assert rows.is_contiguous(), "strides are a part of what a kernel is compiled for"
        seen.append((rows.numel() // rows.shape[-1], rows.shape[-1], *packed.shape))
        return real(rows, packed, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
        yield seen


def test_few_rows_are_padded_little():
    assert PADDED == tuple(sorted(set(PADDED)))
    assert (PADDED[0], PADDED[-1], len(PADDED)) == (1, BLOCK, 20)
    for n in range(1, BLOCK + 1):
        assert n <= padded(n) <= max(n + 1, 4 * n / 3)
        assert n <= 8 or padded(n) <= n + max(3, n / 4)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_any_number_of_rows_is_few_shapes_for_onednn_with_the_same_results(bias: bool):
    model = stack(torch.float32, nn.Linear(24, 40, bias=bias))
    plain = [part.clone() for part in model.parameters()]
    assert pack(model).layers == 1
    draw = random.Random(0)
    with calls() as seen:
        for n in [*range(2 * BLOCK + 2), *(draw.randrange(5000) for _ in range(20))]:
            x = torch.randn(n, 24) if n % 3 else torch.randn(n, 24 + n)[:, :24]
            got, expected = model(x), nn.functional.linear(x, *plain)
            assert got.shape == expected.shape
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert {rows for rows, *_ in seen} == set(PADDED)
    assert len(set(seen)) == len(PADDED)


def test_rows_do_not_hear_of_the_padding_beside_them():
    model = stack(torch.float32, nn.Linear(24, 40))
    assert pack(model).layers == 1
    for n in (1, 5, 9, BLOCK - 1, BLOCK + 5):
        x = torch.randn(n, 24)
        before = torch.empty(4096).fill_(torch.nan)  # what an allocation may find
        del before
        assert torch.equal(model(x), model(x.clone()))
        assert model(x).isfinite().all()


def test_an_engine_calls_onednn_with_few_shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-compiler")
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    draw = random.Random(1)
    with Engine(LlamaForCausalLM(config), cache_bytes=4 << 20, threads=1, max_sequences=48) as engine, calls() as seen:
        for _ in range(12):
            prompts = [[draw.randrange(97) for _ in range(draw.randrange(1, 300))] for _ in range(draw.randrange(1, 9))]
            engine.generate(prompts, max_tokens=3, n=draw.choice((1, 3)), ignore_eos=True)
    weights = {weight for _, _, *weight in map(tuple, seen) for weight in [tuple(weight)]}
    assert len(weights) == 5, "q and o; k and v; gate and up; down; the head"
    assert len({rows for rows, *_ in seen}) > 5
    assert len(set(seen)) <= len(PADDED) * len(weights)


def test_plain_weights_are_freed_one_by_one():
    model = stack(torch.float32, *(nn.Linear(32, 32) for _ in range(3)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    real = torch.ops.mkldnn._reorder_linear_weight

    def watched(weight: Tensor, rows: int) -> Tensor:
        alive.append(sum(ref() is not None for ref in weights))
        return real(weight, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", watched)
        packing = pack(model)
    assert alive == [3, 2, 1], "each plain weight goes before the next layer is packed"
    assert [ref() for ref in weights] == [None, None, None]
    assert (packing.layers, packing.bytes, packing.kept) == (3, 3 * 32 * 32 * 4, {})
    assert list(model.parameters()) == []


def test_weight_can_still_be_looked_at():
    model = stack(torch.float32, nn.Linear(17, 33))
    weight = model[0].weight.clone()
    pack(model)
    assert torch.equal(model[0].weight, weight)


def test_tied_embedding_keeps_its_weight():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight

    model = Tied().requires_grad_(False)
    table = model.embed.weight.clone()
    ids = torch.tensor([3, 49, 0])
    expected = model.head(model.embed(ids))
    assert pack(model).layers == 1
    assert torch.equal(model.embed.weight, table)
    torch.testing.assert_close(model.head(model.embed(ids)), expected)


class Strange(Tensor):
    """As libraries that quantise have: its elements need not be where they seem to be."""


def test_layers_that_are_not_packed_have_a_reason():
    model = nn.ModuleDict(
        {
            "narrow": nn.Linear(4, 4).half(),
            "heard": nn.Linear(4, 4),
            "elsewhere": nn.Linear(4, 4, device="meta"),
            "empty": nn.Linear(4, 4, dtype=torch.bfloat16),
            "patched": nn.Linear(4, 4),
            "quantised": nn.Linear(4, 4),
            "own": type("Own", (nn.Linear,), {})(4, 4),
            "plain": nn.Linear(4, 4),
        }
    )
    model["empty"].weight = nn.Parameter(torch.empty(4, 0, dtype=torch.bfloat16))
    model["patched"].forward = lambda x: x
    model["quantised"].weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Strange), requires_grad=False)
    model["heard"].register_forward_hook(lambda *_: None)
    packing = pack(model)
    assert (packing.layers, packing.own) == (1, 0)
    assert "no C++ compiler" in (packing.not_own or "")
    assert isinstance(model["plain"], PackedLinear)
    assert {name: type(layer) is nn.Linear for name, layer in model.items() if name in packing.kept} == dict.fromkeys(
        ("narrow", "heard", "elsewhere", "empty", "patched", "quantised"), True
    )
    assert all(packing.kept.values())


def test_layer_with_wrong_results_stays_plain(monkeypatch: pytest.MonkeyPatch):
    real = torch.ops.mkldnn._reorder_linear_weight
    for wrong in (lambda w, n: real(-w, n), lambda w, n: real(w * torch.nan, n)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", wrong)
            model = stack(torch.float32, nn.Linear(8, 8))
            assert "differs" in pack(model).kept["0"]
            assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_guest_of_a_packed_network_gives_the_same_logits(tied: bool, dtype: torch.dtype):
    if not supported(dtype):
        pytest.skip(f"oneDNN has no {dtype} here")
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, attention_bias=True, dtype=dtype,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    ids = torch.arange(11)[None]
    expected = model(ids).logits.float()
    assert pack(model).layers == 2 * 7 + 1
    guest = build_guest(model, backends())
    assert guest.mode == "flat"
    assert guest.verdict is not None
    assert guest.verdict.passed
    model.set_attn_implementation("eager")
    got = model(ids).logits.float()
    torch.testing.assert_close(got, expected, rtol=0, atol=BOUND[dtype] * max(1.0, float(expected.abs().max())))
