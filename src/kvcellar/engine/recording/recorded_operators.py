"""recorded_operators: operators that the compiled loop runs by itself, as loops over four dimensions; their tensors.

A tensor is a view of a storage, and storages are placed in one arena. A group is a run of operators that are executed
row by row, or one operator by itself. Two storages may share memory if their groups do not overlap; never within a
group, where an operator of the next row runs after all of this one.
"""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcellar.engine.recording.program import Sizes, Value, size_of
from kvcellar.engine.recording.recorded_kernel import DIMS, Operand, instruction, operand

ALIGNED = 64  # bytes


class View(NamedTuple):
    """A tensor in a storage; offset and strides count elements. `row` is the dimension that has one entry per row of
    the step, if there is one such dimension, and `rows` the expression of its size."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    row: int | None = None
    rows: str | None = None

    @property
    def elements(self) -> int:
        """One more than the index in the storage of its last element; 0 if it has none."""
        if 0 in self.shape:
            return 0
        return self.offset + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def tensor(self, memory: Tensor, before: int) -> Tensor:
        """The tensor, where its storage begins `before` bytes behind that of `memory`."""
        at = before // self.dtype.itemsize + self.offset
        made = torch.empty(0, dtype=self.dtype, device="cpu")
        return made.set_(memory.untyped_storage(), at, self.shape, self.strides)

    def row_stride(self) -> int:
        """The number of elements that belong to a row, one row after the other, perhaps in several such blocks; 0 if
        rows are not apart in that way. Then a row's elements are those whose index, modulo rows * stride, divided by
        stride, is the row."""
        if self.row is None:
            return 0
        stride, block = self.strides[self.row], self.strides[self.row] * self.shape[self.row]
        if stride <= 0 or 0 in self.shape:
            return 0
        last = self.offset % block
        for dim, (n, step) in enumerate(zip(self.shape, self.strides, strict=True)):
            if dim != self.row and n > 1 and step % block:
                last += (n - 1) * step
        return stride if last < stride else 0

    def of_one_row(self) -> "View":
        """The same with memory for one row only, which all rows use one after the other."""
        assert self.row is not None
        stride, rows = self.strides[self.row], self.shape[self.row]
        block = stride * rows
        strides = [step if step % block else step // rows for step in self.strides]
        strides[self.row] = 0
        offset = self.offset // block * stride + self.offset % block
        return self._replace(offset=offset, strides=tuple(strides))


def viewed(value: Value, sizes: Sizes) -> View:
    shape, strides = (tuple(size_of(one, sizes) for one in of) for of in (value.shape, value.strides))
    return View(value.storage, size_of(value.offset, sizes), shape, strides, getattr(torch, value.dtype))


class Life(NamedTuple):
    """A storage's bytes, and the first and last group that use it."""

    bytes: int
    first: int
    last: int


def placed(lives: Sequence[Life]) -> tuple[list[int], int]:
    """The offset of each storage in an arena, and the arena's size. Each takes the smallest gap that it fits in."""
    offsets, total = [0] * len(lives), 0
    begin = sorted(range(len(lives)), key=lambda i: (lives[i].first, -lives[i].bytes))
    end = sorted(range(len(lives)), key=lambda i: lives[i].last)
    free: dict[int, int] = {}  # bytes of each gap, by offset
    ended = 0
    for one in begin:
        while lives[end[ended]].last < lives[one].first:
            _release(free, offsets[end[ended]], _aligned(lives[end[ended]].bytes))
            ended += 1
        size = _aligned(lives[one].bytes)
        gap = min((at for at in free if free[at] >= size), key=lambda at: free[at], default=None)
        if gap is None:
            offsets[one], total = total, total + size
            continue
        left = free.pop(gap) - size
        offsets[one] = gap
        if left:
            free[gap + size] = left
    return offsets, total


def _aligned(size: int) -> int:
    """Every storage has memory of its own, an empty one too."""
    return max(1, -(-size // ALIGNED)) * ALIGNED


def _release(free: dict[int, int], at: int, size: int) -> None:
    """Add a gap, and merge it with those beside it."""
    if at + size in free:
        size += free.pop(at + size)
    before = next((one for one, n in free.items() if one + n == at), None)
    if before is None:
        free[at] = size
    else:
        free[before] += size


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
