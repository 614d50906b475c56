"""experts: mixtures of experts on CPUs, with the weights of all experts in panels (`kernels/experts.py`).

transformers calls a registered function with an experts module, the rows, and the experts and weights that the router
chose. Ours multiplies by the panels that replace the module's stacked weights, under the same names; gate, activation
and norm are the module's own code. A row's result does not depend on the rows beside it, nor on their experts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from kvcellar.kernels.arena import Arena
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.experts import Kernel, OwnExperts, panel_experts
from kvcellar.kernels.linear import FOREIGN, panel_bytes
from kvcellar.kernels.linear import Kernel as LinearKernel

NAME = "kvcellar"  # in transformers' registry
TYPES = (torch.float32, torch.bfloat16)
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")  # stacked, of those classes that transformers dispatches
OWN = "grouped_mm"  # transformers' function by default
PLAIN = "batched_mm"  # transformers' function that the replaced one is compared with

Kernels = tuple[Kernel, LinearKernel]


def serve_experts(model: PreTrainedModel) -> None:
    """Let experts of a model be computed by our function, which is registered with transformers. It holds no state."""
    ExpertsInterface.register(NAME, _experts)
    model.set_experts_implementation(NAME)


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T,hidden], top_k_index [T,K] and top_k_weights [T,K] -> [T,hidden].

    A module that was not packed, such as one of MTP layers, which have the config of their network, is computed by
    transformers' own function."""
    if not isinstance(self.down_proj, OwnExperts):
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


def pack_experts(model: PreTrainedModel, environment: Mapping[str, str]) -> int | str:
    """Replace the weights of all experts of a CPU model, one module after the other. Returns their bytes, or the reason
    why they stay as they are. The model is changed only if all of them can be replaced."""
    modules = {name: one for name, one in expert_modules(model) if not isinstance(one.down_proj, OwnExperts)}
    if not modules:
        return 0
    for name, module in modules.items():
        if (reason := _why_plain(module)) is not None:
            return f"{name}: {reason}"
    try:
        kernels = Kernel(environment), LinearKernel(environment)
    except NotCompiled as error:
        return str(error)
    if kernels[1].multiplies == FOREIGN and any(_is_narrow(module) for module in modules.values()):
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


def _is_narrow(module: Any) -> bool:
    return any(module._parameters[name].dtype is torch.bfloat16 for name in weights_of(module))


def weights_of(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _panels(kernels: Kernels, module: Any, name: str) -> OwnExperts:
    weight = module._parameters[name].detach()  # [experts,out,in], or [experts,in,out]
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    arena = Arena(sum(panel_bytes(one) for one in weight))
    return panel_experts(*kernels, arena, weight, bias)


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
