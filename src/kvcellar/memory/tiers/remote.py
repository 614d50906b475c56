"""remote: snapshots in a store elsewhere, which other servers may share. Objects have the format of `codec`.

Each process keeps the cap for what it has stored, and what others had stored with the same cipher when `entries` was
called last. A store that deletes objects by itself may do so: each is a miss.

Always true:
  * no more is read of an object than its description says, and one byte, and no description is longer than `codec`
    allows;
  * without a cipher, what this process has stored is read only as it was stored. What others have stored is checked for
    damage only: every client that can write to the store
    decides its content. A cipher authenticates both.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from typing import NamedTuple, TypeVar

from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import KEY, Snapshot
from kvcellar.memory.tiers.codec import (
    DIGEST,
    Cipher,
    Content,
    Damaged,
    Foreign,
    Header,
    Plain,
    Reader,
    Replaced,
    TooLarge,
    encoded,
    file_size,
    head_of,
    head_sizes,
    read_header,
    sealed_meta,
)
from kvcellar.memory.tiers.index import Index, Row, Why
from kvcellar.memory.tiers.objects import Objects, RemoteFailed
from kvcellar.memory.tiers.tier import Breaker, Chunk, Entry, Loaded, Take, Tier, fresh

T = TypeVar("T")
log = logging.getLogger("kvcellar.memory.tiers")

FIRST = 64 << 10  # bytes of an object in which its header is looked for
MOST_LISTED = 1 << 17  # objects
MOST_DESCRIBED = 1 << 28  # bytes of all descriptions that are listed
_NAME = re.compile("[0-9a-f]{64}")


def prefix_of(identity: bytes) -> str:
    """Of the names of all objects of an identity."""
    return f"kvcellar-{identity.hex()[:32]}-"


class _Object(NamedTuple):
    """An object as it is known without reading its chunks. `seal`: of what this process has stored, else empty."""

    snapshot: Snapshot
    retention: Retention
    size: int
    seal: bytes = b""


class RemoteTier(Tier):
    """The snapshots of one identity in a store elsewhere."""

    name = "remote"
    copies = 1

    def __init__(
        self,
        objects: Objects,
        *,
        identity: bytes,
        cap: int,
        quota: int | None = None,
        cipher: Cipher | None = None,
        clock: Callable[[], float] = time.time,
        breaker: Breaker | None = None,
    ) -> None:
        """`quota`: bytes for the entries of one owner; None: as many as for all. Calls nothing yet."""
        super().__init__(breaker or Breaker())
        self._objects, self._identity, self._cipher, self._clock = objects, identity, cipher or Plain(), clock
        self._index = Index(None, cap, self, quota=quota, clock=clock)
        self._snapshots: dict[str, Snapshot] = {}  # by name: that of the object, and a number
        self._numbers = count()
        self._listed = False
        self._undeleted: set[str] = set()  # what could not be deleted yet: its bytes are counted

    # -- entries ------------------------------------------------------------------------------------------------

    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        return bool(self._try("storing a snapshot", lambda: self._put(snapshot, chunks, retention)))

    def _put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention) -> bool:
        if not self._listed:
            self._list()
        if self._index.renew([snapshot.key], retention):
            return True
        try:
            head = head_of(self._identity, snapshot, retention, sealed_meta(snapshot, self._cipher), self._cipher)
        except TooLarge:
            self.failures["too large"] += 1
            return False
        size = file_size(head, snapshot, self._cipher)
        self._index.erase(list(self._undeleted))
        self._index.expire()
        name = self._named(snapshot)
        if not self._index.reserve(name, size, retention.owner, snapshot.parent):
            self.failures["too large"] += 1
            return False
        lasts = None if retention.expires is None else retention.expires - self._clock()
        try:
            content = b"".join(encoded(head, snapshot, chunks, self._cipher))
            self._objects.write(snapshot.key.hex(), content, lasts)
        except RemoteFailed:
            self._undeleted.add(name)  # it may be there all the same
            raise
        except BaseException:
            self._index.release([name])
            raise
        self._enter(name, _Object(snapshot, retention, size, content[-DIGEST:]))
        return True

    def _named(self, snapshot: Snapshot) -> str:
        return f"{snapshot.key.hex()}.{next(self._numbers)}"

    def _enter(self, name: str, found: _Object) -> None:
        """Know an object. Where it is known already, the bytes that were reserved for it are given back."""
        self._snapshots[name] = found.snapshot
        row = Row.of(found.snapshot, found.retention, name, found.size, seal=found.seal)
        if not self._index.enter(row, found.snapshot):
            del self._snapshots[name]
            self._index.release([name])

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        return self._try("reading a snapshot", lambda: self._get(key, take))

    def _get(self, key: bytes, take: Take) -> Loaded | None:
        try:
            known = self._known(key)
            found = known or self._described(key)
            if found is not None and found.retention.expired(self._clock()):
                self._remove([key], "expired")
                return None
            chunks = self._chunks(found, take) if found is not None else None
        except (Damaged, Foreign, Replaced) as error:
            self._unusable(key, error)
            return None
        if found is None or chunks is None:
            self._missing(key)
            return None
        if known is None:
            self._enter(self._named(found.snapshot), found)
        return Loaded(found.snapshot, found.retention, chunks)

    def _known(self, key: bytes) -> _Object | None:
        row = self._index.find(key)
        snapshot = self._snapshots.get(row.name) if row is not None else None
        return (
            _Object(snapshot, row.retention, row.size, row.seal) if row is not None and snapshot is not None else None
        )

    def _chunks(self, kept: _Object, take: Take) -> tuple[memoryview, ...] | None:
        """The verified chunks of an object; None if there is none. Memory for them is taken before it is read."""
        key, space = kept.snapshot.key, iter([take(size) for size in kept.snapshot.sizes])
        content = self._objects.read(key.hex(), kept.size + 1)
        if content is None:
            return None
        if len(content) != kept.size:
            raise Replaced(f"it has not the {kept.size} bytes that it had")
        reader = Reader(Content(content))
        if self._snapshot(key, reader.header) != kept.snapshot:
            raise Replaced("it has another description")
        if not self._cipher.overhead and kept.seal not in (b"", reader.seal):
            raise Damaged("it is not what this process has stored")
        return tuple(reader.chunks(kept.snapshot, self._cipher, lambda _: next(space)))

    def _described(self, key: bytes, size: int | None = None) -> _Object | None:
        """An object by its header; None if there is none. `size`: how many bytes it has, if that is known."""
        head = self._objects.read(key.hex(), FIRST)
        if head is not None and (needed := head_sizes(head)[0]) > len(head):
            head = self._objects.read(key.hex(), needed)
        if head is None:
            return None
        header = read_header(Content(head, head_sizes(head)[1] if size is None else size))
        return _Object(self._snapshot(key, header), header.retention, header.end)

    def _snapshot(self, key: bytes, header: Header) -> Snapshot:
        if (header.identity, header.key) != (self._identity, key):
            raise Damaged("it is another snapshot than the one that was stored")
        return header.snapshot(self._cipher)

    def entries(self) -> list[Entry]:
        self._try("listing entries", self._list)
        found = ((self._snapshots.get(row.name), row.retention) for row in self._index.rows())
        return [Entry(snapshot, retention) for snapshot, retention in found if snapshot is not None]

    def _list(self) -> None:
        """Bring the index up to date with the store: forget what is gone, and read the headers of what is new."""
        before = {bytes.fromhex(name[: 2 * KEY]) for name in self._index.names()}
        sizes = self._objects.sizes(MOST_LISTED)
        there = {bytes.fromhex(name): size for name, size in sizes.items() if _NAME.fullmatch(name)}
        if len(sizes) < MOST_LISTED:  # else what is not listed may be there
            for key in before - there.keys():
                self._forget(key)
        left = MOST_DESCRIBED
        for key in there.keys() - before:
            try:
                left -= self._admit(key, there[key])
            except (Damaged, Foreign) as error:
                self._unusable(key, error)
            if left < 0:
                break
        if left < 0 or len(sizes) >= MOST_LISTED:
            log.warning("the remote store has more snapshots than this process lists: others are computed again")
        self._listed = True

    def _admit(self, key: bytes, size: int) -> int:
        """Know an object by its header; returns about how many bytes that takes."""
        kept = self._described(key, size)
        if kept is None:
            return 0
        self._enter(self._named(kept.snapshot), kept._replace(size=size))
        return len(kept.snapshot.tokens) + len(kept.snapshot.record) + 8 * len(kept.snapshot.sizes)

    def remove(self, keys: Iterable[bytes]) -> None:
        self._try("removing", lambda: self._remove(list(keys)))

    def close(self) -> None:
        with suppress(RemoteFailed):
            self._objects.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _remove(self, keys: list[bytes], why: Why = "removed") -> None:
        """Also objects that are not known."""
        known = {key for key in keys if self.contains(key)}
        self._index.remove(keys, why)
        self._objects.delete([key.hex() for key in keys if key not in known])

    def delete(self, names: list[str]) -> list[str]:
        for name in names:
            self._snapshots.pop(name, None)
        self._undeleted.update(names)
        self._objects.delete([name[: 2 * KEY] for name in names])
        self._undeleted.difference_update(names)
        return names

    def _missing(self, key: bytes) -> None:
        """An object is not there. It counts as a failure if it was known: the store has lost or evicted it."""
        if self._forget(key):
            self.failures["gone"] += 1

    def _forget(self, key: bytes) -> bool:
        row = self._index.find(key)
        if row is None:
            return False
        self._snapshots.pop(row.name, None)
        return self._index.forget([row.name]) > 0

    def _unusable(self, key: bytes, error: Exception) -> None:
        """Count an object that could not be read. What is damaged is removed."""
        if isinstance(error, Foreign):
            self.failures["foreign"] += 1
            return
        if isinstance(error, Replaced):
            self.failures["replaced"] += 1
            self._forget(key)
            return
        self.failures["damaged"] += 1
        log.warning("reading the remote snapshot %s failed: %s", key.hex()[:16], error)
        self._remove([key], "damaged")

    def _try(self, what: str, act: Callable[[], T]) -> T | None:
        if self.down:
            self.failures["down"] += 1
            return None
        try:
            found = act()
        except RemoteFailed as error:
            self.failures["unreachable"] += 1
            self._breaker.failed()
            log.warning("%s failed: %s", what, error)
            return None
        self._breaker.succeeded()
        return found
