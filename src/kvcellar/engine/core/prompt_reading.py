"""prompt_reading: what a request reads of the rows of its own prompt: log-probabilities of its tokens, or hidden
states. No torch; `prompt_rows.py` takes what is kept from the tensors of a step.

The row of a token has the logits of the next one, and the hidden state after the last layer. Rows are read as prefill
computes them, chunk by chunk; of the logits only the columns that are wanted are kept.

Always true of a reading:
  * the rows [0,known) of the prompt were read or are of no use, those of [known,end) are still to be computed; memory
    that other requests have computed is used for the former only;
  * it becomes an event once, and is `done` then.
"""

import math
from collections.abc import Sequence
from typing import Any

from kvcellar.errors import ScoresNotNumbers
from kvcellar.events import Embedded, PoolingMode, PromptScored, TokenLogprob
from kvcellar.images.image import is_row


class PromptLogprobs:
    """The log-probability of each token, and of the `most` most likely ones in its place."""

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self._prompt, self.most = prompt, most
        self._found: list[TokenLogprob | None] = [None]
        self.known, self.end, self.done = 0, len(prompt) - 1, False

    def tokens(self, start: int, count: int) -> Sequence[int]:
        """Those whose log-probabilities `count` rows from position `start` on have."""
        return self._prompt[start + 1 : start + 1 + count]

    def scored(self, start: int, count: int) -> list[int]:
        """Which of `count` rows from position `start` on, counted from 0, have the log-probability of a token: rows of
        images are no tokens, and nothing predicts them."""
        return [row for row, token in enumerate(self.tokens(start, count)) if not is_row(token)]

    def add(self, values: Sequence[TokenLogprob | None], count: int) -> PromptScored | None:
        """`count` more rows have these values, and are in memory. Returns the event when there are no more."""
        self.known += count
        self._found += values
        self.done = self.known == self.end
        return PromptScored(tuple(self._prompt), tuple(self._found)) if self.done else None


class Pooled:
    """The hidden state of the last token, or the mean of all of them."""

    def __init__(self, prompt: Sequence[int], mode: PoolingMode) -> None:
        self._mode: PoolingMode = mode
        self.known, self.end, self.done = (len(prompt) - 1 if mode == "last" else 0), len(prompt), False
        self._sum: Any = 0.0  # a tensor [H] in float64, so that the sizes of chunks make no difference

    def add(self, values: Any, count: int) -> Embedded | None:
        """`count` more rows have this sum [H], and are in memory. Returns the event when there are no more. Raises
        `ScoresNotNumbers` for NaN or infinity: JSON has neither, and such vectors cannot be compared."""
        self.known += count
        self._sum = self._sum + values
        self.done = self.known == self.end
        if not self.done:
            return None
        pooled = self._sum / self.end if self._mode == "mean" else self._sum
        vector = tuple(pooled.float().tolist())
        if not all(map(math.isfinite, vector)):
            raise ScoresNotNumbers(
                "the hidden states that were pooled hold NaN or infinity. The weights may be damaged; if not, load the "
                "model with dtype float32."
            )
        return Embedded(vector)


PromptReading = PromptLogprobs | Pooled


def to_read(reading: PromptReading, computed: int, tokens: int) -> range:
    """Which of the next `tokens` rows, counted from 0, are to be read, where `computed` tokens are in memory."""
    return range(max(0, reading.known - computed), max(0, min(reading.end - computed, tokens)))
