"""stored: which token sequences have snapshots outside of the device, and how far a key can be resumed from them.

Always true:
  * a snapshot is here only if the one that it continues is here, or if it begins a sequence;
  * `Siblings`, the snapshots that continue the same one, have one entry for each place of a snapshot, with the tokens
    up to there; entries are in order of tokens.

Of all entries, those that are a prefix of a key, and the one that has most in common with it, lie beside where the key
would be: a lookup costs the logarithm of their number for each different length in common.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvcellar.prefix.node import TOKEN, common
from kvcellar.snapshot import Snapshot, requested


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


class Catalogue:
    """The snapshots of one memory. `anywhere`: it can be resumed at any position, without a checkpoint."""

    def __init__(self, *, anywhere: bool) -> None:
        self._anywhere = anywhere
        self._known: dict[bytes, tuple[Snapshot, tuple[int, ...]]] = {}  # with the positions of checkpoints
        self._after: dict[tuple[str, bytes | None], Siblings] = {}  # by parent

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def add(self, snapshot: Snapshot, positions: Sequence[int]) -> bool:
        """Know a snapshot, whose checkpoints are at `positions`; others than of its span are ignored. False if the one
        before it is not known."""
        parent = snapshot.parent
        if parent is not None and (parent not in self._known or self._known[parent][0].span.end != snapshot.span.start):
            return False
        if snapshot.key not in self._known:
            positions = tuple(pos for pos in positions if snapshot.span.start < pos <= snapshot.span.end)
            self._known[snapshot.key] = snapshot, positions
            after = self._after.setdefault((snapshot.namespace, parent), Siblings(anywhere=self._anywhere))
            after.add(snapshot, positions)
        return True

    def __iter__(self) -> Iterator[Snapshot]:
        """All snapshots, each after the one that it continues."""
        return (snapshot for snapshot, _ in self._known.values())

    def remove(self, key: bytes) -> None:
        """Forget a snapshot, and all that continue it."""
        rest = [key]
        while rest:
            found = self._known.pop(rest.pop(), None)
            if found is None:
                continue
            snapshot = found[0]
            after = self._after[snapshot.namespace, snapshot.parent]
            after.remove(*found)
            if not after:
                del self._after[snapshot.namespace, snapshot.parent]
            rest += [one.key for one in self._after.get((snapshot.namespace, snapshot.key), ())]

    def path(self, key: bytes) -> tuple[str, bytes, int] | None:
        """The namespace of a snapshot, the tokens up to its end, and where it starts; None if it is not known."""
        found = self._known.get(key)
        if found is None:
            return None
        last, parts = found[0], [found[0].tokens]
        while (parent := last.parent) is not None:
            last = self._known[parent][0]
            parts.append(last.tokens)
        return last.namespace, b"".join(reversed(parts)), found[0].span.start

    def beginning(self, namespace: str | None, key: bytes) -> list[bytes]:
        """The keys of the snapshots of one namespace, or of all, up to whose end a text begins with the tokens of
        `key`."""
        found: list[bytes] = []
        rest: list[tuple[str, bytes | None, bytes]]
        rest = [
            (of, parent, key) for of, parent in self._after if parent is None and namespace in (None, requested(of))
        ]
        while rest:
            of, parent, left = rest.pop()
            for snapshot in self._after.get((of, parent), ()):
                if snapshot.tokens.startswith(left):
                    found.append(snapshot.key)
                    rest.append((of, snapshot.key, b""))
                elif left.startswith(snapshot.tokens):
                    rest.append((of, snapshot.key, left[len(snapshot.tokens) :]))
        return found

    def clear(self) -> None:
        self._known.clear()
        self._after.clear()

    def whole(self, namespace: str, key: bytes) -> tuple[Snapshot, ...]:
        """The longest chain of snapshots whose tokens are all of the key."""
        best: tuple[Snapshot, ...] = ()
        for chain, snapshot, n in self._alike(namespace, key):
            if n == len(snapshot.span) and snapshot.span.end > (best[-1].span.end if best else 0):
                best = (*chain, snapshot)
        return best

    def match(self, namespace: str, key: bytes, limit: int) -> Found:
        """Where a sequence of these tokens can be resumed, at position `limit` at the latest."""
        best = Found((), 0)
        for chain, snapshot, n in self._alike(namespace, key):
            resume = self.resume(snapshot, min(snapshot.span.start + n, limit))
            if snapshot.span.start < resume and resume > best.resume:
                best = Found((*chain, snapshot), resume)
        return best

    def resume(self, snapshot: Snapshot, limit: int) -> int:
        """The last position in a snapshot up to `limit` where a sequence can be resumed; 0 if there is none."""
        end = min(snapshot.span.end, limit)
        places = (end,) if self._anywhere else self._known[snapshot.key][1]
        return max((pos for pos in places if pos <= end), default=0)

    def _alike(self, namespace: str, key: bytes) -> Iterator[tuple[tuple[Snapshot, ...], Snapshot, int]]:
        """Snapshots whose first `n` tokens, at least one, continue what the chain before each has of the key: those
        with places to resume at in these tokens, and those with no others."""
        rest: list[tuple[bytes | None, tuple[Snapshot, ...]]] = [(None, ())]
        while rest:
            parent, chain = rest.pop()
            after = self._after.get((namespace, parent))
            for snapshot, n in after.alike(key, (chain[-1].span.end if chain else 0) * TOKEN) if after else ():
                yield chain, snapshot, n
                if n == len(snapshot.span):
                    rest.append((snapshot.key, (*chain, snapshot)))

    def check(self) -> None:
        """Assert what is always true."""
        for snapshot, positions in self._known.values():
            before = self._known.get(snapshot.parent) if snapshot.parent is not None else None
            start = before[0].span.end if before is not None else 0
            assert snapshot.span.start == start and (before is not None) == (snapshot.parent is not None)
            assert len(snapshot.tokens) == len(snapshot.span) * TOKEN
            assert all(snapshot.span.start < pos <= snapshot.span.end for pos in positions)
        assert all(self._after.values())
        assert sorted(one.key for after in self._after.values() for one in after) == sorted(self._known)
        for after in self._after.values():
            after.check()
