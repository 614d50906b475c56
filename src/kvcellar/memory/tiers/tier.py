"""tier: the interface of every place that stores snapshots outside of the device.

A tier never raises for what its medium does. An operation that fails returns False or None, counts the kind of failure
in `failures`, and logs one line. What is returned was verified.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import Snapshot

Chunk = bytes | memoryview
Take = Callable[[int], memoryview]  # returns memory of so many bytes, to be written; raises `Replaced` for too many
Why = Literal["evicted", "expired", "removed", "damaged", "gone"]


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


class Uncatalogued:
    """Of tiers that are used alone."""

    def stored(self, tier: str, snapshot: Snapshot, retention: Retention) -> None: ...
    def removed(self, tier: str, key: bytes, why: Why) -> None: ...

    def of(self, key: bytes) -> frozenset[str]:
        return frozenset()


class Entry(NamedTuple):
    """An entry, as it is known without reading its chunks."""

    snapshot: Snapshot
    retention: Retention


class Loaded(NamedTuple):
    """An entry with its chunks. They may be in memory that the caller of `get` has given."""

    snapshot: Snapshot
    retention: Retention
    chunks: tuple[Chunk, ...]


class Tier(Protocol):
    """A store of the snapshots of one identity. All methods may be called from any thread."""

    catalogue: Catalogue  # what the tier reports to; those who use it set it

    @property
    def name(self) -> str:
        """ "host", "disk" or "remote"."""
        ...

    @property
    def cap(self) -> int:
        """Bytes that the tier never exceeds."""
        ...

    @property
    def copies(self) -> int:
        """How often the bytes of an entry are in memory during `put` or `get`, beside its chunks."""
        ...

    @property
    def failures(self) -> Counter[str]:
        """Operations that failed, by kind."""
        ...

    @property
    def down(self) -> bool:
        """Whether the last operations failed for a reason that is not the entry's. To be tried again later: it becomes
        False by itself."""
        ...

    def size(self) -> int:
        """Bytes used now, as far as they are counted against `cap`."""
        ...

    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        """Store an entry; False if that is not possible. May evict others.

        Where the key is stored already, `chunks` are not read, and the stronger retention applies. Raises `ValueError`
        for chunks of other sizes than the snapshot's.
        """
        ...

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        """None on a miss. `take` is called for the memory of each chunk that has to be read, in order."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether there is an entry, as far as is known without reading it."""
        ...

    def entries(self) -> list[Entry]:
        """All that this identity and cipher can read, in any order. They are reported, too."""
        ...

    def used(self, keys: Iterable[bytes]) -> None:
        """These entries were restored: their values rise."""
        ...

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """Keep these entries at least as long as `retention` says."""
        ...

    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete entries, pinned ones too."""
        ...

    def close(self) -> None:
        """May be called again."""
        ...


def checked(snapshot: Snapshot, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks as they are read. Raises `ValueError` for chunks of other sizes than the snapshot's."""
    sizes = iter(snapshot.sizes)
    for number, chunk in enumerate(chunks):
        if len(chunk) != next(sizes, None):
            raise ValueError(f"chunk {number} of a snapshot has {len(chunk)} bytes, not the size in its record")
        yield chunk
    if next(sizes, None) is not None:
        raise ValueError("a snapshot has fewer chunks than its record says")
