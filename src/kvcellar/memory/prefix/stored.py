"""stored: which snapshots there are outside of the device, in which tiers, and how far a key can be resumed from them.

Tiers report here what they have, on any thread. Where a key can be resumed, which tiers have a snapshot, whether it may
expire, and the events that are published are views of it.

Always true:
  * a snapshot is here if and only if it has tiers: those that have reported it as stored, and not as removed since;
  * `watch` is told that a tier has a snapshot after it was told so of the one that it continues;
  * `Siblings`, the snapshots that continue the same one, have one entry for each place of a snapshot, with the tokens
    up to there; entries are in order of tokens.

What continues a snapshot that is not here is found when that one is here again. It may be out of date for as long as an
operation of a tier takes: what is read decides.

Of all entries, those that are a prefix of a key, and the one that has most in common with it, lie beside where the key
would be: a lookup costs the logarithm of their number for each different length in common.
"""

import logging
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvcellar.errors import KvcellarError
from kvcellar.memory.prefix.node import TOKEN, common
from kvcellar.memory.retention import Retention
from kvcellar.memory.snapshot import IMAGE, Snapshot, requested

log = logging.getLogger("kvcellar.memory.prefix")


class _Entry(NamedTuple):
    tokens: bytes
    key: bytes


class Siblings:
    """Snapshots after one parent. `anywhere`: they are looked for at any position, else at their places only."""

    def __init__(self, *, anywhere: bool) -> None:
        self._anywhere = anywhere
        self._entries: list[_Entry] = []
        self._known: dict[bytes, Snapshot] = {}
        self._longest = 0  # bytes of the longest entry ever

    def __bool__(self) -> bool:
        return bool(self._known)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._known.values())

    def add(self, snapshot: Snapshot, positions: Iterable[int]) -> None:
        """A new one, with these positions of checkpoints."""
        self._known[snapshot.key] = snapshot
        self._longest = max(self._longest, len(snapshot.tokens))
        for entry in self._entries_of(snapshot, positions):
            insort(self._entries, entry)

    def remove(self, snapshot: Snapshot, positions: Iterable[int]) -> None:
        """One that was added with these positions."""
        del self._known[snapshot.key]
        for entry in self._entries_of(snapshot, positions):
            del self._entries[bisect_left(self._entries, entry)]

    def _entries_of(self, snapshot: Snapshot, positions: Iterable[int]) -> set[_Entry]:
        places = {snapshot.span.end, *(() if self._anywhere else positions)}
        return {_Entry(snapshot.tokens[: (pos - snapshot.span.start) * TOKEN], snapshot.key) for pos in places}

    def alike(self, key: bytes, start: int) -> Iterator[tuple[Snapshot, int]]:
        """Snapshots with how many of their first tokens, at least one, are those of a key from `start` bytes on: all
        where a place ends that these reach, and, if `anywhere`, one that has most of them."""
        rest = key[start : start + self._longest]
        at = bisect_right(self._entries, rest, key=_tokens)
        if self._anywhere:
            near = max(self._entries[max(at - 1, 0) : at + 1], key=lambda one: common(one.tokens, rest), default=None)
            if near is not None and 0 < (n := common(near.tokens, rest)) < len(near.tokens) // TOKEN:
                yield self._known[near.key], n
        while at:
            entry = self._entries[at - 1]
            n = common(entry.tokens, rest)
            if n * TOKEN == len(entry.tokens):
                yield self._known[entry.key], n
                at -= 1
            else:  # what is less than this entry, and a prefix of the key, is no longer than what they have in common
                at = bisect_right(self._entries, rest[: n * TOKEN], 0, at - 1, key=_tokens) if n else 0

    def check(self) -> None:
        """Assert what is always true."""
        assert self._entries == sorted(self._entries)
        assert {entry.key for entry in self._entries} == self._known.keys()


def _tokens(entry: _Entry) -> bytes:
    return entry.tokens


class Found(NamedTuple):
    """The snapshots, each continuing the one before, from which a sequence can be resumed at `resume`; 0: none."""

    chain: tuple[Snapshot, ...]
    resume: int


class Watch(Protocol):
    """Is told which tiers have what. Called on any thread."""

    def stored(self, tier: str, snapshot: Snapshot) -> None: ...
    def removed(self, tier: str, key: bytes) -> None: ...


class Lost(NamedTuple):
    """A snapshot that no tier can read any longer, since `tier` had other bytes than were written: the namespace, the
    tokens up to its end, and where it starts."""

    tier: str
    namespace: str
    key: bytes
    start: int


