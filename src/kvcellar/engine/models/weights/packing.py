"""packing: weights of a CPU model, reordered once at load: those of experts, of routers and of linear layers.

transformers calls a registered function with a module of experts, the rows, and the experts and weights that the router
chose. Ours multiplies by the panels (`kernels/layers.py`) that replace the module's stacked weights, under the same
names; gate, activation and norm are the module's own code. A row's result does not depend on the rows beside it, nor on
their experts.

Routers call torch's `linear` with a parameter of their own. Its order of sums depends on the number of rows, so near
ties between experts would fall one way in a batch and another way alone. Within these modules, that call goes to a
linear layer of ours, in the type that the module multiplies in. Their sigmoids are computed in whole vectors: torch
computes what is left behind the last one in another way, and which experts that are depends on the number of rows.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvcellar.engine.models.weights.patches import multiply_patches
from kvcellar.kernels.arena import Arena
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import (
    FOREIGN,
    PACKED,
    ExpertsKernel,
    OwnExperts,
    PanelKernel,
    PanelLinear,
    panel_bytes,
    panel_experts,
    panel_linear,
)
from kvcellar.kernels.packed import Packing, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "kvcellar"  # in transformers' registry
TYPES = (torch.float32, torch.bfloat16)
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")  # stacked, of those classes that transformers dispatches
OWN = "grouped_mm"  # transformers' function by default
PLAIN = "batched_mm"  # transformers' function that the replaced one is compared with

Kernels = tuple[ExpertsKernel, PanelKernel]


def serve_experts(model: "PreTrainedModel") -> None:
    """Let experts of a model be computed by our function, which is registered with transformers. It holds no state."""
    from transformers.integrations.moe import ExpertsInterface  # imports of transformers take seconds

    ExpertsInterface.register(NAME, _experts)
    model.set_experts_implementation(NAME)


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T,hidden], top_k_index [T,K] and top_k_weights [T,K] -> [T,hidden].

    A module that was not packed, such as one of MTP layers, which have the config of their network, is computed by
    transformers' own function."""
    if not isinstance(self.down_proj, OwnExperts):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS[OWN](self, hidden_states, top_k_index, top_k_weights)
    share = top_k_index.shape[-1]
    index = top_k_index.reshape(-1)
    if self.has_gate:
        inner = self._apply_gate(self.gate_up_proj(hidden_states, index, share))  # [T*K,intermediate]
    else:
        inner = self.act_fn(self.up_proj(hidden_states, index, share))
    out = self.down_proj(inner, index, 1)  # [T*K,hidden]
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = (out * top_k_weights.reshape(-1, 1)).view(-1, share, out.shape[-1])
    # One by one, since the order of torch's own sum depends on the number of rows.
    total = weighted[:, 0].to(torch.promote_types(weighted.dtype, torch.float32))
    for place in range(1, share):
        total = total + weighted[:, place]
    return total.to(hidden_states.dtype)


def pack_experts(model: "PreTrainedModel", environment: Mapping[str, str]) -> int | str:
    """Replace the weights of all experts of a CPU model, one module after the other. Returns their bytes, or the reason
    why they stay as they are. The model is changed only if all of them can be replaced."""
    modules = {name: one for name, one in expert_modules(model) if not isinstance(one.down_proj, OwnExperts)}
    if not modules:
        return 0
    for name, module in modules.items():
        if (reason := _why_plain(module)) is not None:
            return f"{name}: {reason}"
    try:
        kernels = ExpertsKernel(environment), PanelKernel(environment)
    except NotCompiled as error:
        return str(error)
    types = {one._parameters[name].dtype for one in modules.values() for name in weights_of(one)}
    if kernels[1].multiplies == FOREIGN and torch.bfloat16 in types:
        return "this CPU has instructions for bfloat16 that torch uses, and our kernel does not"
    first = next(iter(modules))
    if (reason := _differs(kernels, modules[first])) is not None:
        return f"{first}: {reason}"
    size = sum(_pack(kernels, module) for module in modules.values())
    serve_experts(model)
    return size


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules whose class transformers dispatches to a registered function."""
    for name, module in model.named_modules():
        if "is_transposed" in vars(module) and "has_gate" in vars(module):  # set by its decorator
            yield name, module


def _why_plain(module: Any) -> str | None:
    """The reason in the module itself why it is not replaced; None if there is none."""
    for name in weights_of(module):
        weight = module._parameters.get(name)
        if weight is None:
            return f"it has no parameter {name}"
        if weight.device.type != "cpu" or weight.dtype not in TYPES:
            return f"{name} is {weight.dtype} on {weight.device}"
        if weight.dim() != 3 or not weight.numel() or type(weight.detach()) is not Tensor:
            return f"{name} is no plain tensor of three dimensions"
    return None


def weights_of(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _panels(kernels: Kernels, module: Any, name: str) -> OwnExperts:
    weight = module._parameters[name].detach()  # [experts,out,in], or [experts,in,out]
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    return panel_experts(*kernels, weight, bias)


@torch.no_grad()
def _pack(kernels: Kernels, module: Any) -> int:
    """Replace the weights of one module, one after the other. Returns their bytes."""
    size = 0
    for name in weights_of(module):
        panels = _panels(kernels, module, name)
        size += module._parameters[name].nbytes
        del module._parameters[name]
        setattr(module, name, panels)
    return size


@torch.no_grad()
def _differs(kernels: Kernels, module: Any) -> str | None:
    """Why results of panels cannot replace those of the module: a copy of it, with panels, gives others."""
    weight = module._parameters[weights_of(module)[1]]
    hidden = weight.shape[2] if module.is_transposed else weight.shape[1]
    count, share = len(weight), min(2, len(weight))
    x = torch.linspace(-1, 1, 3 * hidden, dtype=weight.dtype, device="cpu").view(3, hidden)
    index = torch.arange(3 * share, device="cpu").view(3, share) % count
    weights = torch.full((3, share), 1 / share, dtype=weight.dtype, device="cpu")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    plain = ALL_EXPERTS_FUNCTIONS[PLAIN](module, x, index, weights)
    twin = _twin(module)
    for name in weights_of(module):
        setattr(twin, name, _panels(kernels, module, name))
    bound = 1e-4 if weight.dtype is torch.float32 else 2e-2
    gap = (_experts(twin, x, index, weights) - plain).abs().max()
    if not gap <= bound * plain.abs().max().clamp(min=1e-3):
        return "the results of its weights in panels differ from those of its own code"
    return None


def _twin(module: Any) -> Any:
    """A copy that shares everything but its weights."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    twin._parameters = {name: value for name, value in module._parameters.items() if name not in WEIGHTS}
    twin._modules = dict(module._modules)
    return twin


