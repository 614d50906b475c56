"""causal: every query sees all positions up to its own."""

from dataclasses import dataclass

from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class Causal:
    """Every position stays visible, so all are kept."""

    def __str__(self) -> str:
        return "causal"

    def lowest(self, pos: int) -> int:
        return 0

    def keep(self, end: int) -> int:
        return 0

    def can_resume(self, first: int, end: int, pos: int) -> bool:
        return 0 <= pos <= end and (first == 0 or pos == 0)

    def can_cut(self, first: int, end: int, pos: int) -> int:
        return min(pos, end) if first == 0 else 0

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        return first == 0

    def most_cells(self, context: int, step: int) -> int:
        return context