@dataclass(eq=False, slots=True)
class _Stored:
    """A snapshot, with the positions of its checkpoints. `expires`: some tier may delete it at a time."""

    snapshot: Snapshot
    positions: tuple[int, ...]
    tiers: frozenset[str] = frozenset()
    expires: bool = False


class Catalogue:
    """The snapshots of one memory. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        anywhere: bool,
        positions: Callable[[bytes], Sequence[int]] = lambda record: (),
        watch: Watch | None = None,
    ) -> None:
        """`anywhere`: the memory can be resumed at any position, without a checkpoint. `positions` returns those of the
        checkpoints of a record, or raises `KvcellarError`: then the snapshot is not used. Features of images have
        none. `watch` is told of each change, but of those."""
        self._anywhere, self._positions, self._watch = anywhere, positions, watch
        self._lock = threading.RLock()
        self._known: dict[bytes, _Stored] = {}
        self._after: dict[tuple[str, bytes | None], Siblings] = {}  # by parent
        self._lost: list[Lost] = []
        self._unusable: list[bytes] = []

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[Snapshot]:
        """All snapshots, each after the one that it continues."""
        with self._lock:
            found = [one for (_, parent), after in self._after.items() if parent is None for one in after]
            for one in found:  # which grows while it is read
                found += self._continuing(one)
        return iter(found)

    # -- what tiers report --------------------------------------------------------------------------------------

    def stored(self, tier: str, snapshot: Snapshot, retention: Retention) -> None:
        """A tier has a snapshot. It may have been reported before."""
        with self._lock:
            one = self._known.get(snapshot.key) or self._added(snapshot)
            if one is None:
                return
            one.expires = one.expires or retention.expires is not None
            if tier not in one.tiers:
                one.tiers |= {tier}
                self._report(tier, snapshot)

    def removed(self, tier: str, key: bytes, why: str) -> None:
        """A tier has a snapshot no longer; "damaged": it had other bytes than were written."""
        with self._lock:
            one = self._known.get(key)
            if one is None or tier not in one.tiers:
                return
            if self._watch is not None and not one.snapshot.namespace.startswith(IMAGE):
                self._watch.removed(tier, key)
            one.tiers -= {tier}
            if one.tiers:
                return
            if why == "damaged" and (path := self.path(key)) is not None:
                self._lost.append(Lost(tier, *path))
            self._drop(one)

    def forget(self, key: bytes) -> None:
        """A snapshot that cannot be used is to be removed from all tiers."""
        for tier in self.of(key):
            self.removed(tier, key, "removed")

    def lost(self) -> list[Lost]:
        """What was damaged since the last call."""
        if not self._lost:
            return []
        with self._lock:
            found, self._lost = self._lost, []
        return found

    def unusable(self) -> list[bytes]:
        """The keys of what was stored since the last call with a record that cannot be used."""
        with self._lock:
            found, self._unusable = self._unusable, []
        return found

    def lasts(self, keys: Iterable[bytes]) -> None:
        """These snapshots do not expire any more."""
        for key in keys:
            if (one := self._known.get(key)) is not None:
                one.expires = False

    def _added(self, snapshot: Snapshot) -> _Stored | None:
        span, has_places = snapshot.span, not snapshot.namespace.startswith(IMAGE)
        try:
            found = self._positions(snapshot.record) if has_places else ()
            positions = tuple(pos for pos in found if span.start < pos <= span.end)
        except KvcellarError as error:
            log.warning("a stored snapshot is not used: %s", error)
            self._unusable.append(snapshot.key)
            return None
        after = self._after.setdefault((snapshot.namespace, snapshot.parent), Siblings(anywhere=self._anywhere))
        after.add(snapshot, positions)
        one = self._known[snapshot.key] = _Stored(snapshot, positions)
        return one

    def _drop(self, one: _Stored) -> None:
        snapshot = one.snapshot
        del self._known[snapshot.key]
        after = self._after[snapshot.namespace, snapshot.parent]
        after.remove(snapshot, one.positions)
        if not after:
            del self._after[snapshot.namespace, snapshot.parent]

    def _report(self, tier: str, snapshot: Snapshot) -> None:
        """Tell of a snapshot, and of those that continue it, unless the one before it is missing."""
        rest = [snapshot] if self._watch is not None and not snapshot.namespace.startswith(IMAGE) else []
        while rest:
            one = rest.pop()
            if tier in self.of(one.key) and (one.parent is None or tier in self.of(one.parent)):
                assert self._watch is not None
                self._watch.stored(tier, one)
                rest += self._continuing(one)

    def _continuing(self, snapshot: Snapshot) -> Iterator[Snapshot]:
        after = self._after.get((snapshot.namespace, snapshot.key), ())
        return (one for one in after if one.span.start == snapshot.span.end)

    # -- looking ------------------------------------------------------------------------------------------------

    def of(self, key: bytes) -> frozenset[str]:
        """Names of the tiers that have a snapshot."""
        one = self._known.get(key)
        return one.tiers if one is not None else frozenset()

    def get(self, key: bytes) -> Snapshot | None:
        one = self._known.get(key)
        return one.snapshot if one is not None else None

    def expires(self, key: bytes) -> bool:
        """Whether a snapshot has a time at which it is deleted, or had one."""
        one = self._known.get(key)
        return one is not None and one.expires

    def path(self, key: bytes) -> tuple[str, bytes, int] | None:
        """The namespace of a snapshot, the tokens up to its end, and where it starts; None if it is not known, or one
        before it is not."""
        with self._lock:
            parts: list[Snapshot] = []
            at: bytes | None = key
            while at is not None:
                if (one := self._known.get(at)) is None:
                    return None
                parts.append(one.snapshot)
                at = one.snapshot.parent
            return parts[0].namespace, b"".join(one.tokens for one in reversed(parts)), parts[0].span.start

    def beginning(self, namespace: str | None, key: bytes) -> list[bytes]:
        """The keys of the snapshots of one namespace, or of all, up to whose end a text begins with the tokens of
        `key`."""
        with self._lock:
            found: list[bytes] = []
            rest: list[tuple[Iterable[Snapshot], bytes]] = [
                (after, key)
                for (of, parent), after in self._after.items()
                if parent is None and namespace in (None, requested(of))
            ]
            while rest:
                after, left = rest.pop()
                for snapshot in after:
                    if snapshot.tokens.startswith(left):
                        found.append(snapshot.key)
                        rest.append((self._continuing(snapshot), b""))
                    elif left.startswith(snapshot.tokens):
                        rest.append((self._continuing(snapshot), left[len(snapshot.tokens) :]))
            return found

    def whole(self, namespace: str, key: bytes) -> tuple[Snapshot, ...]:
        """The longest chain of snapshots whose tokens are all of the key."""
        best: tuple[Snapshot, ...] = ()
        with self._lock:
            for chain, snapshot, n in self._alike(namespace, key):
                if n == len(snapshot.span) and snapshot.span.end > (best[-1].span.end if best else 0):
                    best = (*chain, snapshot)
        return best

    def match(self, namespace: str, key: bytes, limit: int) -> Found:
        """Where a sequence of these tokens can be resumed, at position `limit` at the latest."""
        best = Found((), 0)
        with self._lock:
            for chain, snapshot, n in self._alike(namespace, key):
                resume = self.resume(snapshot, min(snapshot.span.start + n, limit))
                if snapshot.span.start < resume and resume > best.resume:
                    best = Found((*chain, snapshot), resume)
        return best

    def resume(self, snapshot: Snapshot, limit: int) -> int:
        """The last position in a snapshot up to `limit` where a sequence can be resumed; 0 if there is none."""
        end = min(snapshot.span.end, limit)
        if self._anywhere:
            return end
        one = self._known.get(snapshot.key)
        return max((pos for pos in one.positions if pos <= end), default=0) if one is not None else 0

    def _alike(self, namespace: str, key: bytes) -> Iterator[tuple[tuple[Snapshot, ...], Snapshot, int]]:
        """Snapshots whose first `n` tokens, at least one, continue what the chain before each has of the key: those
        with places to resume at in these tokens, and those with no others."""
        rest: list[tuple[bytes | None, tuple[Snapshot, ...]]] = [(None, ())]
        while rest:
            parent, chain = rest.pop()
            after, at = self._after.get((namespace, parent)), chain[-1].span.end if chain else 0
            for snapshot, n in after.alike(key, at * TOKEN) if after else ():
                if snapshot.span.start == at:
                    yield chain, snapshot, n
                    if n == len(snapshot.span):
                        rest.append((snapshot.key, (*chain, snapshot)))

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            for key, one in self._known.items():
                assert one.tiers and one.snapshot.key == key
                assert len(one.snapshot.tokens) == len(one.snapshot.span) * TOKEN
                assert all(one.snapshot.span.start < pos <= one.snapshot.span.end for pos in one.positions)
            assert all(self._after.values())
            assert sorted(one.key for after in self._after.values() for one in after) == sorted(self._known)
            for after in self._after.values():
                after.check()
