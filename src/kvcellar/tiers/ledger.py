"""ledger: which entries a tier has, in memory: bytes, values, owners, expiry, and which go next.

Always true:
  * bytes of entries and bytes reserved are at most the cap, and for each owner at most the quota;
  * what is evicted is neither pinned nor continued by another entry of the tier.

The caller holds a lock. The bytes of an entry that was evicted stay reserved until the caller has freed them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from kvcellar.heap import Heap
from kvcellar.policy import value
from kvcellar.retention import Retention, stronger
from kvcellar.snapshot import Snapshot
from kvcellar.tiers.tier import Entry


@dataclass(slots=True, eq=False)
class Kept:
    """An entry. `size` is all that it takes; `seal`: of what this process has stored."""

    snapshot: Snapshot
    retention: Retention
    size: int
    hits: int = 1
    value: float = 0.0
    entry: int = 0  # of the heap
    live: bool = True
    seal: bytes | None = None

    @property
    def owner(self) -> str:
        return self.retention.owner


class Ledger:
    def __init__(self, cap: int, *, quota: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """`quota`: bytes that the entries of one owner may have; None: as many as all."""
        self.cap, self._quota, self._clock = cap, inf if quota is None else quota, clock
        self.bytes = 0  # of entries, and reserved
        self._of_owner: Counter[str] = Counter()  # the same, by owner
        self._kept: dict[bytes, Kept] = {}
        self._children: Counter[bytes] = Counter()  # how many entries continue a key
        self._leaves: Heap[Kept] = Heap(self._evictable)
        self._leaves_of: dict[str, Heap[Kept]] = {}
        self._expiring: list[tuple[float, int, Kept]] = []  # a heap
        self._numbers = count()
        self._worth = 0.0  # value of the last entry evicted: what is not used falls behind

    # -- looking ------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Kept | None:
        """None, too, for an entry that has expired."""
        kept = self._kept.get(key)
        return None if kept is None or self._has_expired(kept) else kept

    def all(self) -> list[Kept]:
        """Those that have expired, too."""
        return list(self._kept.values())

    def entries(self) -> list[Entry]:
        return [Entry(kept.snapshot, kept.retention) for kept in self._kept.values() if not self._has_expired(kept)]

    # -- bytes --------------------------------------------------------------------------------------------------

    def reserve(self, size: int, owner: str) -> list[Kept] | None:
        """Reserve bytes for an entry that is going to be stored, and return an empty list.

        Where too few are free, entries are evicted and returned instead: the caller deletes them, frees their bytes,
        and calls again. None if too few can be made free; nothing is evicted then.
        """
        evicted: list[Kept] = []
        if not self._evict(size, owner, evicted):
            for kept in reversed(evicted):
                self._add(kept)
            return None
        if evicted:
            self._worth = max(kept.value for kept in evicted)
        else:
            self._count(size, owner)
        return evicted

    def _evict(self, size: int, owner: str, evicted: list[Kept]) -> bool:
        """Evict until `size` bytes more would be within cap and quota; False if that is not possible."""
        total, of_owner = self.bytes + size, self._of_owner[owner] + size
        while of_owner > self._quota or total > self.cap:
            heap = self._leaves_of.get(owner) if of_owner > self._quota else self._leaves
            kept = heap.pop() if heap is not None else None
            if kept is None:
                return False
            self._take(kept)
            evicted.append(kept)
            total -= kept.size
            of_owner -= kept.size if kept.owner == owner else 0
        return True

    def free(self, size: int, owner: str) -> None:
        """Give back bytes that were reserved, or those of an entry that was removed."""
        self._count(-size, owner)

    def _count(self, size: int, owner: str) -> None:
        self.bytes += size
        self._of_owner[owner] += size
        if not self._of_owner[owner]:
            del self._of_owner[owner]
            self._leaves_of.pop(owner, None)

    # -- entries ------------------------------------------------------------------------------------------------

    def enter(self, snapshot: Snapshot, retention: Retention, size: int, seal: bytes | None = None) -> None:
        """Add an entry whose bytes were reserved. Where its key is there already, they are freed."""
        if snapshot.key in self._kept:
            self.free(size, retention.owner)
            self.renew([snapshot.key], retention)
        else:
            self._add(self._rated(Kept(snapshot, retention, size, seal=seal)))

    def admit(self, snapshot: Snapshot, retention: Retention, size: int) -> None:
        """Add an entry that another process has stored, even over the cap: the next reservation evicts."""
        if snapshot.key not in self._kept:
            self._count(size, retention.owner)
            self._add(self._rated(Kept(snapshot, retention, size)))

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """Keep entries at least as long as `retention` says."""
        for kept in self._found(keys):
            self._change(kept, stronger(kept.retention, retention))

    def used(self, keys: Iterable[bytes]) -> None:
        for kept in self._found(keys):
            kept.hits += 1
            self._push(self._rated(kept))

    def remove(self, keys: Iterable[bytes]) -> list[Kept]:
        """The caller deletes what is returned and frees its bytes."""
        return [self._take(kept) for kept in self._found(keys)]

    def expire(self) -> list[Kept]:
        """Remove what has expired. The caller deletes what is returned and frees its bytes."""
        gone: list[Kept] = []
        while self._expiring and self._expiring[0][0] <= self._clock():
            expires, _, kept = heappop(self._expiring)
            if kept.live and kept.retention.expires == expires:
                gone.append(self._take(kept))
        return gone

    # -- inside -------------------------------------------------------------------------------------------------

    def _found(self, keys: Iterable[bytes]) -> Iterator[Kept]:
        for key in keys:
            if (kept := self._kept.get(key)) is not None:
                yield kept

    def _has_expired(self, kept: Kept) -> bool:
        return kept.retention.expires is not None and kept.retention.expires <= self._clock()

    def _evictable(self, kept: Kept) -> bool:
        return kept.live and not kept.retention.pinned and kept.snapshot.key not in self._children

    def _rated(self, kept: Kept) -> Kept:
        """With its present value."""
        saves, priority = kept.retention.saved(kept.snapshot.span), kept.retention.priority
        kept.value = value(self._worth, hits=kept.hits, saves=saves, costs=kept.size, priority=priority)
        return kept

    def _change(self, kept: Kept, retention: Retention) -> None:
        if retention != kept.retention:
            kept.retention = retention
            self._push(self._rated(kept))
            self._watch(kept)

    def _add(self, kept: Kept) -> None:
        kept.live = True
        self._kept[kept.snapshot.key] = kept
        if kept.snapshot.parent is not None:
            self._children[kept.snapshot.parent] += 1
        self._push(kept)
        self._watch(kept)

    def _take(self, kept: Kept) -> Kept:
        """Remove an entry; its bytes stay counted."""
        kept.live = False
        del self._kept[kept.snapshot.key]
        if (parent := kept.snapshot.parent) is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                for before in self._found([parent]):
                    self._push(before)
        return kept

    def _push(self, kept: Kept) -> None:
        if self._evictable(kept):
            self._leaves.push(kept)
            if self._quota < self.cap:
                self._leaves_of.setdefault(kept.owner, Heap(self._evictable)).put_back(kept)

    def _watch(self, kept: Kept) -> None:
        if kept.retention.expires is not None:
            heappush(self._expiring, (kept.retention.expires, next(self._numbers), kept))
