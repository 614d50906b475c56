"""arena: memory for weights in huge pages, where the system gives them.

A core reads weights a quarter faster from pages of 2 MB than from pages of 4 KB. A request for them is not an error
where it cannot be met: the memory then has the pages of the system, and `huge_bytes` counts what it has.

Always true: pages of an arena that no tensor was made in are not resident.
"""

import ctypes
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

HUGE = 2 << 20
LINE = 64  # bytes; tensors begin at multiples of it
SMAPS = Path("/proc/self/smaps")
# Linux's MAP_NORESERVE, for which Python 3.11 has no name. Without it, Linux refuses an arena that is larger than the
# memory of the machine, even if most of it is never written.
UNRESERVED = 0x4000 if sys.platform == "linux" else 0


class Arena:
    """Anonymous memory for up to `size` bytes of tensors, which keep it alive; it is freed with the last of them."""

    def __init__(self, size: int) -> None:
        whole = -(-max(size, 1) // HUGE) * HUGE
        self._memory = mmap.mmap(-1, whole + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = -start % HUGE
        self._end = self._free + whole
        self.span = (start + self._free, start + self._end)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements, zeros, not used by another tensor."""
        at, size = self._free, count * dtype.itemsize
        assert at + size <= self._end, "the arena was made for fewer bytes"
        self._free = at + -(-size // LINE) * LINE
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at)

    def huge_bytes(self) -> int | None:
        """Bytes of it that are in huge pages, at most: the system may count it with memory beside it. None where the
        system does not count."""
        try:
            lines = SMAPS.read_text().splitlines()
        except OSError:
            return None
        low, high = self.span
        return min(high - low, sum(size for start, end, size in _huge(lines) if start < high and end > low))


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps what is between memory in use, a hundred megabytes where weights
    were quantised, and an arena does not use it again; other C libraries have no such function, and nothing is done."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))


def _huge(lines: list[str]) -> list[tuple[int, int, int]]:
    """First and last address of each mapping, and its bytes in huge pages."""
    found: list[tuple[int, int, int]] = []
    start = end = 0
    for line in lines:
        name, *words = line.split()
        if name == "AnonHugePages:":
            found.append((start, end, int(words[0]) << 10))
        elif not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
    return found
