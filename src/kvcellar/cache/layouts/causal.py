"""causal: every query sees all that came before it, and itself."""

from dataclasses import dataclass

from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class Causal:
    """Nothing is ever out of sight, so everything stays."""

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
