"""suffixes: where the last tokens of a text have occurred before.

Always true:
  * every place where at least `LEAST` tokens end is in the chain of their hash, the latest first;
  * a token costs O(1) to append, 8 bytes here and 4 of the heads, and nothing is ever removed.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEAST = 2  # tokens that have to occur again
LONGEST = 16  # tokens that are compared
TRIES = 16  # places that are compared, the latest first
BREAK = -1  # between two texts: equals no token


class Match(NamedTuple):
    """`length` tokens that end at `end` are the last ones of the text searched for."""

    length: int
    end: int


class Suffixes:
    """An index of the places in a text that grows. `expected` is about how many tokens it will have."""

    def __init__(self, expected: int) -> None:
        self.tokens = array("i")
        self._heads = array("i", bytes(4 << max(8, min(expected.bit_length(), 17))))  # latest place by hash; 0: none
        self._before = array("i")  # of each place, the one before it with the same hash; 0: none

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        own, heads, before = self.tokens, self._heads, self._before
        for token in tokens:
            own.append(token)
            end = len(own)
            if end >= LEAST:
                slot = self.slot(own[end - LEAST : end])
                before.append(heads[slot])
                heads[slot] = end

    def slot(self, tokens: Sequence[int]) -> int:
        """The hash of `LEAST` tokens."""
        return hash(tuple(tokens)) & (len(self._heads) - 1)

    def find(self, tail: Sequence[int]) -> Match | None:
        """The longest match of the last tokens of `tail` that something follows; of equally long ones, the latest."""
        n = len(tail)
        if n < LEAST:
            return None
        best, end = Match(LEAST - 1, 0), self._heads[self.slot(tail[n - LEAST :])]
        for _ in range(TRIES):
            if not end or best.length == min(n, LONGEST):
                break
            if end < len(self.tokens) and (length := self._length(tail, end)) > best.length:
                best = Match(length, end)
            end = self._before[end - LEAST]
        return best if best.end else None

    def _length(self, tail: Sequence[int], end: int) -> int:
        """How many tokens before `end` equal the last ones of `tail`."""
        own, n = self.tokens, len(tail)
        most = min(n, end, LONGEST)
        length = 0
        while length < most and own[end - 1 - length] == tail[n - 1 - length]:
            length += 1
        return length

    def following(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens that follow a place, none behind a break."""
        found = self.tokens[end : end + count].tolist()
        return found[: found.index(BREAK)] if BREAK in found else found

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._before) == max(0, len(self.tokens) - LEAST + 1)
        for end in range(LEAST, len(self.tokens) + 1):
            at = self._heads[self.slot(self.tokens[end - LEAST : end])]
            while at > end:
                at = self._before[at - LEAST]
            assert at == end
