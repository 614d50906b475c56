"""Experts and routers are computed from packed weights, with bits that do not depend on the rows beside a row."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.weights.packing import CHILDREN, pack_experts, pack_model, wrap_routers
from kvcellar.errors import ModelRefused
from kvcellar.kernels.layers import OwnExperts
from kvcellar.memory.attention.choose import backends
from kvcellar.verify.bits import same_bits
from tests.own_layers import need_own_layers
from tests.zoo import ARCHS

# A class of every kind: with gates, without, transposed with biases and interleaved, with shared experts.
KINDS = ("mixtral", "qwen3-moe", "gpt-oss", "nemotron-h", "deepseek-v3", "olmoe")
TYPES = (torch.float32, torch.bfloat16)


def model_of(name: str, dtype: torch.dtype) -> Any:
    need_own_layers(dtype)
    return ARCHS[name].build().to(dtype)


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if "has_gate" in vars(module)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_packed_experts_give_the_logits_of_the_models_own_code(name, dtype) -> None:
    ids = torch.tensor([list(range(5, 29))])
    model = model_of(name, dtype)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        before = sum(p.nbytes for module in experts_of(model) for p in module.parameters() if p.dim() == 3)
        assert pack_experts(model, os.environ) == before > 0
        found = model(input_ids=ids, use_cache=False).logits.float()
    gap = (found - expected).abs().amax(-1).median() / expected.abs().max().clamp(min=1)
    assert gap <= (1e-5 if dtype is torch.float32 else 2e-2)
    for module in experts_of(model):
        assert isinstance(module.down_proj, OwnExperts)
        assert not any(parameter.dim() == 3 for parameter in module.parameters())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_routers_choice_does_not_depend_on_the_batch(dtype) -> None:
    model = model_of("olmoe", dtype)
    packed = pack_model(model)
    assert isinstance(packed.routers, int)
    assert packed.routers > 0
    found = {one.way: one for one in same_bits(build_guest(model, backends()), seed=0)}
    for way in ("in a batch of 2", "in a batch of 8", "in a batch of 64", "from a fork"):
        assert found[way].holds, str(found[way])
    routers = [module for module in model.modules() if CHILDREN[dtype] in module._modules]
    assert len(routers) == packed.routers


class TwoProducts(torch.nn.Module):
    """Multiplies by its weight, and then by something else, as a router with a second projection does."""

    def __init__(self, other: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 64))
        self.other, self.bias_of_other = other, bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, self.weight), F.linear(x, self.other, self.bias_of_other)


TwoProducts.__module__ = "transformers.models.two_products"


@pytest.mark.parametrize(("shape", "biased"), [((16, 64), False), ((64, 64), False), ((32, 64), True)])
def test_a_product_of_a_router_with_another_shape_or_bias_is_not_multiplied_by_its_weight(shape, biased) -> None:
    need_own_layers(torch.float32)
    torch.manual_seed(0)
    bias = torch.randn(shape[0]) if biased else None
    module = TwoProducts(torch.randn(shape), bias)
    x = torch.randn(5, 64)
    expected = module(x)
    assert wrap_routers(torch.nn.Sequential(module), os.environ) == 1
    own, other = module(x)
    assert torch.equal(other, expected[1])
    torch.testing.assert_close(own, expected[0])
    assert CHILDREN[torch.float32] in module._modules


def test_a_model_without_experts_is_not_changed() -> None:
    model = model_of("llama", torch.float32)
    before = dict(model.named_parameters())
    assert (pack_experts(model, os.environ), wrap_routers(model, os.environ)) == (0, 0)
    assert dict(model.named_parameters()).keys() == before.keys()


def test_experts_of_another_type_stay_as_they_are_with_the_reason() -> None:
    model = model_of("mixtral", torch.float64)
    reason = pack_experts(model, os.environ)
    assert isinstance(reason, str)
    assert "gate_up_proj is torch.float64" in reason
    assert model.config._experts_implementation != "kvcellar"


def test_experts_whose_panels_give_other_results_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral", torch.float32)
    first = experts_of(model)[0]
    monkeypatch.setattr(type(first), "_apply_gate", lambda self, x: x.chunk(2, -1)[0] * torch.rand(1))
    reason = pack_experts(model, os.environ)
    assert isinstance(reason, str)
    assert "differ from those of its own code" in reason
    assert isinstance(first.down_proj, torch.nn.Parameter)


def test_a_given_network_keeps_the_weights_of_its_experts() -> None:
    from kvcellar import Engine

    model = model_of("mixtral", torch.float32)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    try:
        with Engine(model, cache_bytes=16_000_000, max_sequences=2, threads=1) as engine:
            assert len(engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True).token_ids) == 3
    except ModelRefused as error:
        pytest.fail(str(error))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert all(module.config._experts_implementation != "kvcellar" for module in experts_of(model))
