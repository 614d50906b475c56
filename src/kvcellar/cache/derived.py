"""derived: from which position on the K/V of a sequence encode text that was removed from its middle. No torch.

Always true:
  * a mark lies within its sequence, with tokens behind it;
  * a sequence whose K/V encode just its tokens is not here.
"""

from collections.abc import Callable

from kvcellar.cache.parts import Part
from kvcellar.spans import Span


class Derived(Part):
    """Where the first removal from the middle of every sequence was."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def of(self, seq: int) -> int | None:
        return self._of.get(seq)

    def mark(self, seq: int, pos: int | None) -> None:
        """A sequence that is not here is derived from `pos` on; None: it is not."""
        if pos is not None:
            self._of[seq] = pos

    def fork(self, src: int, dst: int, kept: int) -> None:
        self._of.pop(dst, None)
        if (mark := self._of.get(src, kept)) < kept:
            self._of[dst] = mark

    def cut(self, seq: int, kept: int) -> None:
        if self._of.get(seq, -1) >= kept:
            del self._of[seq]

    def close_over(self, seq: int, gone: Span) -> None:
        self._of[seq] = min(gone.start, self._of.get(seq, gone.start))

    def drop(self, seq: int) -> None:
        self._of.pop(seq, None)

    def check(self, length: Callable[[int], int]) -> None:
        """Assert what is always true, where `length(seq)` is how many tokens a sequence has; 0 if it is not there."""
        for seq, mark in self._of.items():
            assert 0 <= mark < length(seq), f"sequence {seq} is derived from {mark} on, and has {length(seq)} tokens"
