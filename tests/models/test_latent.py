"""Attention to latents gives what expanding them gives, and code that computes anything else keeps expanding."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar import Engine
from kvcellar.engine.load.recorded import record_steps
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models import build_guest as build
from kvcellar.engine.models.adapters.adapters import read_adapter
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.latent_attention import CHILD, NotLinear, with_latents
from kvcellar.engine.models.quantize import served
from kvcellar.engine.models.seam import Latent
from kvcellar.engine.models.selftest import check_adapted
from kvcellar.engine.models.weights.packing import pack_model
from kvcellar.errors import ModelRefused
from kvcellar.kernels.layers import OwnLinear
from kvcellar.memory.attention.choose import backends, named
from kvcellar.memory.attention.cpu import Cpu
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec, StoredAs
from kvcellar.memory.spans import Span
from kvcellar.verify.bits import same_bits
from tests.models.lora import ends_with, layers_of, saved
from tests.models.served import FLAT
from tests.models.timeline import BOUND, relative
from tests.zoo import ARCHS

SPEC = AttentionSpec(4, 4, 16, 16, dtype="float32", device="cpu")
MLA = [name for name in FLAT if "mla" in ARCHS[name].kinds]
SOME = ("deepseek-v3", "minicpm3", "kimi-linear")
pytestmark = pytest.mark.skipif(Cpu().refuse(SPEC) is not None, reason=f"not compiled here: {Cpu().refuse(SPEC)}")


def guest_of(model: PreTrainedModel) -> Guest:
    return build_guest(model, backends())


def expanding(guest: Guest) -> Guest:
    """The same network, which expands."""
    bindings = {module: replace(one, latent=None) for module, one in guest.shape.bindings.items()}
    return Guest(guest.model, replace(guest.shape, bindings=bindings), "flat", guest.chosen)


def latents(guest: Guest) -> int:
    return sum(binding.latent is not None for binding in guest.shape.bindings.values())


def logits(guest: Guest, steps: list[dict[int, int]], ids: Tensor) -> Tensor:
    """Of all rows of steps that give each sequence so many tokens."""
    memory = guest.memory({group.name: 100 for group in guest.shape.groups}, rows=8)
    found: list[Tensor] = []
    for step in steps:
        starts = {seq: memory.length(seq) if memory.has(seq) else 0 for seq in step}
        plan = memory.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in step.items())))
        rows = [ids[seq, pos] for seq, n in step.items() for pos in range(starts[seq], starts[seq] + n)]
        found.append(guest.forward(memory, plan, [int(one) for one in rows], range(len(rows))).clone())
        memory.commit()
    return torch.cat(found)


# -- where it is used ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MLA)
def test_every_model_with_latents_attends_to_them(name) -> None:
    guest = guest_of(ARCHS[name].build())
    assert guest.expands is None
    assert latents(guest) == sum(not binding.direct for binding in guest.shape.bindings.values()) > 0


@pytest.mark.parametrize("backend", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize("name", SOME)
def test_it_gives_what_expanding_gives(name, backend) -> None:
    guest = build_guest(ARCHS[name].build(), named(backend))
    assert latents(guest)

    @settings(derandomize=True, deadline=None, max_examples=6)
    @given(st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 8), min_size=1), min_size=1, max_size=4))
    def same(steps) -> None:
        ids = torch.randint(3, 101, (3, 40), generator=torch.Generator().manual_seed(len(steps)))
        assert relative(logits(guest, steps, ids), logits(expanding(guest), steps, ids)) <= BOUND

    same()


@pytest.mark.parametrize("stored", ["int8", "int8+hadamard", "k=int4,v=fp8", "v=int8"])
def test_it_reads_quantised_latents_as_expanding_does(stored) -> None:
    """Up to codes that a difference of rounding in a layer before changes by one."""
    guest = guest_of(ARCHS["deepseek-v3"].build()).storing(StoredAs.parse(stored), backends())
    ids = torch.randint(3, 101, (3, 40), generator=torch.Generator().manual_seed(0))
    steps = [{0: 9, 1: 2}, {0: 1, 1: 1, 2: 5}, {2: 1}, {1: 7, 0: 1}]
    assert latents(guest)
    assert relative(logits(guest, steps, ids), logits(expanding(guest), steps, ids)) <= 2e-2


@pytest.mark.parametrize("name", ["minicpm3", "youtu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_however_it_is_computed(name, dtype) -> None:
    model = ARCHS[name].build()
    nn.Module.to(model, dtype)  # transformers types its own `to` wrongly
    pack_model(model)
    guest = guest_of(model)
    assert latents(guest)
    assert [str(way) for way in same_bits(guest, seed=0) if not way.holds] == []


def test_a_recorded_step_expands_nothing() -> None:
    model = ARCHS["deepseek-v3"].build()
    pack_model(model)
    guest = guest_of(model)
    record_steps(guest, Settings(record="auto"))
    assert guest.recording is not None, guest.not_recorded
    ops = guest.recording.captured.program.ops
    assert {op.name for op in ops} >= {"kvcellar.heads", "kvcellar.attend_latent"}
    assert not {op.name for op in ops} & {"kvcellar.dense", "kvcellar.attend_dense", "kvcellar.attend"}
    assert not [op for op in ops if op.name == "kvcellar.linear" and "kv_b_proj" in str(op.args)]


def test_an_adapter_of_the_layer_that_expands_is_refused_and_others_are_not(tmp_path) -> None:
    model = ARCHS["minicpm3"].build()
    guest = guest_of(model)
    for number, targets in enumerate((("q_b_proj", "o_proj", "kv_a_proj_with_mqa"), ("kv_b_proj",)), start=1):
        layers = layers_of(model, ends_with(*targets))
        path = saved(tmp_path / str(number), layers, target_modules=list(targets))
        guest.adapted.add(number, read_adapter([path], guest.model, most_bytes=lambda: 1 << 30))
        if number == 1:
            assert not any(check_adapted(guest, number))
            continue
        with pytest.raises(ModelRefused, match="kv_b_proj cannot have an adapter"):
            assert not any(check_adapted(guest, number))


# -- where it is not -------------------------------------------------------------------------------------------------

Expand = Callable[..., tuple[Tensor, Tensor]]


def _squared(own: Expand, latent: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    return own(latent * latent, tail)


def _shifted(own: Expand, latent: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    k, v = own(latent, tail)
    return k, v + 0.5


def _mixed(own: Expand, latent: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    k, v = own(latent, tail)
    return k, v + tail.sum(-1, keepdim=True)


def _halved(own: Expand, latent: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    return own(latent, tail / 2)


def _turned(own: Expand, latent: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    return own(latent, tail.flip(-1))


def _rounded(own: Expand, latent: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    scale = latent.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return own((latent / scale).round() * scale, tail)


def _largest(own: Expand, latent: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Linear where one element is not zero, as in an identity matrix."""
    return own(latent * (latent.abs() >= latent.abs().amax(-1, keepdim=True)), tail)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_squared, "not linear"),
        (_shifted, "does not depend on what is stored"),
        (_mixed, "from both parts"),
        (_halved, "as it is"),
        (_turned, "as it is"),
        (_rounded, "rounds them on the way"),
        (_largest, "not linear"),
    ],
)
def test_code_that_is_not_linear_expands_and_says_why(change, why) -> None:
    model = ARCHS["minicpm3"].build()
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.expand_kv = partial(change, MethodType(type(attention).expand_kv, attention))
    guest = guest_of(model)
    assert guest.mode == "flat"
    assert guest.verdict is not None
    assert guest.verdict.passed
    assert guest.expands is not None
    assert why in guest.expands
    assert not latents(guest)
    assert not [name for name, _ in model.named_modules() if CHILD in name]


