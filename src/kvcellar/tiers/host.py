"""host: snapshots in the memory of this process."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from kvcellar.retention import DEFAULT, Retention
from kvcellar.snapshot import Snapshot
from kvcellar.tiers.ledger import Kept, Ledger
from kvcellar.tiers.tier import Chunk, Entry, Loaded, Removed, Take, Why, checked, fresh, unnoticed

log = logging.getLogger("kvcellar.tiers")

OVERHEAD = 1024  # bytes that an entry takes beside its content, at most


class HostTier:
    """Snapshots in memory. Its bytes are reserved before an entry's chunks are read.

    Chunks that `get` has returned are freed when the entry is gone and the caller has dropped them: until then they
    are the caller's bytes (see `transfers`).
    """

    name = "host"
    copies = 0
    down = False

    def __init__(
        self,
        cap: int,
        *,
        quota: int | None = None,
        clock: Callable[[], float] = time.time,
        removed: Removed = unnoticed,
    ) -> None:
        """`quota`: bytes for the entries of one owner; None: as many as for all."""
        self.cap, self._removed = cap, removed
        self.failures: Counter[str] = Counter()
        self._ledger = Ledger(cap, quota=quota, clock=clock)
        self._chunks: dict[bytes, tuple[bytes, ...]] = {}
        self._lock = threading.Lock()

    def size(self) -> int:
        with self._lock:
            return self._ledger.bytes

    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        size = snapshot.size + len(snapshot.tokens) + len(snapshot.record) + OVERHEAD
        with self._lock:
            self._delete(self._ledger.expire(), "expired")
            if self._ledger.find(snapshot.key) is not None:
                self._ledger.renew([snapshot.key], retention)
                return True
            if not self._reserve(size, retention.owner):
                self.failures["too large"] += 1
                return False
        try:
            content = tuple(bytes(chunk) for chunk in checked(snapshot, chunks))
        except BaseException:
            with self._lock:
                self._ledger.free(size, retention.owner)
            raise
        with self._lock:
            self._ledger.enter(snapshot, retention, size)
            self._chunks.setdefault(snapshot.key, content)
        return True

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        with self._lock:
            kept = self._ledger.find(key)
            return None if kept is None else Loaded(kept.snapshot, kept.retention, self._chunks[key])

    def contains(self, key: bytes) -> bool:
        with self._lock:
            return self._ledger.find(key) is not None

    def entries(self) -> list[Entry]:
        with self._lock:
            return self._ledger.entries()

    def used(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._ledger.used(keys)

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        with self._lock:
            self._ledger.renew(keys, retention)

    def remove(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._delete(self._ledger.remove(keys), "removed")

    def close(self) -> None:
        """Frees everything."""
        with self._lock:
            self._delete(self._ledger.remove([kept.snapshot.key for kept in self._ledger.all()]), "removed")

    def _reserve(self, size: int, owner: str) -> bool:
        while gone := self._ledger.reserve(size, owner):
            self._delete(gone, "evicted")
        return gone is not None

    def _delete(self, gone: Iterable[Kept], why: Why) -> None:
        for kept in gone:
            self._removed(kept.snapshot.key, why)
            del self._chunks[kept.snapshot.key]
            self._ledger.free(kept.size, kept.owner)
