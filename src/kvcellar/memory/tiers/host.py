"""host: snapshots in the memory of this process."""

import time
from collections.abc import Callable, Iterable
from itertools import count

from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.index import Index, Row
from kvcellar.memory.tiers.tier import Breaker, Chunk, Entry, Loaded, Take, Tier, checked, fresh

OVERHEAD = 1024  # bytes that an entry takes beside its content, at most


class HostTier(Tier):
    """Snapshots in memory. Its bytes are reserved before an entry's chunks are read.

    Chunks that `get` has returned are freed when the entry is gone and the caller has dropped them: until then they
    are the caller's bytes (see `transfers`).
    """

    name = "host"

    def __init__(
        self,
        cap: int,
        *,
        quota: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`quota`: bytes for the entries of one owner; None: as many as for all."""
        super().__init__(Breaker())  # memory does not fail
        self._index = Index(None, cap, self, quota=quota, clock=clock)
        self._content: dict[str, tuple[Snapshot, tuple[bytes, ...]]] = {}  # each change is one operation of the dict
        self._numbers = count()

    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        self._index.expire()
        if self._index.renew([snapshot.key], retention):
            return True
        name, size = str(next(self._numbers)), snapshot.size + len(snapshot.tokens) + len(snapshot.record) + OVERHEAD
        if not self._index.reserve(name, size, retention.owner, snapshot.parent):
            self.failures["too large"] += 1
            return False
        stored = False
        try:
            self._content[name] = snapshot, tuple(bytes(chunk) for chunk in checked(snapshot, chunks))
            stored = self._index.enter(Row.of(snapshot, retention, name, size), snapshot)
        finally:
            if not stored:
                self._index.erase([name])
        return True

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        row = self._index.find(key)
        content = self._content.get(row.name) if row is not None else None
        return Loaded(content[0], row.retention, content[1]) if row is not None and content is not None else None

    def entries(self) -> list[Entry]:
        found = ((self._content.get(row.name), row.retention) for row in self._index.rows())
        return [Entry(content[0], retention) for content, retention in found if content is not None]

    def remove(self, keys: Iterable[bytes]) -> None:
        self._index.remove(keys)

    def close(self) -> None:
        """Frees everything."""
        self._index.remove([row.key for row in self._index.rows()])

    def delete(self, names: list[str]) -> list[str]:
        for name in names:
            self._content.pop(name, None)
        return names
