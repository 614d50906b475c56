"""runner: one step: begin, forward, draw, commit, emit.

Always true:
  * where begin, forward, draw or commit raises, memory and completions are as they were before the step, and each
    completion goes through a step of its own; one that fails there, too, ends its request;
  * what raises while a completion is given its tokens ends its request and no other.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.engine.request import Completion, Stage
from kvcellar.engine.scheduler import Share
from kvcellar.errors import EngineFailed
from kvcellar.events import FinishReason
from kvcellar.models.guest import Guest
from kvcellar.plan import Batch, Feed
from kvcellar.sample.draw import Drawn, draw
from kvcellar.spans import Span

log = logging.getLogger("kvcellar.engine")

Twins = Callable[[Completion], Sequence[Completion]]  # a prompt that is read -> the completions beside it that share it
Split = Callable[[Completion, Sequence[Completion]], None]  # these begin in memory where the prompt ends
Ended = Callable[[Completion, FinishReason | Exception], None]


class Ready(NamedTuple):
    """A completion that has read all its tokens with this step, and its row of the logits [R,V]. If it was a prompt,
    `twins` are the completions beside it that draw from the same row."""

    row: int
    completion: Completion
    twins: Sequence[Completion]


Draws = Sequence[tuple[Completion, Drawn | EngineFailed]]


class Runner:
    """Runs steps of `guest` on `memory`. `twins` makes the completions that share a prompt, `split` forks its memory
    for them, `ended` is called with every completion that ends, and `trim` evicts what memory keeps beyond its share,
    so that a step has the rows that it needs."""

    def __init__(
        self,
        guest: Guest,
        memory: Memory,
        *,
        context: int,
        twins: Twins,
        split: Split,
        ended: Ended,
        trim: Callable[[], None],
    ) -> None:
        self._guest, self._memory, self._context = guest, memory, context
        self._twins, self._split, self._ended, self._trim = twins, split, ended, trim

    def step(self, shares: Sequence[Share]) -> None:
        """Read every share's tokens, and draw for each completion that has read all it has."""
        flat = self._guest.mode == "flat"
        for part in [shares] if flat else [[share] for share in shares]:  # solo: one sequence per forward
            self._together(part)

    def _together(self, shares: Sequence[Share]) -> None:
        """One step. If it fails, each share gets a step of its own, so that only the one at fault ends."""
        shares = [
            share for share in shares if share.completion.stage is not Stage.DONE
        ]  # with another of its request's
        if not shares:
            return
        try:
            ready, draws = self._transact(shares)
        except Exception as error:
            if self._memory.step is not None or any(
                self._memory.length(_seq(completion)) != completion.read for completion, _ in shares
            ):
                raise  # memory is not as it was before: the loop puts it in order
            self._apart(shares, error)
            return
        for completion, count in shares:
            completion.read += count
        self._emit(ready, draws)

    def _apart(self, shares: Sequence[Share], error: Exception) -> None:
        if len(shares) == 1:
            log.error("a step failed", exc_info=error)
            self._ended(shares[0].completion, _failure("the step", error))
            return
        log.warning("a step of %d sequences failed with %s: %s", len(shares), type(error).__name__, error)
        for share in shares:
            self._together([share])

    def _transact(self, shares: Sequence[Share]) -> tuple[list[Ready], Draws]:
        """begin, forward, draw, commit. If any of it raises, memory is as it was.

        The commit may raise, too: a model that skips one of its recurrent layers has left no state there.
        """
        self._trim()
        plan = self._memory.begin(Batch(tuple(_feed(completion, count) for completion, count in shares)))
        try:
            logits = self._guest.forward(self._memory, plan, *self._inputs(shares))
            ready = self._ready(shares)
            draws = self._draw(
                [(one.row, completion) for one in ready for completion in (one.completion, *one.twins)], logits
            )
            accepted = {_seq(completion): count for completion, count in shares}
            self._memory.commit(accepted)
        except BaseException:
            if self._memory.step is not None:
                self._memory.abandon()
            raise
        return ready, draws

    def _inputs(self, shares: Sequence[Share]) -> tuple[list[int], list[int]]:
        """Token ids [T] of the step, and the rows [R] whose logits are wanted."""
        ids: list[int] = []
        rows: list[int] = []
        for completion, count in shares:
            ids += completion.tokens[completion.read : completion.read + count]
            if count == completion.unread:
                rows.append(len(ids) - 1)
        return ids, rows

    def _ready(self, shares: Sequence[Share]) -> list[Ready]:
        done = [completion for completion, count in shares if count == completion.unread]
        return [
            Ready(row, completion, self._twins(completion) if completion.stage is Stage.PREFILL else ())
            for row, completion in enumerate(done)
        ]

    def _draw(self, writers: Sequence[tuple[int, Completion]], logits: Tensor) -> Draws:
        """What each completion draws from its row of the logits [R,V]. If that fails for all together, each draws
        alone. Changes no completion."""
        if not writers:
            return []
        rows, completions = [row for row, _ in writers], [completion for _, completion in writers]
        try:
            with torch.inference_mode():
                logits_of = logits[torch.tensor(rows, device=logits.device)]  # [n,V]
                drawn = draw(
                    logits_of,
                    [completion.sampler for completion in completions],
                    [completion.pos for completion in completions],
                )
            return list(zip(completions, drawn, strict=True))
        except Exception as error:
            if len(completions) == 1:
                log.exception("a draw failed")
                return [(completions[0], _failure("the draw", error))]
            log.warning("a draw over %d rows failed with %s: %s", len(completions), type(error).__name__, error)
        return [one for writer in writers for one in self._draw([writer], logits)]

    def _emit(self, ready: Sequence[Ready], draws: Draws) -> None:
        """Memory has what was read: prompts become completions, and these are given what they drew."""
        for _, completion, twins in ready:
            if completion.stage is Stage.PREFILL:
                self._split(completion, twins)
        for completion, drawn in draws:
            if completion.stage is Stage.DECODE:  # else another completion of its request failed just now
                self._give(completion, drawn)

    def _give(self, completion: Completion, drawn: Drawn | EngineFailed) -> None:
        if isinstance(drawn, EngineFailed):
            self._ended(completion, drawn)
            return
        try:
            over = drawn.error or completion.accept([(drawn.token_id, drawn.logprob)], self._context).over
            if over is not None:
                self._ended(completion, over)
        except Exception as error:
            log.exception("a token could not be delivered")
            self._ended(completion, _failure("delivering a token", error))


def _failure(what: str, error: Exception) -> EngineFailed:
    return EngineFailed(f"{what} failed with {type(error).__name__}: {error}")


def _feed(completion: Completion, count: int) -> Feed:
    """Where a piece of a session's prompt ends, the next turn may part from it, so recurrent state is kept there. The
    last piece is of one token: who parts from it there goes on from the piece before."""
    keep_state = (
        completion.request.session is not None and completion.stage is Stage.PREFILL and count < completion.unread
    )
    return Feed(_seq(completion), Span(completion.read, completion.read + count), keep_state=keep_state)


def _seq(completion: Completion) -> int:
    assert completion.seq is not None, "a completion without a sequence was scheduled"
    return completion.seq
