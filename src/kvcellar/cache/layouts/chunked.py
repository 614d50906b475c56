"""chunked: a query sees the positions of its own chunk, up to its own position."""

from dataclasses import dataclass

from kvcellar.cache.layouts.moved import first_after
from kvcellar.errors import BadRequest
from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class Chunked:
    """Positions are split into chunks of `size`; earlier chunks are not visible (Llama 4's local layers)."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise BadRequest(f"a chunk needs at least one position, not {self.size}")

    def __str__(self) -> str:
        return f"chunked {self.size}"

    def lowest(self, pos: int) -> int:
        return pos - pos % self.size

    def keep(self, end: int) -> int:
        """Keep the chunk of the last token even if it is complete, so that the last token can be taken back."""
        return self.lowest(max(0, end - 1))

    def can_resume(self, first: int, end: int, pos: int) -> bool:
        return 0 <= pos <= end and (first <= self.lowest(pos) or self.lowest(pos) == pos)

    def can_cut(self, first: int, end: int, pos: int) -> int:
        """A sequence can always resume at the start of a chunk, because its first token sees nothing before it."""
        pos = min(pos, end)
        return pos if self.can_resume(first, end, pos) else self.lowest(pos)

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        """Two remaining positions must be in one chunk afterwards exactly if they were before: otherwise some would see
        positions that they did not see when they were computed.

        This holds if whole chunks are removed, or if all positions behind `gone` are in one chunk and move down within
        it or to the start of another chunk.
        """
        begins = gone.start % self.size == 0
        one_behind = self.lowest(gone.end) == self.lowest(end - 1)
        within = one_behind and self.lowest(gone.start) == self.lowest(gone.end)
        exact = within or (begins and (one_behind or len(gone) % self.size == 0))
        after = end - len(gone)
        return exact and (first_after(first, gone) <= self.lowest(after) or self.lowest(after) == after)

    def most_cells(self, context: int, step: int) -> int:
        return min(context, self.size + step)
