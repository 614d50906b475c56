"""heap: things in order of their value, which may rise while they are in it."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Valued(Protocol):
    value: float
    entry: int  # number of its latest entry, set by the heap


T = TypeVar("T", bound=Valued)


class Heap(Generic[T]):
    """A heap whose entries may be stale: one counts while `live(thing)`, if it is the latest of the thing.

    `push` and `pop` cost O(log n) on average: stale entries are skipped, and removed when they are most of the heap.
    """

    def __init__(self, live: Callable[[T], bool]) -> None:
        self._live = live
        self._entries: list[tuple[float, int, T]] = []
        self._numbers = count(1)  # equal values leave in the order in which they came
        self._limit = 64

    def push(self, thing: T) -> None:
        """Enter a thing, or its new value: behind all of equal value."""
        thing.entry = next(self._numbers)
        self.put_back(thing)

    def put_back(self, thing: T) -> None:
        """Enter a thing that was popped where it was."""
        heappush(self._entries, (thing.value, thing.entry, thing))
        if len(self._entries) > self._limit:
            self._entries = [entry for entry in self._entries if self._counts(entry)]
            heapify(self._entries)
            self._limit = 64 + 2 * len(self._entries)

    def pop(self) -> T | None:
        """Remove the live thing of the lowest value and return it; None if there is none."""
        while self._entries:
            entry = heappop(self._entries)
            if self._counts(entry):
                return entry[2]
        return None

    def first(self) -> T | None:
        """The live thing of the lowest value, which stays where it is; None if there is none."""
        while self._entries and not self._counts(self._entries[0]):
            heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def _counts(self, entry: tuple[float, int, T]) -> bool:
        return entry[1] == entry[2].entry and self._live(entry[2])

    def things(self) -> list[T]:
        """All that are live."""
        return [entry[2] for entry in self._entries if self._counts(entry)]
