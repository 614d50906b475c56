"""packed: linear layers whose weights are in oneDNN's order once, not on every call; convolutions of few lengths.

On a CPU, torch's linear with few rows reorders the weights each time it is called. The operators are private to torch,
so every layer's packed form is compared with the plain one before it is used, and a layer for which they differ stays
as it was. On a CPU that cannot multiply bfloat16, such weights are not packed but widened (`widened.py`).

oneDNN compiles a kernel for every number of rows that it is called with, and keeps up to 1024 of them in a cache of the
process: about half a megabyte each, outside every cap of ours. So a packed layer calls it with few numbers of rows only
(`PADDED`): it cuts its rows into blocks of `BLOCK`, and pads what is left with rows of zeros. Convolutions along the
text, for which oneDNN compiles a kernel for every length, are padded in the same way.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.kernels.quantised import QuantisedLinear
from kvcellar.kernels.widened import Kernel, WidenedLinear, kernel

CAUSAL_CONV = "causal_conv1d_fn"  # its name in mixers of transformers
ROWS = 16  # passed to oneDNN; the order that it chooses for it is as good for one row and for thousands
BLOCK = 128  # rows in one call at most: a block of so many takes as little time a row as thousands do
# The numbers of rows that oneDNN is called with. At most a quarter of them are padding, less than a fifth from 13 on.
PADDED = (1, 2, 3, 4, 6, 8, *range(12, 32, 4), *range(32, 64, 8), *range(64, BLOCK + 1, 16))
_PADDED = frozenset(PADDED)


def padded(rows: int) -> int:
    """Number of rows, of 1 to `BLOCK`, that a packed layer calls oneDNN with for so many."""
    return PADDED[bisect_left(PADDED, rows)]


def with_padding(rows: int) -> int:
    """Number of rows that a packed layer computes for so many."""
    blocks, rest = divmod(rows, BLOCK)
    return blocks * BLOCK + (padded(rest) if rest else 0)


def of_few_lengths(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """On a CPU, let a causal convolution of inputs [B,C,L], its first argument, compute `with_padding(L)` of them.

    Zeros are appended to the inputs and cut off the result, on which they have no effect.
    """

    @wraps(convolution)
    def padded_convolution(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        more = with_padding(x.shape[-1]) - x.shape[-1]
        if not more or x.device.type != "cpu" or kwargs.get("seq_idx") is not None:
            return convolution(x, *args, **kwargs)
        if len(x) == 1:
            return convolution(nn.functional.pad(x, (0, more)), *args, **kwargs)[..., : x.shape[-1]]
        out = torch.empty_like(x)
        for one, into in zip(
            x.split(1), out.split(1), strict=True
        ):  # one by one, to bound the memory of the padded copies
            into.copy_(padded_convolution(one, *args, **kwargs))
        return out

    return padded_convolution


class PackedLinear(nn.Module):
    """Replaces one `nn.Linear`, with its weight in oneDNN's order. It has no parameters."""

    def __init__(self, packed: Tensor, bias: Tensor | None, in_features: int, out_features: int) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias  # plain attributes: oneDNN's order can be neither saved nor moved
        self.in_features, self.out_features = in_features, out_features

    @property
    def weight(self) -> Tensor:
        """A plain copy [out,in], made at each access, for code that reads weights instead of calling layers."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """x [...,in] -> [...,out]. A row's output depends on the rows beside it only as oneDNN's own sums do."""
        n = x.numel() // self.in_features
        if n in _PADDED and x.is_contiguous():  # decoding: no cut, padding or copy
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        rows = x.reshape(-1, self.in_features).contiguous()  # [n,in]: a kernel is for strides, too
        if n <= BLOCK:
            out = self._block(rows)
        else:
            out = rows.new_empty(n, self.out_features)
            for start in range(0, n, BLOCK):
                out[start : start + BLOCK] = self._block(rows[start : start + BLOCK])
        return out.view(*x.shape[:-1], self.out_features)

    def _block(self, rows: Tensor) -> Tensor:
        """rows [n,in] -> [n,out], n up to `BLOCK`."""
        n = len(rows)
        if n == 0:
            return rows.new_empty(0, self.out_features)
        if (size := padded(n)) > n:
            rows = nn.functional.pad(rows, (0, 0, 0, size - n))
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")[:n]


LINEARS = (PackedLinear, WidenedLinear, QuantisedLinear)  # the classes that replace linear layers


@dataclass(frozen=True, slots=True)
class Packing:
    """The result of `pack`: the number of replaced layers, the bytes of their weights, how many of them are widened as
    they are used (or why bfloat16 is not), and why other layers stayed plain.
    """

    layers: int
    bytes: int
    widened: int
    not_widened: str | None
    kept: dict[str, str]


def pack(model: nn.Module, *, environment: Mapping[str, str] = os.environ) -> Packing:
    """Replace the linear layers of a CPU model, in place, one after the other: each plain weight that nothing else
    refers to is freed before the next is packed.

    A weight that is referred to (by an embedding, or by the network whose weights the model shares) stays in memory
    beside the packed copy. `environment` is for the compiler of the kernel that widens.
    """
    if not torch.backends.mkldnn.is_available():
        return Packing(0, 0, 0, None, {"all": "this torch has no oneDNN"})
    wide = any(p.dtype is torch.bfloat16 and p.device.type == "cpu" for p in model.parameters())
    widens = kernel(environment) if wide else None
    count, size, widened = 0, 0, 0
    kept: dict[str, str] = {}
    for name in [name for name, module in model.named_modules() if name and type(module) is nn.Linear]:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        packed = _packed(linear, widens)
        if isinstance(packed, str):
            kept[name] = packed
            continue
        count, size = count + 1, size + linear.weight.nbytes
        widened += isinstance(packed, WidenedLinear)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed)
    return Packing(count, size, widened, widens if isinstance(widens, str) else None, kept)


@torch.no_grad()
def _packed(linear: nn.Linear, widens: Kernel | str | None) -> PackedLinear | WidenedLinear | str:
    """The layer that replaces it, or the reason why it stays plain."""
    if (reason := _why_plain(linear)) is not None:
        return reason
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if weight.dtype is torch.bfloat16 and isinstance(widens, Kernel):
        layer = WidenedLinear(widens, weight, bias)
    elif weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return f"oneDNN has no bfloat16 on this CPU, and nothing widens it: {widens}"
    else:
        try:
            reordered = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        except (RuntimeError, AttributeError) as error:
            return f"oneDNN does not reorder it: {error}"
        layer = PackedLinear(reordered, bias, linear.in_features, linear.out_features)
    probe = torch.linspace(-1, 1, 3 * linear.in_features, dtype=weight.dtype, device=weight.device).view(3, -1)
    bound = 1e-4 if weight.dtype is torch.float32 else 2e-2
    for rows in (probe[:1], probe):
        plain = nn.functional.linear(rows, weight, bias)
        if not (plain - layer(rows)).abs().max() <= bound * plain.abs().max().clamp(min=1e-3):
            return "the packed layer's output differs from the plain one's"
    return layer


def _why_plain(linear: nn.Linear) -> str | None:
    """The reason in the layer itself why it is not replaced; None if there is none."""
    parts = [part.detach() for part in (linear.weight, linear.bias) if part is not None]
    weight = parts[0]
    if weight.device.type != "cpu":
        return f"it is on {weight.device}"
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"{weight.dtype} is not packed"
    if not weight.numel():
        return "it has no weights"
    if any(type(part) is not Tensor or part.layout is not torch.strided for part in parts):
        return "its weights are no plain tensors"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has forward hooks"
    return "its forward was replaced" if "forward" in vars(linear) else None
