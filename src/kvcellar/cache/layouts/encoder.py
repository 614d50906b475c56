"""encoder: keys that an encoder made of an input. Every query sees all of them, wherever in its text it stands."""

from dataclasses import dataclass

from kvcellar.errors import BadRequest
from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class Input:
    """Cells are indexed by input: `[0,n)`, with n at most `most`, and the text's positions mean nothing to them.

    They are written once, before the steps that read them, and never change, slide or turn. In a plan the rows of a
    step stand behind the input, at `[n,n+T)`, and ask: so they see all of it by the rule of every other layout.
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
        """Whatever is cut off the text, the input stays."""
        return pos

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        return True

    def most_cells(self, context: int, step: int) -> int:
        return self.most
