"""reading: what a request reads of the rows of its own prompt: log-probabilities of its tokens, or hidden states. No
torch at import.

The row of a token has the logits of the next one, and the hidden state after the last layer. Rows are read as prefill
computes them, chunk by chunk; of the logits only the columns that are wanted are kept.

Always true of a reading:
  * the rows [0,known) of the prompt were read or are of no use, those of [known,end) are still to be computed; memory
    that other requests have computed is used for the former only;
  * it becomes an event once, when all rows were read.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvcellar.events import Embedded, PromptScored, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

PoolingMode = Literal["last", "mean"]


class Reading(Protocol):
    """`hidden`: it reads hidden states, not logits. `done`: the event was returned."""

    known: int
    done: bool

    @property
    def hidden(self) -> bool: ...

    @property
    def end(self) -> int: ...
    def values(self, rows: "Tensor", start: int, vocab: int) -> Any:
        """What is kept of rows from position `start` on: logits [n,W], of which `vocab` columns are tokens, or hidden
        states [n,H]. Changes nothing."""
        ...

    def add(self, values: Any, count: int) -> PromptScored | Embedded | None:
        """`count` more rows have these values, and are in memory. Returns the event when there are no more."""
        ...


def to_read(reading: Reading, computed: int, tokens: int) -> range:
    """Which of the next `tokens` rows, counted from 0, are to be read, where `computed` tokens are in memory."""
    return range(max(0, reading.known - computed), max(0, min(reading.end - computed, tokens)))


class PromptLogprobs:
    """The log-probability of each token, and of the `most` most likely ones in its place."""

    hidden = False

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self.done = False
        self._prompt, self._most = prompt, most
        self._found: list[TokenLogprob | None] = [None]
        self.known, self.end = 0, len(prompt) - 1

    def values(self, rows: "Tensor", start: int, vocab: int) -> list[TokenLogprob]:
        from kvcellar.sample.score import scored  # imports torch, so not at the top

        return scored(rows[:, :vocab], self._prompt[start + 1 : start + 1 + len(rows)], self._most)

    def add(self, values: list[TokenLogprob], count: int) -> PromptScored | None:
        self.known += count
        self._found += values
        self.done = self.known == self.end
        return PromptScored(tuple(self._found)) if self.done else None


class Pooled:
    """The hidden state of the last token, or the mean of all of them."""

    hidden = True

    def __init__(self, prompt: Sequence[int], mode: PoolingMode) -> None:
        self._mode, self.done = mode, False
        self.known, self.end = (len(prompt) - 1 if mode == "last" else 0), len(prompt)
        self._sum: Tensor | None = None  # [H] in float64, so that chunks make no difference

    def values(self, rows: "Tensor", start: int, vocab: int) -> "Tensor":
        return rows.double().sum(0)

    def add(self, values: "Tensor", count: int) -> Embedded | None:
        self.known += count
        self._sum = values if self._sum is None else self._sum + values
        self.done = self.known == self.end
        if not self.done:
            return None
        pooled = self._sum / self.end if self._mode == "mean" else self._sum
        return Embedded(tuple(pooled.float().tolist()))
