"""buffers: the memory that chunks are read into. It is used again and again: the pages of a new allocation cost nearly
half as much time as verifying what is read into them.

Always true:
  * an idle buffer belongs to no transfer;
  * a space hands out one part of its buffer after the other, none of them twice.

The caller counts the bytes, and holds a lock around `Buffers`.
"""

import mmap
import sys
from bisect import insort
from collections.abc import Callable

from kvcellar.tiers.codec import Replaced


def allocated(size: int) -> mmap.mmap:
    """A buffer, with its pages where the system can make them at once."""
    if sys.platform == "linux":
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return mmap.mmap(-1, size)


class Buffers:
    """Those that are idle, the smallest first."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self.bytes = 0

    def take(self, size: int) -> mmap.mmap | None:
        """The smallest one with at least `size` bytes; None if there is none."""
        for number, buffer in enumerate(self._idle):
            if len(buffer) >= size:
                self.bytes -= len(buffer)
                return self._idle.pop(number)
        return None

    def give(self, buffer: mmap.mmap) -> None:
        """It is idle from now on."""
        insort(self._idle, buffer, key=len)
        self.bytes += len(buffer)

    def trim(self, most: int) -> None:
        """Free idle buffers, the smallest first, until they have at most so many bytes."""
        while self._idle and self.bytes > most:
            self.bytes -= len(self._idle.pop(0))

    def check(self) -> None:
        """Assert what is always true."""
        assert self.bytes == sum(map(len, self._idle))
        assert len({id(one) for one in self._idle}) == len(self._idle)


class Space:
    """The memory of one reading: parts of the buffer that `buffer` returns when the first one is taken."""

    def __init__(self, buffer: Callable[[], mmap.mmap]) -> None:
        self._buffer, self._memory, self._at = buffer, memoryview(b""), 0

    def __call__(self, size: int) -> memoryview:
        """The next bytes. Raises `Replaced` where the buffer has no more: the entry is larger than was known."""
        if not self._at:
            self._memory = memoryview(self._buffer())
        part = self._memory[self._at : self._at + size]
        if len(part) < size:
            raise Replaced(f"it has more than the {len(self._memory)} bytes that memory was reserved for")
        self._at += size
        return part
