"""siblings: the stored snapshots that continue the same one, in order of their tokens.

Always true:
  * there is one entry for each place of a snapshot, with the tokens up to there; entries are in order of tokens.

Of all entries, those that are a prefix of a key, and the one that has most in common with it, lie beside where the key
would be: a lookup costs the logarithm of their number for each different length in common.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvcellar.prefix.node import TOKEN, common
from kvcellar.snapshot import Snapshot


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
