"""sampling: the tokens of rows of logits on CPUs, each drawn in one pass (`sample.cpp`).

Always true: the result of a row depends only on that row: not on other rows, on their number, or on threads.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcellar.kernels.compiled import SOURCES, Kernel, Threads
from kvcellar.kernels.structures import constant, structure

SOURCE = SOURCES / "sample.cpp"
Row = structure(SOURCE, "Row")
_Call = structure(SOURCE, "Call")
ROWS = 64  # that are drawn at once, or more
TYPES = {torch.bfloat16: constant(SOURCE, "BFLOAT16"), torch.float32: constant(SOURCE, "BFLOAT16") + 1}


class SampleKernel(Kernel):
    """The kernel, compiled, and its memory. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        super().__init__(SOURCE, "kvcellar_sample", environment)
        self._threads = Threads(environment).address
        self._size = self.library.kvcellar_sample_bytes
        self._size.argtypes, self._size.restype = [ctypes.c_int64], ctypes.c_int64
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._rows = (Row * ROWS)()

    def clear(self) -> None:
        """Free the memory that is kept for the next draw."""
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def rows(self, logits: Tensor) -> list[Any]:
        """A `Row` for each row of logits [R,W], to be filled in. The logits are of `TYPES`, on the CPU, elements of a
        row beside each other, and must live as long as the rows. These are used again by the next call."""
        assert logits.dtype in TYPES and logits.device.type == "cpu" and logits.stride(1) == 1
        if len(logits) > len(self._rows):  # a class of arrays refers to itself, so few are made
            self._rows = (Row * (1 << (len(logits) - 1).bit_length()))()
        ctypes.memset(self._rows, 0, len(logits) * ctypes.sizeof(Row))
        made = self._rows[: len(logits)]
        first, step = logits.data_ptr(), logits.stride(0) * logits.itemsize
        for at, row in enumerate(made):
            row.logits = first + at * step
        return made

    def draw(self, rows: Sequence[Any], vocab: int, dtype: torch.dtype) -> None:
        """Fill in the results of rows, whose logits have this type."""
        threads = min(torch.get_num_threads(), len(rows))
        if len(self._scratch) < threads * self._size(vocab):
            most = torch.get_num_threads() * self._size(vocab)
            self._scratch = torch.empty(most, dtype=torch.uint8, device="cpu")
        memory = ctypes.addressof(self._rows), self._scratch.data_ptr(), self._threads
        self.run(ctypes.byref(_Call(*memory, len(rows), vocab, TYPES[dtype], threads)))
