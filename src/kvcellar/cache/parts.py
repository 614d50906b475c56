"""parts: what is known of the sequences of a memory beside their cells, each kind of it by itself. No torch.

Whatever is done to a sequence is done to every part by `sequences`, so that none can be forgotten. A part says what it
makes of it where it has something to say. None of this raises, so it needs no way back.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcellar.plan import Batch
from kvcellar.spans import Span


class Part(ABC):
    """One kind of thing that is known of sequences, by their number."""

    def deepest(self, seq: int, pos: int) -> int:
        """The largest position up to `pos` at which `seq` could be cut. Changes nothing."""
        return pos

    def can_close_over(self, seq: int, gone: Span) -> bool:
        """Could `gone` be removed, with something behind it that stays? Changes nothing."""
        return True

    def open(self, seq: int) -> None:
        """A sequence that has read nothing, if it is not there."""
        return

    def commit(self, batch: Batch, counts: Sequence[int]) -> None:
        """So many tokens of each feed are kept."""
        return

    @abstractmethod
    def fork(self, src: int, dst: int, kept: int) -> None:
        """`dst`, whatever it was, is now the first `kept` tokens of `src`, at which `src` could be cut."""

    def cut(self, seq: int, kept: int) -> None:
        """The first `kept` tokens stay, at which the sequence could be cut."""
        return

    def close_over(self, seq: int, gone: Span) -> None:
        """`gone` was removed, and what lies behind it has moved down."""
        return

    @abstractmethod
    def drop(self, seq: int) -> None:
        """The sequence is no more."""
