"""packed: linear layers whose weights oneDNN has put in its own order once, instead of on every call.

On a CPU, torch's bf16 linear with few rows reorders the weights each time it is called; that is where a transformers
decode step loses most (`docs/log.md`). The operators are private to torch, so every layer's packed form is compared with
the plain one before it is used, and a layer for which they differ stays as it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """Stands in for one `nn.Linear`. Owns the packed weight; the plain one is kept only where something else needs it."""

    def __init__(self, packed: Tensor, bias: Tensor | None, in_features: int, out_features: int) -> None:
        super().__init__()
        self.packed, self.bias_ = packed, bias  # plain attributes: a packed tensor cannot be saved or moved
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [...,in] -> [...,out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias_, "none", [], "")


@dataclass(frozen=True, slots=True)
class Packing:
    """What `pack` did: how many layers it replaced, their bytes, and why others stayed plain."""

    layers: int
    bytes: int
    kept: dict[str, str]


def pack(model: nn.Module) -> Packing:
    """Replace the linear layers of a CPU model, in place. Weights that an embedding shares stay beside the packed copy."""
    if not torch.backends.mkldnn.is_available():
        return Packing(0, 0, {"all": "this torch has no oneDNN"})
    count, size = 0, 0
    kept: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.device.type != "cpu":
            continue
        packed = _packed(module)
        if isinstance(packed, str):
            kept[name] = packed
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed)
        count, size = count + 1, size + module.weight.nbytes
    return Packing(count, size, kept)


def _packed(linear: nn.Linear) -> PackedLinear | str:
    """The packed layer, or why it must stay plain."""
    weight = linear.weight.detach()
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"{weight.dtype} is not packed"
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions for oneDNN"
    bias = linear.bias.detach() if linear.bias is not None else None
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    layer = PackedLinear(reordered, bias, linear.in_features, linear.out_features)
    probe = torch.linspace(-1, 1, 3 * linear.in_features, dtype=weight.dtype).view(3, -1)
    for rows in (probe[:1], probe):
        plain, ours = nn.functional.linear(rows, weight, bias), layer(rows)
        bound = 1e-4 if weight.dtype is torch.float32 else 2e-2
        if (plain - ours).abs().max() > bound * plain.abs().max().clamp(min=1e-3):
            return "the packed layer's answer differs from the plain one's"
    return layer
