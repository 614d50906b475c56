"""packed: linear layers whose weights oneDNN has put in its own order once, instead of on every call.

On a CPU, torch's linear with few rows reorders the weights each time it is called. The operators are private to torch,
so every layer's packed form is compared with the plain one before it is used, and a layer for which they differ stays
as it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROWS = 16  # what oneDNN is told to expect; the order that it then chooses is as good for one row and for thousands


class PackedLinear(nn.Module):
    """Stands in for one `nn.Linear`, whose weight it owns in oneDNN's order."""

    def __init__(self, packed: Tensor, bias: Tensor | None, in_features: int, out_features: int) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias  # plain attributes: a packed tensor can be neither saved nor moved
        self.in_features, self.out_features = in_features, out_features

    @property
    def weight(self) -> Tensor:
        """A plain copy [out,in], made anew each time, for code that looks at weights instead of calling layers."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """x [...,in] -> [...,out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class Packing:
    """What `pack` did: how many layers it replaced, the bytes of their weights, and why others stayed plain."""

    layers: int
    bytes: int
    kept: dict[str, str]


def pack(model: nn.Module) -> Packing:
    """Replace the linear layers of a CPU model, in place, one after the other: each plain weight goes before the next.

    A weight that an embedding shares stays for the embedding, beside the packed copy.
    """
    if not torch.backends.mkldnn.is_available():
        return Packing(0, 0, {"all": "this torch has no oneDNN"})
    count, size = 0, 0
    kept: dict[str, str] = {}
    for name in [name for name, module in model.named_modules() if name and type(module) is nn.Linear]:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        packed = _packed(linear)
        if isinstance(packed, str):
            kept[name] = packed
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed)
        count, size = count + 1, size + linear.weight.nbytes
    return Packing(count, size, kept)


@torch.no_grad()
def _packed(linear: nn.Linear) -> PackedLinear | str:
    """The packed layer, or why it must stay plain."""
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if weight.device.type != "cpu":
        return f"it is on {weight.device}"
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"{weight.dtype} is not packed"
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions for oneDNN"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "somebody listens to its calls"
    try:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    except (RuntimeError, AttributeError) as error:
        return f"oneDNN does not reorder it: {error}"
    layer = PackedLinear(reordered, bias, linear.in_features, linear.out_features)
    probe = torch.linspace(-1, 1, 3 * linear.in_features, dtype=weight.dtype).view(3, -1)
    bound = 1e-4 if weight.dtype is torch.float32 else 2e-2
    for rows in (probe[:1], probe):
        plain = nn.functional.linear(rows, weight, bias)
        if not (plain - layer(rows)).abs().max() <= bound * plain.abs().max().clamp(min=1e-3):
            return "the packed layer's answer differs from the plain one's"
    return layer
