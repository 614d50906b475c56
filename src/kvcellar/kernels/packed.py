"""packed: linear layers whose weights are reordered once, not on every call; convolutions of few lengths.

On a CPU, torch's linear with few rows reorders the weights each time it is called. Layers of our own (`layers.py`)
replace it where there is a compiler, and where they are not slower by the kind of CPU: a choice by measured time could
be another one at the next start, and with it the bits of what is stored. Elsewhere oneDNN's packed form does, whose
operators are private to torch. The first packed layer of each shape is compared with the plain one before it is used,
and a layer for which they differ stays as it was.

oneDNN compiles a kernel for every number of rows that it is called with, and keeps up to 1024 of them in a cache of the
process: about half a megabyte each, outside every cap of ours. So a `PackedLinear` calls it with few numbers of rows
only (`PADDED`): it cuts its rows into blocks of `BLOCK`, and pads what is left with rows of zeros. Convolutions along
the text, for which oneDNN compiles a kernel for every length, are padded in the same way.
"""

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.kernels.arena import Arena, trim_heap
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import FOREIGN, OwnLinear, PanelKernel, PanelLinear, PanelWeight, panel_bytes, panel_linear

CAUSAL_CONV = "causal_conv1d_fn"  # its name in mixers of transformers
ROWS = 16  # passed to oneDNN; the order that it chooses for it is as good for one row and for thousands
BLOCK = 128  # rows in one call at most: a block of so many takes as little time a row as thousands do
# The numbers of rows that oneDNN is called with. At most a quarter of them are padding, less than a fifth from 13 on.
PADDED = (1, 2, 3, 4, 6, 8, *range(12, 32, 4), *range(32, 64, 8), *range(64, BLOCK + 1, 16))
_PADDED = frozenset(PADDED)
TRIMMED = 16 << 20  # bytes of plain weights that are freed before their pages are given back


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


LINEARS = (PackedLinear, OwnLinear)  # the classes that replace linear layers


@dataclass(frozen=True, slots=True)
class Packing:
    """The result of `pack`: the number of replaced layers, the bytes of their weights, how many of them are our own
    (`layers.py`), why others in bfloat16 or float32 are oneDNN's, and why other layers stayed plain. `arena` has the
    weights of our own.
    """

    layers: int
    bytes: int
    own: int
    not_own: str | None
    kept: dict[str, str]
    arena: Arena | None = None


def pack(model: nn.Module, *, environment: Mapping[str, str] = os.environ) -> Packing:
    """Replace the linear layers of a CPU model, in place, one after the other: each plain weight that nothing else
    refers to is freed before the next is packed.

    Where it is our own, an embedding that has the same weight reads the packed one from then on.
    A weight that is referred to otherwise (by the network whose weights the model shares) stays in memory beside the
    packed copy. `environment` is for the compiler of the kernel.
    """
    names = [name for name, module in model.named_modules() if name and type(module) is nn.Linear]
    kept = {name: why for name in names if (why := _why_plain(_linear(model, name))) is not None}
    names = [name for name in names if name not in kept]
    packer, holders = _Packer(environment, [_linear(model, name).weight for name in names]), _holders(model)
    count, size, own, trimmed = 0, 0, 0, 0
    for name in names:
        linear = _linear(model, name)
        packed = packer.packed(linear)
        if isinstance(packed, str):
            kept[name] = packed
            continue
        count, size, own = count + 1, size + linear.weight.nbytes, own + isinstance(packed, PanelLinear)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed)
        if isinstance(packed, PanelLinear):
            for parameters, of in holders.get(id(linear.weight), ()):
                parameters[of] = PanelWeight(packed)
        del linear
        if own and (size - trimmed >= TRIMMED or name == names[-1]):
            trim_heap()
            trimmed = size
    return Packing(count, size, own, packer.not_own, kept, packer.arena)


def _holders(model: nn.Module) -> Mapping[int, list[tuple[dict[str, Any], str]]]:
    """Where embeddings have their weights, and modules without code of their own parameters, by the identity of the
    parameter; of those that no other module has, but for linear layers: it could read all of them at each call."""
    found: defaultdict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    others: set[int] = set()
    for module in model.modules():
        looks_up = isinstance(module, nn.Embedding) and module.max_norm is None
        for name, parameter in module._parameters.items() if type(module) is not nn.Linear else ():
            if looks_up or type(module) is nn.Module:
                found[id(parameter)].append((module._parameters, name))
            else:
                others.add(id(parameter))
    return {parameter: of for parameter, of in found.items() if parameter not in others}


def _linear(model: nn.Module, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


class _Packer:
    """Makes the layers that replace others, and compares the first of each shape with the plain one."""

    def __init__(self, environment: Mapping[str, str], weights: Sequence[Tensor]) -> None:
        """`weights` are all that are going to be packed."""
        self._kernel: PanelKernel | None = None
        self.not_own: str | None = None
        self.arena: Arena | None = None
        self._compared: set[tuple[object, ...]] = set()
        try:
            self._kernel = PanelKernel(environment) if weights else None
        except NotCompiled as error:
            self.not_own = str(error)
        if self._kernel is not None:
            ours = [weight for weight in weights if self._is_own(weight)]
            self.arena = Arena(sum(map(panel_bytes, ours))) if ours else None

    def _is_own(self, weight: Tensor) -> bool:
        if self._kernel is None:
            return False
        if weight.dtype is torch.bfloat16 and self._kernel.multiplies == FOREIGN:
            self.not_own = "this CPU has instructions for matrices of bfloat16, which oneDNN uses"
            return False
        return True

    @torch.no_grad()
    def packed(self, linear: nn.Linear) -> PackedLinear | PanelLinear | str:
        """The layer that replaces it, or the reason why it stays plain."""
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        layer = self._made(weight, bias)
        kind = (type(layer), weight.dtype, weight.shape, bias is None)
        if isinstance(layer, str) or kind in self._compared:
            return layer
        probe = torch.linspace(-1, 1, 3 * linear.in_features, dtype=weight.dtype, device="cpu").view(3, -1)
        bound = 1e-4 if weight.dtype is torch.float32 else 2e-2
        for rows in (probe[:1], probe):
            plain = nn.functional.linear(rows, weight, bias)
            if not (plain - layer(rows)).abs().max() <= bound * plain.abs().max().clamp(min=1e-3):
                return "the packed layer's output differs from the plain one's"
        self._compared.add(kind)
        return layer

    def _made(self, weight: Tensor, bias: Tensor | None) -> PackedLinear | PanelLinear | str:
        if self._kernel is not None and self.arena is not None and self._is_own(weight):
            return panel_linear(self._kernel, self.arena, weight, bias)
        if not torch.backends.mkldnn.is_available():
            return f"this torch has no oneDNN, and our own layers are not used: {self.not_own}"
        if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return f"oneDNN has no bfloat16 on this CPU, and our own layers are not used: {self.not_own}"
        try:
            reordered = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        except (RuntimeError, AttributeError) as error:
            return f"oneDNN does not reorder it: {error}"
        return PackedLinear(reordered, bias, *weight.shape[::-1])


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
