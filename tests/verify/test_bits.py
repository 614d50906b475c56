"""A row's bits are compared with those of the same text computed alone, and the module that changes them is named."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.weights.packing import pack_model
from kvcellar.memory.attention.choose import backends
from kvcellar.verify.bits import SameBits, same_bits
from tests.own_layers import need_own_layers
from tests.zoo import ARCHS


def guest_of(name: str, dtype: torch.dtype = torch.float32) -> Guest:
    model: Any = ARCHS[name].build().to(dtype)
    pack_model(model)
    return build_guest(model, backends())


def by_way(guest: Guest) -> dict[str, SameBits]:
    return {one.way: one for one in same_bits(guest, seed=0)}


# Full, sliding and soft-capped attention, sinks, partial rotation, learned positions, transposed weights, experts of
# four classes, convolutions, latents, state spaces; then chunks, shared K/V, a router by sigmoids, and scans with few
# heads, whose sizes leave tails of vectors in float32.
PROMISED = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "cohere2", "gpt-neox", "opt", "gpt2"),
    *("gpt-oss", "qwen3-moe", "mixtral", "olmoe", "lfm2", "deepseek-v2", "mamba2", "granitemoehybrid"),
)
IN_BFLOAT16 = ("deepseek-v3", "llama4", "gemma3n", "gemma4-e2b", "qwen3-next", "jamba", "mamba")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in PROMISED for dtype in (torch.float32, torch.bfloat16)]
    + [(name, torch.bfloat16) for name in IN_BFLOAT16],
)
def test_a_rows_bits_do_not_depend_on_company_where_that_is_promised(name, dtype) -> None:
    need_own_layers(dtype)
    assert [str(one) for one in same_bits(guest_of(name, dtype), seed=0) if not one.holds] == []


def test_a_delta_rule_has_the_same_bits_in_float32_where_its_heads_are_whole_vectors() -> None:
    need_own_layers(torch.float32)
    model: Any = ARCHS["qwen3.5"].build(linear_num_value_heads=32, linear_num_key_heads=16)
    pack_model(model)
    assert [str(one) for one in same_bits(build_guest(model, backends()), seed=0) if not one.holds] == []


@pytest.mark.parametrize("experts", [8, 12, 64])
def test_scores_of_a_router_by_sigmoids_have_the_same_bits_alone(experts) -> None:
    need_own_layers(torch.float32)
    model: Any = ARCHS["deepseek-v3"].build(n_routed_experts=experts, n_group=2)
    pack_model(model)
    router = model.model.layers[-1].mlp.gate
    x = torch.randn(48, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    together = router(x)
    for row in range(len(x)):
        for part, alone in zip(together, router(x[row : row + 1]), strict=True):
            assert torch.equal(part[row], alone[0])


class OfCompany(nn.Module):
    """Multiplies by a number that depends on how many rows there are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + 1e-6 * (x.shape[1] > 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_of_the_text_is_compared_in_every_way(dtype) -> None:
    need_own_layers(dtype)
    found = by_way(guest_of("llama", dtype))
    assert len(found) == 9
    for way, one in found.items():
        assert str(one) == f"{way}: the same bits in all 48 rows"


def test_a_module_whose_result_depends_on_the_number_of_rows_is_named() -> None:
    need_own_layers(torch.float32)
    guest = guest_of("llama")
    layer: Any = guest.model.get_submodule("model.layers.1.mlp")
    layer.down_proj = OfCompany(layer.down_proj)
    found = by_way(guest)
    assert found["from a fork"].holds
    kind = type(layer.down_proj.inner).__name__
    where = f"model.layers.1.mlp.down_proj.inner ({kind}) and model.layers.2.input_layernorm (LlamaRMSNorm)"
    for way in ("in a batch of 2", "in a batch of 64", "beside a prompt"):
        assert 0 < found[way].differing < found[way].rows
        assert str(found[way]).endswith(f"rows have other bits; first in what is computed between {where}")


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            raise RuntimeError("too many rows")
        return x


def test_a_way_that_cannot_be_computed_is_reported_with_its_error() -> None:
    guest = guest_of("llama")
    guest.model.get_submodule("model").norm = Failing()
    found = by_way(guest)
    assert found["from a fork"].holds
    assert not found["a whole prompt"].holds
    assert str(found["a whole prompt"]) == "a whole prompt: an operation raised RuntimeError: too many rows"


def test_guests_that_run_solo_have_no_company_in_a_step() -> None:
    ways = by_way(guest_of("bloom"))
    assert not any("batch" in way or "beside" in way for way in ways)
    assert ways["from a fork"].holds
    assert "a whole prompt" in ways


def test_memory_is_left_as_it_was() -> None:
    guest = guest_of("mamba")
    names = {name: type(module) for name, module in guest.model.named_modules()}
    one, again = same_bits(guest, seed=3), same_bits(guest, seed=3)
    assert one == again
    assert {name: type(module) for name, module in guest.model.named_modules()} == names
    assert not any(module._forward_hooks for module in guest.model.modules())
