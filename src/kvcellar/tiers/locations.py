"""locations: which tiers have an entry, as far as this process knows, without a look at any of them.

Always true:
  * a key is here only with at least one tier; one that has lost its last tier is reported once by `gone`.

It may be out of date for as long as an operation of a tier takes: what is read decides.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvcellar.snapshot import Snapshot
from kvcellar.tiers.tier import Why


class Watch(Protocol):
    """Is told which tiers have what. Called on any thread."""

    def stored(self, tier: str, snapshots: Iterable[Snapshot]) -> None: ...
    def removed(self, tier: str, key: bytes) -> None: ...


class Gone(NamedTuple):
    """An entry that no tier has any longer; `tier` was the last one that had it."""

    key: bytes
    tier: str
    why: Why


class Locations:
    """All methods may be called from any thread."""

    def __init__(self, watch: "Watch | None" = None) -> None:
        """`watch` is told of each change."""
        self._watch = watch
        self._lock = threading.Lock()
        self._of: dict[bytes, frozenset[str]] = {}
        self._gone: deque[Gone] = deque()

    def of(self, key: bytes) -> frozenset[str]:
        """Names of the tiers that have an entry."""
        return self._of.get(key, frozenset())

    def stored(self, tier: str, snapshots: Sequence[Snapshot]) -> None:
        """A tier has these snapshots, those that others continue first."""
        with self._lock:
            for snapshot in snapshots:
                self._of[snapshot.key] = self.of(snapshot.key) | {tier}
            if self._watch is not None:
                self._watch.stored(tier, snapshots)

    def removed(self, tier: str, key: bytes, why: Why) -> None:
        """A tier has an entry no longer."""
        with self._lock:
            if self._watch is not None:
                self._watch.removed(tier, key)
            if left := self.of(key) - {tier}:
                self._of[key] = left
            elif self._of.pop(key, None) is not None:
                self._gone.append(Gone(key, tier, why))

    def gone(self) -> list[Gone]:
        """What no tier has any longer, and was not reported before."""
        if not self._gone:
            return []
        with self._lock:
            found = [one for one in self._gone if one.key not in self._of]
            self._gone.clear()
        return found

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert all(self._of.values())
