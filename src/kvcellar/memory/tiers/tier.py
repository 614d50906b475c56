"""tier: what every place is that stores snapshots outside of the device.

A tier never raises for what its medium does. An operation that fails returns False or None, counts the kind of failure
in `failures`, and logs one line. What is returned was verified.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.index import Index, Why

NEXT_LOOK = 0.25  # seconds after a look at what others have stored until the next one at the same place
Chunk = bytes | memoryview
Take = Callable[[int], memoryview]  # returns memory of so many bytes, to be written; raises `Replaced` for too many


def fresh(size: int) -> memoryview:
    """Memory that is allocated for this call."""
    return memoryview(bytearray(size))


class Catalogue(Protocol):
    """Which tiers have what, as they report it. Called on any thread, by a tier that may hold a lock: it calls none."""

    def stored(self, tier: str, snapshot: Snapshot, retention: Retention) -> None:
        """A tier has a snapshot, which may have been reported before."""
        ...

    def removed(self, tier: str, key: bytes, why: Why) -> None:
        """A tier has a snapshot no longer, which may not have been reported."""
        ...

    def of(self, key: bytes) -> frozenset[str]:
        """Names of the tiers that have a snapshot, as far as is known."""
        ...


class Entry(NamedTuple):
    """An entry, as it is known without reading its chunks."""

    snapshot: Snapshot
    retention: Retention


class Loaded(NamedTuple):
    """An entry with its chunks. They may be in memory that the caller of `get` has given."""

    snapshot: Snapshot
    retention: Retention
    chunks: tuple[Chunk, ...]


class Breaker:
    """Counts failures in a row. `down` from the last of `after` on for `wait` seconds, doubled each time it fails again
    without a success in between, up to `longest`."""

    def __init__(
        self, *, after: int = 1, wait: float = 1.0, longest: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after, self._first, self._longest, self._clock = after, wait, longest, clock
        self._lock = threading.Lock()
        self._in_row, self._wait, self._until = 0, wait, -float("inf")

    @property
    def down(self) -> bool:
        return self._clock() < self._until

    def failed(self) -> None:
        with self._lock:
            self._in_row += 1
            if self._in_row >= self._after and not self.down:
                self._until = self._clock() + self._wait
                self._wait = min(2 * self._wait, self._longest)

    def succeeded(self) -> None:
        with self._lock:
            self._in_row, self._wait = 0, self._first


class Tier(ABC):
    """A store of the snapshots of one identity. All methods may be called from any thread."""

    name: str  # "host", "disk" or "remote"
    copies = 0  # how often the bytes of an entry are in memory during `put` or `get`, beside its chunks
    shared = False  # whether other processes may have stored what this one does not know: `look` finds it
    _index: Index

    def __init__(self, breaker: Breaker) -> None:
        self.catalogue: Catalogue | None = None  # what the tier reports to; None: it is used alone
        self.failures = Counter[str]()  # operations that failed, by kind
        self._breaker = breaker

    @property
    def cap(self) -> int:
        """Bytes that the tier never exceeds."""
        return self._index.cap

    @property
    def down(self) -> bool:
        """Whether the last operations failed for a reason that is not the entry's. To be tried again later: it becomes
        False by itself."""
        return self._breaker.down

    def size(self) -> int:
        """Of all contents, and the index in a file, at most: bytes that are counted against `cap`."""
        return self._index.size()

    @abstractmethod
    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        """Store an entry; False if that is not possible. May evict others.

        Where the key is stored already, `chunks` are not read, and the stronger retention applies. Raises `ValueError`
        for chunks of other sizes than the snapshot's.
        """
        ...

    @abstractmethod
    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        """None on a miss. `take` is called for the memory of each chunk that has to be read, in order."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether there is an entry, as far as is known without reading it."""
        return self._index.find(key) is not None

    @abstractmethod
    def entries(self) -> list[Entry]:
        """All that this identity and cipher can read, in any order. They are reported, too."""
        ...

    def place(self, namespace: str, key: bytes) -> int:
        """Of looks for texts with the same place, one finds what all would find."""
        return 0

    def look(
        self, namespace: str, key: bytes, known: Sequence[Snapshot], *, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Report what others have stored that this process does not know, as far as a text of these tokens can use it.
        `known`: the longest chain of snapshots that begin it. It ends when it is not `wanted` any more. Of tiers that
        are `shared`."""
        raise NotImplementedError

    def used(self, keys: Iterable[bytes]) -> None:
        """These entries were restored: their values rise."""
        self._index.used(keys)

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """Keep these entries at least as long as `retention` says. Where a store elsewhere has the contents, others
        know how they were kept when stored."""
        self._index.renew(keys, retention)

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete entries, pinned ones too."""
        ...

    @abstractmethod
    def close(self) -> None:
        """May be called again."""
        ...

    # -- for the index ------------------------------------------------------------------------------------------

    @abstractmethod
    def delete(self, names: list[str]) -> Iterable[str]:
        """Delete contents; returns the names of those that are gone."""
        ...

    def made(self, snapshot: Snapshot, retention: Retention) -> None:
        """There is an entry that was not there before."""
        if self.catalogue is not None:
            self.catalogue.stored(self.name, snapshot, retention)

    def gone(self, key: bytes, why: Why) -> None:
        """There is an entry no longer."""
        if self.catalogue is not None:
            self.catalogue.removed(self.name, key, why)


def checked(snapshot: Snapshot, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks as they are read. Raises `ValueError` for chunks of other sizes than the snapshot's."""
    sizes = iter(snapshot.sizes)
    for number, chunk in enumerate(chunks):
        if len(chunk) != next(sizes, None):
            raise ValueError(f"chunk {number} of a snapshot has {len(chunk)} bytes, not the size in its record")
        yield chunk
    if next(sizes, None) is not None:
        raise ValueError("a snapshot has fewer chunks than its record says")
