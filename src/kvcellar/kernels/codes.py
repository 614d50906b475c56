"""codes: quantised weights of a linear layer as integers, scales and minima, from whatever file or rule they come.

Every form of weights that our products take is one of these; decoders of files and rules of rounding make them, and
`quantised.py` multiplies with them. Shapes: o outputs, i inputs, c groups of i / c inputs that share a scale.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INT4 = tuple(range(-8, 8))  # the table of plain integers of 4 bits
_BLOCK = 1 << 20  # elements that are decoded at once: they stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class Codes:
    """The weight of input `order[n]` of output o is `scales[o, n // (i / c)] * v + mins[o, n // (i / c)]`, where v is
    `values[o,n]`, or with a table `table[values[o,n]]`.

    `values` [o,i] are I8 without a table, else U8 from 0 to 15; a table has 16 numbers that fit
    I8. `scales` and `mins` [o,c] are floats; scales may be negative. `order` [i] is a permutation, I64.
    """

    values: Tensor
    table: tuple[int, ...] | None
    scales: Tensor
    mins: Tensor | None = None
    order: Tensor | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def check(self) -> None:
        """Assert that shapes and types are as documented."""
        assert self.values.dim() == 2
        assert self.values.dtype is (torch.int8 if self.table is None else torch.uint8)
        assert self.table is None or (len(self.table) == 16 and all(-128 <= one <= 127 for one in self.table))
        outputs, inputs = self.values.shape
        assert self.scales.dim() == 2 and len(self.scales) == outputs and inputs % self.scales.shape[1] == 0
        assert self.mins is None or self.mins.shape == self.scales.shape
        assert self.order is None or self.order.shape == (inputs,)

    def dense(self) -> Tensor:
        """F32 [o,i]."""
        out = torch.empty(self.values.shape, device="cpu")
        for rows in row_blocks(*self.values.shape):
            part = self.values[rows]
            if self.table is not None:
                part = torch.tensor(self.table, dtype=torch.int8, device="cpu")[part.int()]
            groups = part.float().unflatten(1, (-1, self.group)).mul_(self.scales[rows, :, None].float())
            if self.mins is not None:
                groups += self.mins[rows, :, None].float()
            out[rows] = groups.flatten(1)
        if self.order is None:
            return out
        return torch.empty_like(out).index_copy_(1, self.order, out)


CodesOf = Callable[[int], Codes | str]  # of an expert, 0 if there is one only


class Coded(ABC):
    """A weight of a file that is decoded when it is read: dense when it is indexed, or as its codes."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Tensor: ...

    @abstractmethod
    def experts(self) -> CodesOf:
        """What returns the codes of each of its experts, or the reason why they have no such form. It is read once."""

    def codes(self) -> Codes | str:
        """The codes of a weight that is no stack of experts, or why it has none."""
        return self.experts()(0)


def side_by_side(weights: Iterable[Codes | str]) -> Codes | str:
    """The codes of several weights with the same inputs, outputs side by side; or why one of them has none, or why they
    have no one form."""
    parts: list[Codes] = []
    for one in weights:
        if isinstance(one, str):
            return one
        parts.append(one)
    first = parts[0]
    if len(parts) == 1:
        return first
    kinds = {(one.table, one.values.shape[1], one.scales.shape[1], one.mins is None) for one in parts}
    if len(kinds) > 1 or any(one.order is not None for one in parts):
        return "its parts are quantised in different ways"
    mins = [one.mins for one in parts if one.mins is not None]
    values, scales = torch.cat([one.values for one in parts]), torch.cat([one.scales for one in parts])
    return Codes(values, first.table, scales, torch.cat(mins) if mins else None)


def row_blocks(rows: int, columns: int, *, step: int = 1) -> Iterator[slice]:
    """Slices of rows with about `_BLOCK` elements each, which start at multiples of `step`."""
    step *= max(1, _BLOCK // max(1, columns * step))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
