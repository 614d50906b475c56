"""recorded_small: operators of a recorded step that the compiled loop runs by itself, as loops over four dimensions."""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcellar.kernels.recorded_kernel import DIMS, Operand, instruction, operand
from kvcellar.kernels.recorded_memory import View

Dim = tuple[int, list[int]]  # its size, and the stride of each operand
Address = Callable[[View], int]


@dataclass(slots=True)
class Small:
    """An operator on elements (`line`), or a reduction of the last dimension of its input. A float is a number."""

    run: int
    line: int
    out: View
    inputs: tuple[View | float, ...]
    of: int = 0  # the address of a table
    alive: Any = None  # what `of` points to
    reduces: bool = False

    @property
    def rows(self) -> int:
        """By how many rows it can be cut; 1: it cannot."""
        out = self.out
        if out.row is None or not out.row_stride():
            return 1
        for view in self.inputs:
            if isinstance(view, View) and view.row is not None:
                behind = len(self._shape) - len(view.shape)
                if view.row + behind != out.row or view.rows != out.rows:
                    return 1
        return out.shape[out.row]

    @property
    def fits(self) -> bool:
        """Whether there are loops enough, cut by rows or not."""
        return len(self._shape) <= DIMS or len(_merged(self._dims(self.rows > 1), self.reduces)) <= DIMS

    def words(self, address: Address, numbers: Callable[[float], int], by_row: bool) -> list[int]:
        dims = _merged(self._dims(by_row), self.reduces)
        dims = [(1, [0] * (1 + len(self.inputs)))] * (DIMS - len(dims)) + dims
        operands: list[Operand] = []
        for index, view in enumerate((self.out, *self.inputs)):
            strides = [strides[index] for _, strides in dims]
            if isinstance(view, View):
                row = self._stride(view, self.out.row) if by_row and self.out.row is not None else 0
                operands.append(operand(address(view), view.dtype, strides, row))
            else:
                operands.append(operand(numbers(view), torch.float32, strides))
        return instruction(self.run, self.line, [n for n, _ in dims], operands[0], operands[1:], self.of)

    def views(self) -> list[View]:
        """What it writes, and what it reads."""
        return [view for view in (self.out, *self.inputs) if isinstance(view, View)]

    def in_memory_of(self, one_row: Container[int]) -> "Small":
        """The same where these storages have memory for one row."""

        def moved(view: View) -> View:
            return view.of_one_row() if view.storage in one_row else view

        if not any(view.storage in one_row for view in self.views()):
            return self
        inputs = tuple(moved(view) if isinstance(view, View) else view for view in self.inputs)
        return Small(self.run, self.line, moved(self.out), inputs, self.of, self.alive, self.reduces)

    def repeats(self) -> set[int]:
        """Dimensions of its output along which the elements of all inputs repeat."""
        if self.reduces:
            return set()
        shape = self.out.shape
        return {dim for dim, n in enumerate(shape) if n > 1 and not any(self._stride(x, dim) for x in self.inputs)}

    @property
    def _shape(self) -> tuple[int, ...]:
        first = self.inputs[0]
        return first.shape if self.reduces and isinstance(first, View) else self.out.shape

    def _stride(self, view: View | float, dim: int) -> int:
        """The stride of an operand along a dimension of `_shape`, 0 where it has one element for all."""
        if not isinstance(view, View):
            return 0
        at = dim if view is self.out else dim - (len(self._shape) - len(view.shape))
        return view.strides[at] if 0 <= at < len(view.shape) and view.shape[at] != 1 else 0

    def _dims(self, by_row: bool) -> list[Dim]:
        """Dimensions of more than one element, the one with the smallest stride of the output last."""
        operands, shape = (self.out, *self.inputs), self._shape
        dims = [
            (n, [self._stride(view, dim) for view in operands])
            for dim, n in enumerate(shape)
            if n != 1 and not (by_row and dim == self.out.row)
        ]
        if not self.reduces:
            once = (one for one in dims if any(one[1]))  # along others all elements are the same one
            return sorted(once, key=lambda one: -one[1][0])
        if shape[-1] == 1:
            dims.append((1, [0] * len(operands)))
        return dims


def _merged(dims: Sequence[Dim], reduces: bool) -> list[Dim]:
    """Neighbours become one dimension where all operands go through both as through one."""
    merged: list[Dim] = []
    for n, strides in reversed(dims):
        if merged and not (reduces and len(merged) == 1):
            inner, steps = merged[-1]
            if all(outer == step * inner for outer, step in zip(strides, steps, strict=True)):
                merged[-1] = inner * n, steps
                continue
        merged.append((n, strides))
    return merged[::-1]


@dataclass(slots=True)
class Take:
    """Rows of `source`, of `width` elements one after the other, that `index` names; `step` elements apart."""

    run: int
    out: View
    source: View
    index: View
    width: int
    step: int
    count: int  # rows of `source`
    wraps: bool = False  # negative indices count from the end

    def words(self, address: Address) -> list[int]:
        n = math.prod(self.index.shape)
        index_step = self.index.strides[-1] if self.index.shape else 0
        return instruction(
            self.run,
            0,
            (1, 1, n, self.width),
            operand(address(self.out), self.out.dtype, (0, 0, self.width, 1)),
            (
                operand(address(self.source), self.source.dtype, (0, 0, self.step, 1)),
                operand(address(self.index), self.index.dtype, (0, 0, index_step, 0)),
            ),
            of=int(self.wraps),
            count=self.count,
        )

    def views(self) -> list[View]:
        return [self.out, self.source, self.index]


@dataclass(slots=True)
class Convolution:
    """x [n,c,p+k-1], w [c,1,k] and perhaps a bias [c] -> out [n,c,p]: each channel by itself."""

    run: int
    out: View
    x: View
    w: View
    bias: View | None

    def words(self, address: Address) -> list[int]:
        (n, c, positions), along = self.out.shape, self.x.strides[2]
        operands = [
            operand(address(self.x), self.x.dtype, (along, *self.x.strides[:2], along)),
            operand(address(self.w), self.w.dtype, (0, 0, self.w.strides[0], self.w.strides[2])),
        ]
        if self.bias is not None:
            operands.append(operand(address(self.bias), self.bias.dtype, (0, 0, self.bias.strides[0], 0)))
        out = operand(address(self.out), self.out.dtype, (self.out.strides[2], *self.out.strides[:2], 0))
        return instruction(self.run, 0, (positions, n, c, self.w.shape[2]), out, operands)

    def views(self) -> list[View]:
        return [self.out, self.x, self.w, *(() if self.bias is None else (self.bias,))]


Lone = Take | Convolution  # what runs by itself, for all rows at once
