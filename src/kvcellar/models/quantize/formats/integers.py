"""integers: a matrix of integers with scales, as dense rows or as codes that can be multiplied.

Shapes: o outputs, i inputs, c scales of an output, n rows of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.kernels.codes import INT4, Codes
from kvcellar.models.quantize.layouts import decode, row_blocks

_FEWEST, _MOST = INT4[0], INT4[-1]  # of 4 bits


@dataclass(frozen=True, slots=True)
class Integers:
    """The weight is (integer - zero) * scale + bias.

    `stored` returns the integers of a block of rows, [n,i]; `half` is their middle, and the zero where there are no
    `zeros`. `scales` [o,c] or [1,c]; `zeros` and `biases` [o,c]. `columns` [i] is the scale of each input; None: groups
    of equal size, in order. Blocks start at multiples of `step`.
    """

    shape: tuple[int, int]
    stored: Callable[[slice], Tensor]
    half: int
    scales: Tensor
    zeros: Tensor | None = None
    biases: Tensor | None = None
    columns: Tensor | None = None
    step: int = 1

    def rows(self, _: int, block: slice) -> Tensor:
        """F32 [n,i]."""
        integers = self.stored(block)
        if self.zeros is None and self.half:
            integers = integers - self.half
        scales = self.scales[block] if len(self.scales) > 1 else self.scales
        dense = decode(integers, scales, None if self.zeros is None else self.zeros[block], self.columns)
        if self.biases is None:
            return dense
        biases = self.biases[block].float()
        return dense.unflatten(1, (biases.shape[1], -1)).add_(biases[..., None]).flatten(1)

    def codes(self) -> Codes | str:
        """The same weight as codes, or the reason why it has no such form."""
        order = None if self.columns is None else self._order(self.columns)
        if isinstance(order, str):
            return order
        values = torch.empty(self.shape, dtype=torch.int8, device="cpu")
        for block in row_blocks(*self.shape, step=self.step):
            some = (self.stored(block) - self.half).to(torch.int8)
            values[block] = some if order is None else some[:, order]
        low, high = torch.aminmax(values)
        small = int(low) >= _FEWEST and int(high) <= _MOST
        scales = self.scales.float().expand(self.shape[0], -1)
        return Codes(
            values.sub_(_FEWEST).view(torch.uint8) if small else values,
            INT4 if small else None,
            scales.contiguous(),
            self._mins(scales),
            order,
        )

    def _order(self, columns: Tensor) -> Tensor | str:
        """The inputs sorted by their groups, or why these are not of one size."""
        counts = columns.bincount(minlength=self.scales.shape[1])
        if len(counts.unique()) > 1:
            return f"its groups have from {int(counts.min())} to {int(counts.max())} inputs"
        order = columns.argsort(stable=True)
        return order

    def _mins(self, scales: Tensor) -> Tensor | None:
        """What is added to integers of a product, which are less by `half`."""
        if self.zeros is None or (self.biases is None and bool((self.zeros == self.half).all())):
            return None
        mins = (self.half - self.zeros.float()) * scales
        return (mins if self.biases is None else mins + self.biases.float()).contiguous()
