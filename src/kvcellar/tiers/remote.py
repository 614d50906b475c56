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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from kvcellar.retention import DEFAULT, Retention
from kvcellar.snapshot import Snapshot
from kvcellar.tiers.breaker import Breaker
from kvcellar.tiers.codec import (
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
from kvcellar.tiers.ledger import Kept, Ledger
from kvcellar.tiers.objects import Objects, RemoteFailed
from kvcellar.tiers.tier import Chunk, Entry, Loaded, Removed, Take, Why, fresh, unnoticed

T = TypeVar("T")
log = logging.getLogger("kvcellar.tiers")

FIRST = 64 << 10  # bytes of an object in which its header is looked for
MOST_LISTED = 1 << 17  # objects
MOST_DESCRIBED = 1 << 28  # bytes of all descriptions that are listed
_NAME = re.compile("[0-9a-f]{64}")


def prefix_of(identity: bytes) -> str:
    """Of the names of all objects of an identity."""
    return f"kvcellar-{identity.hex()[:32]}-"


class RemoteTier:
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
        removed: Removed = unnoticed,
    ) -> None:
        """`quota`: bytes for the entries of one owner; None: as many as for all. Calls nothing yet."""
        self.cap, self._removed = cap, removed
        self.failures: Counter[str] = Counter()
        self._objects, self._identity, self._cipher, self._clock = objects, identity, cipher or Plain(), clock
        self._ledger = Ledger(cap, quota=quota, clock=clock)
        self._lock = threading.Lock()  # of the ledger; not held during calls
        self._listed = False
        self._undeleted: list[Kept] = []  # whose objects could not be deleted yet: their bytes are counted
        self._breaker = breaker or Breaker(after=1)

    @property
    def down(self) -> bool:
        return self._breaker.down

    def size(self) -> int:
        with self._lock:
            return self._ledger.bytes

    def contains(self, key: bytes) -> bool:
        with self._lock:
            return self._ledger.find(key) is not None

    # -- entries ------------------------------------------------------------------------------------------------

    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        return bool(self._try("storing a snapshot", lambda: self._put(snapshot, chunks, retention)))

    def _put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention) -> bool:
        if not self._listed:
            self._list()
        with self._lock:
            if self._ledger.find(snapshot.key) is not None:
                self._ledger.renew([snapshot.key], retention)
                return True
        try:
            head = head_of(self._identity, snapshot, retention, sealed_meta(snapshot, self._cipher), self._cipher)
        except TooLarge:
            self.failures["too large"] += 1
            return False
        size = file_size(head, snapshot, self._cipher)
        if not self._reserve(size, retention.owner):
            self.failures["too large"] += 1
            return False
        lasts = None if retention.expires is None else retention.expires - self._clock()
        try:
            content = b"".join(encoded(head, snapshot, chunks, self._cipher))
            self._objects.write(snapshot.key.hex(), content, lasts)
        except RemoteFailed:
            with self._lock:  # it may be there all the same
                self._undeleted.append(Kept(snapshot, retention, size))
            raise
        except BaseException:
            with self._lock:
                self._ledger.free(size, retention.owner)
            raise
        with self._lock:
            self._ledger.enter(snapshot, retention, size, content[-DIGEST:])
        return True

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        return self._try("reading a snapshot", lambda: self._get(key, take))

    def _get(self, key: bytes, take: Take) -> Loaded | None:
        with self._lock:
            kept = self._ledger.find(key)
        try:
            kept = kept or self._described(key)
            if kept is not None and kept.retention.expires is not None and kept.retention.expires <= self._clock():
                self._remove([key], "expired")
                return None
            chunks = self._chunks(kept, take) if kept is not None else None
        except (Damaged, Foreign, Replaced) as error:
            self._unusable(key, error)
            return None
        if kept is None or chunks is None:
            self._gone(key)
            return None
        with self._lock:
            self._ledger.admit(kept.snapshot, kept.retention, kept.size)
        return Loaded(kept.snapshot, kept.retention, chunks)

    def _chunks(self, kept: Kept, take: Take) -> tuple[memoryview, ...] | None:
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
        if not self._cipher.overhead and kept.seal not in (None, reader.seal):
            raise Damaged("it is not what this process has stored")
        return tuple(reader.chunks(kept.snapshot, self._cipher, lambda _: next(space)))

    def _described(self, key: bytes, size: int | None = None) -> Kept | None:
        """An object by its header; None if there is none. `size`: how many bytes it has, if that is known."""
        head = self._objects.read(key.hex(), FIRST)
        if head is not None and (needed := head_sizes(head)[0]) > len(head):
            head = self._objects.read(key.hex(), needed)
        if head is None:
            return None
        header = read_header(Content(head, head_sizes(head)[1] if size is None else size))
        return Kept(self._snapshot(key, header), header.retention, header.end)

    def _snapshot(self, key: bytes, header: Header) -> Snapshot:
        if (header.identity, header.key) != (self._identity, key):
            raise Damaged("it is another snapshot than the one that was stored")
        return header.snapshot(self._cipher)

    def entries(self) -> list[Entry]:
        self._try("listing entries", self._list)
        with self._lock:
            return self._ledger.entries()

    def _list(self) -> None:
        """Bring the ledger up to date with the store: forget what is gone, and read the headers of what is new."""
        with self._lock:
            before = {kept.snapshot.key for kept in self._ledger.all()}
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
        with self._lock:
            self._ledger.admit(kept.snapshot, kept.retention, size)
        return len(kept.snapshot.tokens) + len(kept.snapshot.record) + 8 * len(kept.snapshot.sizes)

    def used(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._ledger.used(keys)

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """For this process: others, and this one after a restart, know how an entry was kept when it was stored."""
        with self._lock:
            self._ledger.renew(keys, retention)

    def remove(self, keys: Iterable[bytes]) -> None:
        self._try("removing", lambda: self._remove(list(keys), "removed"))

    def close(self) -> None:
        with suppress(RemoteFailed):
            self._objects.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _reserve(self, size: int, owner: str) -> bool:
        with self._lock:
            again, self._undeleted = self._undeleted, []
        self._delete(again)
        with self._lock:
            expired = self._ledger.expire()
        self._discard(expired, "expired")
        while True:
            with self._lock:
                evicted = self._ledger.reserve(size, owner)
            if not evicted:
                return evicted is not None
            self._discard(evicted, "evicted")

    def _remove(self, keys: list[bytes], why: Why) -> None:
        with self._lock:
            gone = self._ledger.remove(keys)
        self._discard(gone, why)
        known = {kept.snapshot.key for kept in gone}
        self._objects.delete([key.hex() for key in keys if key not in known])

    def _discard(self, gone: list[Kept], why: Why) -> None:
        for kept in gone:
            self._removed(kept.snapshot.key, why)
        self._delete(gone)

    def _delete(self, gone: list[Kept]) -> None:
        """Delete objects, and give back their bytes."""
        if not gone:
            return
        try:
            self._objects.delete([kept.snapshot.key.hex() for kept in gone])
        except RemoteFailed:
            with self._lock:
                self._undeleted += gone
            raise
        with self._lock:
            for kept in gone:
                self._ledger.free(kept.size, kept.owner)

    def _gone(self, key: bytes) -> None:
        """An object is not there. It counts as a failure if it was known: the store has lost or evicted it."""
        if self._forget(key):
            self.failures["gone"] += 1

    def _forget(self, key: bytes) -> bool:
        with self._lock:
            gone = self._ledger.remove([key])
            for kept in gone:
                self._ledger.free(kept.size, kept.owner)
                self._removed(key, "gone")
        return bool(gone)

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