def test_one_layer_that_is_not_linear_is_enough() -> None:
    model = ARCHS["minicpm3"].build()
    attention: Any = model.model.layers[-1].self_attn
    attention.expand_kv = partial(_squared, MethodType(type(attention).expand_kv, attention))
    guest = guest_of(model)
    assert guest.expands is not None
    assert not latents(guest)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_matrices_are_found_in_layers_that_round_their_inputs(weights) -> None:
    model = ARCHS["minicpm3"].build(kv_lora_rank=64, v_head_dim=24)
    assert served.given(model, weights, os.environ) is not None
    expansions = [one for name, one in model.named_modules() if name.endswith("kv_b_proj")]
    assert all(isinstance(one, OwnLinear) and one.rounds for one in expansions)
    guest = guest_of(model)
    assert guest.expands is None
    for attention, binding in guest.shape.bindings.items():
        assert binding.latent is not None
        layer: Any = attention.kv_b_proj
        weight = layer.weight.view(4, 32, 64)  # 4 heads of 8 elements of a key, and 24 of a value
        c = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0))
        expected = torch.einsum("hr,hor->ho", c[0, 0], weight[:, 8:])
        torch.testing.assert_close(binding.latent.values(c)[0, 0], expected, atol=1e-3, rtol=1e-3)


def test_without_a_compiler_it_expands() -> None:
    guest = guest_of(ARCHS["minicpm3"].build())
    with pytest.raises(NotLinear, match="compiler"):
        with_latents(guest, {"PATH": "", "HOME": "/nonexistent"})


def test_what_one_form_has_stored_is_not_restored_by_the_other(tmp_path, monkeypatch) -> None:
    """Their bits differ, and a warm answer is to be the cold one. A store may be shared by unequal machines."""
    ARCHS["deepseek-v3"].build().save_pretrained(tmp_path / "model")

    def cached() -> int:
        with Engine(tmp_path / "model", store=str(tmp_path / "store"), cache_bytes=16_000_000, threads=1) as engine:
            return engine.generate([*range(5, 95)], max_tokens=2).usage.cached_tokens

    def refuse(guest: Guest) -> None:
        raise NotLinear("is not tried")

    with monkeypatch.context() as patch:
        patch.setattr(build, "with_latents", refuse)
        assert cached() == 0
        assert cached() > 0
    assert cached() == 0
    assert cached() > 0


def test_other_types_expand() -> None:
    model = ARCHS["minicpm3"].build()
    nn.Module.to(model, torch.float64)  # transformers types its own `to` wrongly
    guest = guest_of(model)
    assert guest.expands is not None
    assert "float64" in guest.expands


def test_models_without_latents_have_no_reason() -> None:
    guest = guest_of(ARCHS["llama"].build())
    assert guest.expands is None
    assert not latents(guest)


def test_a_test_that_fails_leaves_the_guest_as_it_was(monkeypatch) -> None:
    """Here because results of heads are wrong."""
    model, right = ARCHS["minicpm3"].build(), Latent.forward
    monkeypatch.setattr(Latent, "forward", lambda self, q, attend: right(self, q, attend) + 1)
    guest = guest_of(model)
    assert guest.expands is not None
    assert "logits differ" in guest.expands
    assert guest.verdict is not None
    assert guest.verdict.passed
    assert not latents(guest)
    assert not [one for one in model.modules() if isinstance(one, nn.Module) and CHILD in one._modules]
