"""tier: the interface of every place that stores snapshots outside of the device, and how an entry is kept there.

A tier never raises for what its medium does. An operation that fails returns False or None, counts the kind of failure
in `failures`, and logs one line. What is returned was verified.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvcellar.snapshot import Snapshot

PRIORITIES = range(-8, 9)


@dataclass(frozen=True, slots=True)
class Retention:
    """How an entry is kept. All of it survives a restart.

    saves      tokens that need not be computed where the entry is found; None: those of its span
    priority   of `PRIORITIES`: each level doubles the entry's worth
    pinned     not evicted; it still expires
    expires    when it is deleted, in seconds of the tier's clock; None: never
    owner      what its bytes are counted for, where a tier has a quota for each owner: an opaque name, stored as it is
    """

    saves: int | None = None
    priority: int = 0
    pinned: bool = False
    expires: float | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}, not {self.priority}")
        if len(self.owner.encode()) > 255:
            raise ValueError("an owner has more than 255 bytes")

    def saved(self, snapshot: Snapshot) -> int:
        """Tokens that need not be computed where `snapshot` is found."""
        return len(snapshot.span) if self.saves is None else self.saves


DEFAULT = Retention()
Why = Literal["evicted", "expired", "removed", "damaged", "gone"]
Removed = Callable[[bytes, Why], None]  # is called with each key that a tier has no longer; it may hold a lock then


def unnoticed(key: bytes, why: Why) -> None:
    """Takes no note of an entry that was removed."""


def stronger(one: Retention, other: Retention) -> Retention:
    """What keeps an entry at least as long as both; the owner is that of `one`."""
    lasting = None if one.expires is None or other.expires is None else max(one.expires, other.expires)
    saves = None if one.saves is None or other.saves is None else max(one.saves, other.saves)
    return Retention(saves, max(one.priority, other.priority), one.pinned or other.pinned, lasting, one.owner)


class Entry(NamedTuple):
    """An entry, as it is known without reading its chunks."""

    snapshot: Snapshot
    retention: Retention


class Loaded(NamedTuple):
    """An entry with its chunks."""

    snapshot: Snapshot
    retention: Retention
    chunks: tuple[bytes, ...]


class Tier(Protocol):
    """A store of the snapshots of one identity. All methods may be called from any thread."""

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

    def put(self, snapshot: Snapshot, chunks: Iterable[bytes], retention: Retention = DEFAULT) -> bool:
        """Store an entry; False if that is not possible. May evict others.

        Where the key is stored already, `chunks` are not read, and the stronger retention applies. Raises `ValueError`
        for chunks of other sizes than the snapshot's.
        """
        ...

    def get(self, key: bytes) -> Loaded | None:
        """None on a miss."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether there is an entry, as far as is known without reading it."""
        ...

    def entries(self) -> list[Entry]:
        """All that this identity and cipher can read, in any order (see `chains`)."""
        ...

    def used(self, keys: Iterable[bytes]) -> None:
        """These entries were restored: their values rise."""
        ...

    def pin(self, keys: Iterable[bytes], pinned: bool = True) -> None: ...

    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete entries, pinned ones too."""
        ...

    def close(self) -> None:
        """May be called again."""
        ...


def checked(snapshot: Snapshot, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks as they are read. Raises `ValueError` for chunks of other sizes than the snapshot's."""
    sizes = iter(snapshot.sizes)
    for number, chunk in enumerate(chunks):
        if len(chunk) != next(sizes, None):
            raise ValueError(f"chunk {number} of a snapshot has {len(chunk)} bytes, not the size in its record")
        yield chunk
    if next(sizes, None) is not None:
        raise ValueError("a snapshot has fewer chunks than its record says")


def chains(entries: Iterable[Entry]) -> list[Entry]:
    """Each key once, parents before the snapshots that continue them; what continues nothing here is left out."""
    found: dict[bytes, Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.snapshot.span.start):
        if _continues(entry.snapshot, found):
            found.setdefault(entry.snapshot.key, entry)
    return list(found.values())


def _continues(snapshot: Snapshot, found: dict[bytes, Entry]) -> bool:
    if snapshot.parent is None:
        return snapshot.span.start == 0
    before = found.get(snapshot.parent)
    if before is None:
        return False
    parent = before.snapshot
    return parent.span.end == snapshot.span.start and parent.namespace == snapshot.namespace
