"""runner: one step, from what the scheduler decided to what the requests are told. The story, on one screen."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.engine.request import Line, Stage
from kvcellar.engine.scheduler import Share
from kvcellar.errors import EngineFailed
from kvcellar.events import FinishReason
from kvcellar.models.guest import Guest
from kvcellar.plan import Batch, Feed
from kvcellar.sample.draw import Drawn, draw
from kvcellar.spans import Span

log = logging.getLogger("kvcellar.engine")

Split = Callable[[Line], list[Line]]  # a line that has read its prompt -> the lines that write its answers
Ended = Callable[[Line, FinishReason | Exception], None]


class Runner:
    """Runs steps of `guest` on `memory`. `split` forks a prompt into its answers, `ended` hears of lines that end.
    `trim` evicts what memory keeps beyond its share, so that a step has the rows that it needs."""

    def __init__(
        self, guest: Guest, memory: Memory, *, context: int, split: Split, ended: Ended, trim: Callable[[], None]
    ) -> None:
        self._guest, self._memory, self._context = guest, memory, context
        self._split, self._ended, self._trim = split, ended, trim

    def step(self, shares: Sequence[Share]) -> None:
        """Read every share's tokens, and draw for each line that has read all it has."""
        flat = self._guest.mode == "flat"
        for part in [shares] if flat else [[share] for share in shares]:  # solo: one sequence per forward
            self._together(part)

    def _together(self, shares: Sequence[Share]) -> None:
        """One forward. If it fails, each line goes alone: what one of them cannot do must not hurt the others."""
        shares = [
            share for share in shares if share.line.stage is not Stage.DONE
        ]  # with another of its request's lines
        if not shares:
            return
        try:
            logits = self._forward(shares)
        except Exception as error:
            if self._memory.in_step or any(self._memory.length(_seq(line)) != line.read for line, _ in shares):
                raise  # memory is not as it was before: the loop puts it in order
            self._apart(shares, error)
            return
        for line, count in shares:
            line.read += count
        self._write([share.line for share in shares if not share.line.unread], logits)

    def _apart(self, shares: Sequence[Share], error: Exception) -> None:
        if len(shares) == 1:
            log.error("a forward failed", exc_info=error)
            self._ended(shares[0].line, _failure("the forward", error))
            return
        log.warning("a forward over %d sequences failed with %s: %s", len(shares), type(error).__name__, error)
        for share in shares:
            self._together([share])

    def _forward(self, shares: Sequence[Share]) -> Tensor:
        """Logits [R,V] of the last token of every line that is read to its end. The step is kept, or raises.

        Keeping it may raise, too: a model that passes over one of its recurrent layers has left no state there.
        """
        feeds = tuple(_feed(line, count) for line, count in shares)
        self._trim()
        plan = self._memory.begin(Batch(feeds))
        try:
            logits = self._guest.forward(self._memory, plan, *self._inputs(shares))
            self._memory.commit()
        except BaseException:
            if self._memory.in_step:
                self._memory.abandon()
            raise
        return logits

    def _inputs(self, shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
        """Token ids [T] of the step, and the rows [R] whose logits are wanted."""
        ids: list[int] = []
        rows: list[int] = []
        for line, count in shares:
            ids += line.tokens[line.read : line.read + count]
            if line.read + count == len(line.tokens):
                rows.append(len(ids) - 1)
        device = self._guest.device
        return torch.tensor(ids, device=device), torch.tensor(rows, dtype=torch.long, device=device)

    def _write(self, lines: Sequence[Line], logits: Tensor) -> None:
        """Draw the next token of every line, and of every answer that a prompt now becomes."""
        if not lines:
            return
        drawing: list[tuple[int, Line]] = []
        for row, line in enumerate(lines):
            if line.stage is Stage.READING:
                drawing += [(row, twin) for twin in self._split(line)]
            else:
                drawing.append((row, line))
        writers = [line for _, line in drawing]
        for line, drawn in zip(writers, self._drawn(writers, [row for row, _ in drawing], logits), strict=True):
            if line.stage is not Stage.DONE:  # else another answer of its request failed just now
                self._take(line, drawn)

    def _drawn(self, lines: Sequence[Line], rows: Sequence[int], logits: Tensor) -> list[Drawn | EngineFailed]:
        """What each line draws from its row of the logits. If that fails for all together, each draws alone."""
        try:
            return list(self._draw(lines, logits[torch.tensor(rows, device=logits.device)]))
        except Exception as error:
            if len(lines) == 1:
                log.exception("a draw failed")
                return [_failure("the draw", error)]
            log.warning("a draw over %d rows failed with %s: %s", len(lines), type(error).__name__, error)
        return [self._drawn([line], [row], logits)[0] for line, row in zip(lines, rows, strict=True)]

    def _take(self, line: Line, drawn: Drawn | EngineFailed) -> None:
        """Tell one line what it drew. What goes wrong there is its own affair."""
        if isinstance(drawn, EngineFailed):
            self._ended(line, drawn)
            return
        try:
            over = drawn.error or line.accept(drawn.token_id, drawn.logprob, self._context)
            if over is not None:
                self._ended(line, over)
        except Exception as error:
            log.exception("a token could not be told")
            self._ended(line, _failure("telling a token", error))

    @torch.inference_mode()
    def _draw(self, lines: Sequence[Line], logits: Tensor) -> list[Drawn]:
        return draw(logits, [line.choice for line in lines], [line.pos for line in lines])


def _failure(what: str, error: Exception) -> EngineFailed:
    return EngineFailed(f"{what} failed with {type(error).__name__}: {error}")


def _feed(line: Line, count: int) -> Feed:
    """Where a piece of a session's prompt ends, the next turn may part from it, so recurrent state is kept there. The
    last piece is of one token: who parts from it there goes on from the piece before."""
    capture = line.request.session is not None and line.stage is Stage.READING and count < line.unread
    return Feed(_seq(line), Span(line.read, line.read + count), capture=capture)


def _seq(line: Line) -> int:
    assert line.seq is not None, "a line without a sequence was scheduled"
    return line.seq
