"""chunked: a query sees its own chunk of positions, up to itself."""

from dataclasses import dataclass

from kvcellar.cache.layouts.moved import first_after
from kvcellar.errors import BadRequest
from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class Chunked:
    """Positions are cut in chunks of `size`; nothing of an earlier chunk is seen (Llama 4's local layers)."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise BadRequest(f"a chunk needs at least one position, not {self.size}")

    def __str__(self) -> str:
        return f"chunked {self.size}"

    def lowest(self, pos: int) -> int:
        return pos - pos % self.size

    def keep(self, end: int) -> int:
        """The chunk of the last token stays although it may be complete: one can step back by a token."""
        return self.lowest(max(0, end - 1))

    def can_resume(self, first: int, end: int, pos: int) -> bool:
        return 0 <= pos <= end and (first <= self.lowest(pos) or self.lowest(pos) == pos)

    def can_cut(self, first: int, end: int, pos: int) -> int:
        """The first token of a chunk needs nothing before it, so the start of a chunk is always a place to go on."""
        pos = min(pos, end)
        return pos if self.can_resume(first, end, pos) else self.lowest(pos)

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        """Who is in a chunk with whom must stay as it was, among all that is left: else some would see others anew.

        So it does if whole chunks go; and if what lies behind is of one chunk, and moves down within it, or down to
        where another begins.
        """
        begins = gone.start % self.size == 0
        one_behind = self.lowest(gone.end) == self.lowest(end - 1)
        within = one_behind and self.lowest(gone.start) == self.lowest(gone.end)
        exact = within or (begins and (one_behind or len(gone) % self.size == 0))
        after = end - len(gone)
        return exact and (first_after(first, gone) <= self.lowest(after) or self.lowest(after) == after)

    def most_cells(self, context: int, step: int) -> int:
        return min(context, self.size + step)
