"""recorded_memory: where the tensors of a recorded step are: views of storages, and a plan of storages in one arena.

A group is a run of operators that are executed row by row, or one operator by itself. Two storages may share memory if
their groups do not overlap; never within a group, where an operator of the next row runs after all of this one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNED = 64  # bytes


class View(NamedTuple):
    """A tensor in a storage; offset and strides count elements. `row` is the dimension that has one entry per row of
    the step, if there is one such dimension, and `rows` the expression of its size. `whole` are the strides that it has
    in the program, if it is stored once along some dimensions (`recorded_repeats.py`)."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    row: int | None = None
    rows: str | None = None
    whole: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """One more than the index in the storage of its last element; 0 if it has none."""
        if 0 in self.shape:
            return 0
        return self.offset + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

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
