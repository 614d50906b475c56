"""quantised: linear layers that multiply weights of 8 and 4 bits as integers (`quantised.cpp`), from their `Codes`.

The inputs of a row are rounded to 8 bits in blocks of 32 (16 where scales are for 16), each with its own scale; sums
within a block are exact. So outputs differ from those of the dense weights by the rounding of inputs, and a row's bits
depend only on the row: not on other rows, threads, or the CPU. `ARITHMETIC` is raised when that changes.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcellar.kernels.arena import LINE, Arena
from kvcellar.kernels.codes import INT4, Codes, CodesOf
from kvcellar.kernels.compiled import SOURCES
from kvcellar.kernels.layers import TYPES, LayerKernel, OwnLinear, Part, Weights
from kvcellar.kernels.structures import constant

SOURCE = SOURCES / "quantised.cpp"
ARITHMETIC = 2
PANEL = constant(SOURCE, "PANEL")  # outputs whose codes are side by side; inputs are padded to as many
LEAST_GROUP = 16  # inputs that share a scale, unless all do
_HALF = 128  # added to bytes, so that they have no sign
Place = Callable[[int, torch.dtype], Tensor]  # so many elements of an arena


class QuantisedKernel(LayerKernel):
    """The kernel, compiled."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(SOURCE, "kvcellar_quantised", environment)


def unfit(codes: Codes) -> str | None:
    """Why the kernel does not take these codes; None if it does."""
    if codes.scales.shape[1] > 1 and codes.group % LEAST_GROUP:
        return f"a scale is for {codes.group} inputs, which is not a multiple of {LEAST_GROUP}"
    return None


class _Coded(Weights):
    """The codes of one layer, in the order of the kernel."""

    def __init__(self, codes: Codes, bias: Tensor | None, dtype: torch.dtype, place: Place | None) -> None:
        self.out, self._inner = codes.values.shape
        self.bits = 8 if codes.table is None else 4
        self.group = codes.group if codes.scales.shape[1] > 1 else _padded(self._inner)
        self._table, self.order, self._dtype = codes.table, codes.order, dtype
        self._panels = _kept(_panels(codes), place)
        kind = _narrowest([one for one in (codes.scales, codes.mins) if one is not None])
        groups = math.ceil(_padded(self._inner) / self.group)
        self._scales = _kept(_by_panel(codes.scales, groups, kind), place)
        self._mins = None if codes.mins is None else _kept(_by_panel(codes.mins, groups, kind), place)
        self._bytes_of_table = None
        if codes.table not in (None, INT4):
            self._bytes_of_table = torch.tensor([one + _HALF for one in codes.table], dtype=torch.uint8, device="cpu")
        self.bias, self._wide = bias, None if bias is None else bias.detach().float().contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and what belongs to them."""
        parts = (self._panels, self._scales, self._mins, self._wide, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def part(self, column: int) -> Any:
        tensors = (self._panels, self._wide, self._scales, self._mins, self._bytes_of_table)
        addresses = (None if one is None else one.data_ptr() for one in tensors)
        kinds = {"bits": self.bits, "group": self.group, "scale_type": TYPES[self._scales.dtype]}
        return Part(*addresses, out=self.out, column=column, **kinds)

    def codes(self) -> Codes:
        """A copy of the codes, in the usual order."""
        values = _from_panels(self._panels, self.bits)[: self.out, : self._inner].contiguous()
        count = 1 if self.group >= self._inner else self._inner // self.group
        scales, mins = (
            None if part is None else part.transpose(1, 2).flatten(0, 1)[: self.out, :count]
            for part in (self._scales, self._mins)
        )
        assert scales is not None
        return Codes(values, self._table, scales, mins, self.order)

    def plain(self) -> Tensor:
        return self.codes().dense().to(self._dtype)


class QuantisedLinear(OwnLinear):
    """A layer with codes as its weights."""

    def __init__(
        self, by: QuantisedKernel, codes: Codes, bias: Tensor | None, dtype: torch.dtype, arena: Arena | None = None
    ) -> None:
        """The codes are copied into the order of the kernel, into an arena if there is one; `unfit(codes)` is None."""
        coded = _Coded(codes, bias, dtype, None if arena is None else partial(by.placed, arena))
        step = LEAST_GROUP if coded.group % PANEL else PANEL
        order = None if codes.order is None else codes.order.to(torch.int32).contiguous()
        super().__init__(by, [coded], codes.values.shape[1], dtype, step=step, order=order)

    @property
    def bits(self) -> int:
        """Of a code."""
        return self._coded()[0].bits

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and what belongs to them."""
        return sum(part.nbytes for part in self._coded())

    def _coded(self) -> list[_Coded]:
        return [part for part in self.parts if isinstance(part, _Coded)]


def coded_layers(
    kernel: QuantisedKernel, count: int, of: CodesOf, biases: Tensor | None, dtype: torch.dtype
) -> list[QuantisedLinear] | str:
    """A layer for each expert, or why one of them has no codes that are multiplied."""
    layers: list[QuantisedLinear] = []
    arena: Arena | None = None
    for expert in range(count):
        codes = of(expert)
        why = codes if isinstance(codes, str) else unfit(codes)
        if isinstance(codes, str) or why is not None:
            return str(why)
        arena = arena or Arena(count * most_bytes(*codes.values.shape))
        bias = None if biases is None else biases[expert].clone()
        layers.append(QuantisedLinear(kernel, codes, bias, dtype, arena))
    return layers


def most_bytes(outputs: int, inputs: int) -> int:
    """Bytes of an arena that the codes of a layer take at most."""
    return _padded(outputs) * _padded(inputs) * 3 // 2 + 3 * LINE  # scales and minima are for 16 inputs or more


def _kept(values: Tensor, place: Place | None) -> Tensor:
    """The same values side by side, in an arena if there is one."""
    if place is None:
        return values.contiguous()
    return place(values.numel(), values.dtype).view(values.shape).copy_(values)


def _padded(size: int) -> int:
    return math.ceil(size / PANEL) * PANEL


def _narrowest(some: list[Tensor]) -> torch.dtype:
    """The first of bfloat16, float16 and float32 that holds all of these values exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(one.dtype is dtype or torch.equal(one.float(), one.to(dtype).float()) for one in some):
            return dtype
    return torch.float32


def _panels(codes: Codes) -> Tensor:
    """U8 [panels, in / (4 or 8), 32, 4], as documented in the kernel."""
    outputs, inputs = codes.values.shape
    values = codes.values.view(torch.uint8)
    if outputs % PANEL or inputs % PANEL:
        padded = values.new_zeros(_padded(outputs), _padded(inputs))
        padded[:outputs, :inputs] = values
        values = padded
    if codes.table is None:
        return (values ^ _HALF).view(-1, PANEL, values.shape[1] // 4, 4).transpose(1, 2)
    halves = values.view(-1, PANEL, values.shape[1] // 8, 2, 4)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2)


def _from_panels(panels: Tensor, bits: int) -> Tensor:
    """The values of codes, padded."""
    rows = panels.transpose(1, 2)  # [panels,32,in/...,4]
    if bits == 8:
        return (rows ^ _HALF).flatten(2).flatten(0, 1).view(torch.int8)
    return torch.stack((rows & 15, rows >> 4), -2).flatten(2).flatten(0, 1)


def _by_panel(scales: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[out,c] -> [panels,groups,32]; what is padded is 0."""
    padded = torch.zeros(_padded(len(scales)), groups, dtype=dtype, device="cpu")
    padded[: len(scales), : scales.shape[1]] = scales
    return padded.view(-1, PANEL, groups).transpose(1, 2)
