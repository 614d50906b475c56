"""sliding: a query sees the last `window` positions, its own included."""

from dataclasses import dataclass

from kvcellar.cache.layouts.moved import first_after
from kvcellar.errors import BadRequest
from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class Sliding:
    """Window W is exactly W visible keys, including the query's own, as in transformers and MLX.

    `memory` (at least W) is the number of positions kept between steps. Those beyond the window only allow a sequence
    to be cut back further. With memory = W the last token can be taken back.
    """

    window: int
    memory: int = 0  # 0: equal to the window

    def __post_init__(self) -> None:
        if self.window < 1:
            raise BadRequest(f"a sliding window needs at least one position, not {self.window}")
        if self.memory == 0:
            object.__setattr__(self, "memory", self.window)
        if self.memory < self.window:
            raise BadRequest(f"a sliding window of {self.window} needs a memory of at least that, not {self.memory}")

    def __str__(self) -> str:
        more = f", memory {self.memory}" if self.memory != self.window else ""
        return f"sliding {self.window}{more}"

    def lowest(self, pos: int) -> int:
        return max(0, pos - self.window + 1)

    def keep(self, end: int) -> int:
        return max(0, end - self.memory)

    def can_resume(self, first: int, end: int, pos: int) -> bool:
        """The token at 0, and any token with a window of 1, sees no earlier position."""
        return 0 <= pos <= end and (first <= self.lowest(pos) or self.lowest(pos) == pos)

    def can_cut(self, first: int, end: int, pos: int) -> int:
        pos = min(pos, end)
        return pos if self.can_resume(first, end, pos) else 0

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        """After the shift, the window of the next token must not extend below the first held position."""
        return first_after(first, gone) <= self.lowest(end - len(gone))

    def most_cells(self, context: int, step: int) -> int:
        return min(context, self.memory + step)
