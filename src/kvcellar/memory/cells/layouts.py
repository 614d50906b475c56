"""layouts: the rules of each layer kind, in integers: what a query sees, what is kept, where a sequence can resume."""

from dataclasses import dataclass

from kvcellar.errors import BadRequest
from kvcellar.memory.layout import Layout
from kvcellar.memory.spans import Span


@dataclass(frozen=True, slots=True)
class Causal(Layout):
    """Every query sees all positions up to its own, so all are kept."""

    def __str__(self) -> str:
        return "causal"

    def lowest(self, pos: int) -> int:
        return 0

    def keep(self, end: int) -> int:
        return 0

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        return first == 0

    def most_cells(self, context: int, step: int) -> int:
        return context


@dataclass(frozen=True, slots=True)
class Sliding(Layout):
    """A query sees the last `window` positions, its own included, as in transformers and MLX.

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

    def can_shift(self, first: int, end: int, gone: Span) -> bool:
        """After the shift, the window of the next token must not extend below the first held position."""
        return first_after(first, gone) <= self.lowest(end - len(gone))

    def most_cells(self, context: int, step: int) -> int:
        return min(context, self.memory + step)


@dataclass(frozen=True, slots=True)
class Chunked(Layout):
    """A query sees the positions of its own chunk of `size`, up to its own (Llama 4's local layers)."""

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
        return exact and self.can_resume(first_after(first, gone), after, after)

    def most_cells(self, context: int, step: int) -> int:
        return min(context, self.size + step)


@dataclass(frozen=True, slots=True)
class Input(Layout):
    """Keys that an encoder computed from an input: every query sees all of them, at any position of its text.

    Cells are indexed by input element, `[0,n)` with n at most `most`. They are written once, before the steps that read
    them, and never change, slide or rotate. In a plan the rows of a step have the positions `[n,n+T)` and store
    nothing, so they see all of the input by the rule of the other layouts.
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


def first_after(first: int, gone: Span) -> int:
    """The lowest held position after `gone` is removed; `first` is the one before."""
    if first < gone.start:
        return first
    return gone.start if first < gone.end else first - len(gone)
