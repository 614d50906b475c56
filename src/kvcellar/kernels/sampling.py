"""sampling: the tokens of rows of logits on CPUs, each drawn in one pass (`sample.cpp`).

Always true: the result of a row depends only on that row: not on other rows, on their number, or on threads.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcellar.kernels.compiled import SOURCES, Kernel, Threads
from kvcellar.kernels.structures import constant, structure

SOURCE = SOURCES / "sample.cpp"
Row = structure(SOURCE, "Row")
_Call = structure(SOURCE, "Call")
BLOCK = constant(SOURCE, "BLOCK")  # weights that a row asks for have room for whole blocks
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

    def clear(self) -> None:
        """Free the memory that is kept for the next draw."""
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def rows(self, logits: Tensor) -> Any:
        """A `Row` for each row of logits [R,W], to be filled in. The logits are of `TYPES`, on the CPU, elements of a
        row beside each other, and must live as long as the rows."""
        assert logits.dtype in TYPES and logits.device.type == "cpu" and logits.stride(1) == 1
        made = (Row * len(logits))()
        first, step = logits.data_ptr(), logits.stride(0) * logits.itemsize
        for at, row in enumerate(made):
            row.logits = first + at * step
        return made

    def draw(self, rows: Any, vocab: int, dtype: torch.dtype) -> None:
        """Fill in the results of rows, whose logits have this type."""
        threads = min(torch.get_num_threads(), len(rows))
        if len(self._scratch) < threads * self._size(vocab):
            most = torch.get_num_threads() * self._size(vocab)
            self._scratch = torch.empty(most, dtype=torch.uint8, device="cpu")
        call = _Call(
            ctypes.addressof(rows), self._scratch.data_ptr(), self._threads, len(rows), vocab, TYPES[dtype], threads
        )
        self.run(ctypes.byref(call))
