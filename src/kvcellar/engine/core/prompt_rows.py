"""prompt_rows: the rows of one step that requests read of their prompts (`prompt_reading.py`).

The log-probabilities of tokens that are given, not drawn. R rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcellar.engine.core.prompt_reading import Pooled, PromptReading, to_read
from kvcellar.engine.core.request import Completion, Scheduled
from kvcellar.engine.sample.draw import Draws
from kvcellar.errors import ScoresNotNumbers


class _Part(NamedTuple):
    """Rows of the step, the first of which is at `start` of the prompt."""

    completion: Completion
    reading: PromptReading
    rows: range
    start: int


class PromptRows:
    """Of the completions of a step, in order."""

    def __init__(self, scheduled: Sequence[Scheduled], draws: Draws) -> None:
        self._draws = draws
        self._parts: list[_Part] = []
        first = 0
        for completion, tokens, drafts in scheduled:
            reading, at = completion.request.prompt_reading, completion.computed
            if reading is not None and not reading.done:
                rows = to_read(reading, at, tokens)
                self._parts.append(
                    _Part(completion, reading, range(first + rows.start, first + rows.stop), at + rows.start)
                )
            first += tokens + drafts

    @property
    def hidden(self) -> bool:
        """Whether hidden states are read."""
        return any(isinstance(part.reading, Pooled) for part in self._parts)

    @property
    def scored(self) -> list[int]:
        """The rows of the step whose logits are read, part by part."""
        return [
            part.rows[row]
            for part in self._parts
            if not isinstance(part.reading, Pooled)
            for row in part.reading.scored(part.start, len(part.rows))
        ]

    def values(self, logits: Tensor, hidden: Tensor | None) -> list[Any]:
        """What is kept of each part: of the logits [S,W] of the scored rows, and hidden states [T,H] of the step. A
        `ScoresNotNumbers` where these are not numbers: the error of one request, not of the step."""
        found: list[Any] = []
        at = 0  # in the logits
        for completion, reading, rows, start in self._parts:
            if isinstance(reading, Pooled):
                assert hidden is not None
                found.append(hidden[rows.start : rows.stop].double().sum(0))
            else:
                scored, tokens = reading.scored(start, len(rows)), reading.tokens(start, len(rows))
                own = logits[at : at + len(scored), : completion.sampler.vocab_size]
                scores = self._scores(own, [tokens[row] for row in scored], reading.most)
                if not isinstance(scores, ScoresNotNumbers):
                    by_row = dict(zip(scored, scores, strict=True))
                    scores = [by_row.get(row) for row in range(len(rows))]
                found.append(scores)
                at += len(scored)
        return found

    @torch.inference_mode()
    def _scores(self, logits: Tensor, tokens: Sequence[int], most: int) -> Any:
        """Of each token, or the error."""
        try:
            return self._draws.score(logits, tokens, most) if tokens else []
        except ScoresNotNumbers as error:
            return error

    def deliver(self, values: Sequence[Any]) -> list[tuple[Completion, ScoresNotNumbers]]:
        """The step was kept: give the readings these values, and the requests what is complete. Returns the completions
        that end here, and why."""
        failed: list[tuple[Completion, ScoresNotNumbers]] = []
        for (completion, reading, rows, _), value in zip(self._parts, values, strict=True):
            try:
                if isinstance(value, ScoresNotNumbers):
                    raise value
                event = reading.add(value, len(rows))
            except ScoresNotNumbers as error:
                failed.append((completion, error))
            else:
                if event is not None:
                    completion.request.emit(event)
        return failed
