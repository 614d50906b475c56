"""bandwidth: how fast one core reads memory, in huge pages where the system gives them."""

import ctypes
import mmap
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import kvcellar.kernels
from kvcellar.kernels.compiled import library

SOURCE = Path(kvcellar.kernels.__file__).parent / "reads.cpp"
BYTES = 256 << 20  # more than caches hold
WORD = 8


class Reads:
    """Memory that is read again and again. Raises `NotCompiled`."""

    def __init__(self, environment: Mapping[str, str], *, size: int = BYTES) -> None:
        self._read = library(SOURCE, environment).kvcellar_read
        self._read.argtypes, self._read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
        self._memory = mmap.mmap(-1, size)
        if sys.platform == "linux":
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = (ctypes.c_uint64 * (size // WORD)).from_buffer(self._memory)
        self._bytes = size // WORD * WORD
        ctypes.memset(self._words, 1, self._bytes)
        self._seconds: list[float] = []

    def read(self) -> int:
        """Read all of it once; returns the sum of its words, modulo 2^64."""
        before = time.thread_time()
        total = self._read(self._words, self._bytes // WORD)
        self._seconds.append(time.thread_time() - before)
        return total

    @property
    def rate(self) -> float:
        """Bytes per CPU second: the median."""
        return self._bytes / statistics.median(self._seconds)
