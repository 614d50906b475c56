"""layout: the rules of a layer kind, in integers. `cells/layouts.py` has those there are."""

from typing import Protocol

from kvcellar.memory.spans import Span


class Layout(Protocol):
    """The rules of a layer kind, in integers, independent of storage.

    For every layout `lowest` never falls as `pos` grows, `lowest(pos) <= pos`, and `keep(end) <= lowest(end)`.
    """

    def lowest(self, pos: int) -> int:
        """The lowest position that a query at `pos` sees. It sees all from there up to its own."""
        ...

    def keep(self, end: int) -> int:
        """The lowest position that must stay when the next token to come is at `end`."""
        ...

    def can_resume(self, first: int, end: int, pos: int) -> bool:
        """May the next token be at `pos`, where exactly the positions `[first, end)` are held?"""
        return 0 <= pos <= end and (first <= self.lowest(pos) or self.lowest(pos) == pos)

    def can_cut(self, first: int, end: int, pos: int) -> int:
        """The largest `kept <= pos` from which decoding can resume without `[kept, end)`. 0 is always possible, and so
        is any position that sees no earlier one, such as the start of a chunk."""
        pos = min(pos, end)
        lowest = self.lowest(pos)
        if self.can_resume(first, end, pos):
            return pos
        return lowest if self.lowest(lowest) == lowest else 0

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        """May what lies behind `gone` move down to its start, where exactly `[first, end)` is held?

        Afterwards every position that the next token sees must be held, and none may see what it did not see before.
        """
        ...

    def most_cells(self, context: int, step: int) -> int:
        """The most cells one sequence of up to `context` positions ever holds, in steps of up to `step` new tokens."""
        ...
