"""encoder: keys computed by an encoder from an input. Every query sees all of them, at any position of its text."""

from dataclasses import dataclass

from kvcellar.errors import BadRequest
from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class Input:
    """Cells are indexed by input element, `[0,n)` with n at most `most`, independent of positions of the text.

    They are written once, before the steps that read them, and never change, slide or rotate. In a plan the rows of a
    step have the positions `[n,n+T)` and store nothing, so they see all of the input by the rule of the other layouts.
    """

    most: int

    def __post_init__(self) -> None:
        if self.most < 1:
            raise BadRequest(f"an input of at most {self.most} positions is none")

    def __str__(self) -> str:
        return f"input {self.most}"

    def lowest(self, pos: int) -> int:
        return 0

    def keep(self, end: int) -> int:
        return 0

    def can_resume(self, first: int, end: int, pos: int) -> bool:
        return pos >= 0

    def can_cut(self, first: int, end: int, pos: int) -> int:
        """Any position: a cut of the text does not change the input."""
        return pos

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        return True

    def most_cells(self, context: int, step: int) -> int:
        return self.most