VECTORS = 64  # elements of the largest step of torch's loops over vectors
SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)
CHILDREN = {dtype: f"kvcellar_{dtype}".replace(".", "_") for dtype in PACKED}  # names of layers below a module, by type


def wrap_routers(model: nn.Module, environment: Mapping[str, str]) -> int | str:
    """Let routers of a CPU model multiply by layers of ours. Returns how many there are, or why there are none."""
    found = [module for module in model.modules() if _multiplies(module)]
    if not found:
        return 0
    try:
        kernel = PanelKernel(environment)
    except NotCompiled as error:
        return str(error)
    for module in found:
        if not isinstance(vars(module).get("forward"), Routed):
            module.forward = Routed(module, kernel)
    return len(found)


def _multiplies(module: nn.Module) -> bool:
    """Whether it is a module of transformers without children, with a weight [out,in]."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and (weight.dim(), weight.device.type) == (2, "cpu")
        and type(weight.detach()) is Tensor
        and type(module).__module__.startswith("transformers.models.")
        and not isinstance(module, nn.Embedding)
        and not module._modules.keys() - set(CHILDREN.values())
    )


class Routed:
    """Replaces the `forward` of a module."""

    def __init__(self, module: nn.Module, kernel: PanelKernel) -> None:
        self._own: Callable[..., Any] = module.forward
        self._products = _Products(module, kernel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._products:
            return self._own(*args, **kwargs)


class _Products(TorchFunctionMode):
    """Calls of `linear` with the weight of a module, or with its weight in another type."""

    def __init__(self, module: nn.Module, kernel: PanelKernel) -> None:
        super().__init__()
        self._module, self._kernel = module, kernel

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and (layer := self._layer(*args)) is not None:
            return layer(args[0])
        if func in SIGMOIDS and not kwargs and (missing := -args[0].shape[-1] % VECTORS):
            padded = torch.cat([args[0], args[0].new_zeros(*args[0].shape[:-1], missing)], -1)  # `pad` is not traced
            return func(padded)[..., : args[0].shape[-1]].contiguous()
        return func(*args, **kwargs)

    def _layer(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> PanelLinear | None:
        """The layer for these arguments; None if they are not the module's own, or of a type that it does not take."""
        own, other = self._module._parameters["weight"], self._module._parameters.get("bias")
        if x.dtype is not weight.dtype or x.dtype not in PACKED or x.device.type != "cpu":
            return None
        if own is None or weight.shape != own.shape or (bias is None) != (other is None):
            return None  # another product of the module
        name = CHILDREN[x.dtype]
        layer = self._module._modules.get(name)
        if layer is None and type(weight.detach()) is Tensor and self._is_own(weight, bias):
            arena = Arena(panel_bytes(weight))
            layer = panel_linear(self._kernel, arena, weight.detach(), None if bias is None else bias.detach().clone())
            self._module.add_module(name, layer)
        return layer if isinstance(layer, PanelLinear) else None

    def _is_own(self, weight: Tensor, bias: Tensor | None) -> bool:
        own, other = self._module._parameters["weight"], self._module._parameters.get("bias")
        assert own is not None
        same = torch.equal(weight, own.to(weight.dtype))
        return same and (bias is None or (other is not None and torch.equal(bias, other.to(bias.dtype))))


@dataclass(frozen=True, slots=True)
class Packed:
    """What was packed: linear layers; the bytes of experts, or why they stay as they are; the number of routers, or why
    there are none."""

    linears: Packing
    experts: int | str
    routers: int | str

    @property
    def bytes(self) -> int:
        """Bytes of all packed weights, but for those of routers."""
        return self.linears.bytes + (self.experts if isinstance(self.experts, int) else 0)


def pack_model(model: "PreTrainedModel", *, environment: Mapping[str, str] = os.environ) -> Packed:
    """Replace layers of a CPU model in place, one after the other. `environment` is for the compiler."""
    _turn(model)
    multiply_patches(model)
    experts = pack_experts(model, environment)
    return Packed(pack(model, environment=environment), experts, wrap_routers(model, environment))


def _turn(model: "PreTrainedModel") -> None:
    """Replace each `Conv1D` (GPT-2), whose weight is [in,out], by a linear layer that shares its memory."""
    from transformers.pytorch_utils import Conv1D

    for name, module in [*model.named_modules()]:
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if type(module) is not Conv1D or hooked:
            continue
        parent, _, leaf = name.rpartition(".")
        linear = nn.Linear(module.nx, module.nf, device="meta")
        linear.weight = nn.Parameter(module.weight.detach().T, requires_grad=False)
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
        setattr(model.get_submodule(parent), leaf, linear)
