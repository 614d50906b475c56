"""runner: runs a step: begin, forward, draw, commit, emit.

Always true:
  * where begin, forward, draw or commit raises, memory and completions are as before the step, and each completion gets
    a step of its own; a completion whose own step raises ends its request;
  * an error while a token is emitted ends the request of its completion and no other.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.engine.request import Completion, Status
from kvcellar.engine.scheduler import Scheduled
from kvcellar.errors import EngineFailed
from kvcellar.events import FinishReason
from kvcellar.models.guest import Guest
from kvcellar.plan import Batch, Feed
from kvcellar.sample.draw import Drawn, draw
from kvcellar.spans import Span

log = logging.getLogger("kvcellar.engine")

Siblings = Callable[[Completion], Sequence[Completion]]
Fork = Callable[[Completion, Sequence[Completion]], None]
End = Callable[[Completion, FinishReason | Exception], None]


class Ready(NamedTuple):
    """A completion whose last token was computed in this step, and its row of the logits [R,V]. At the end of a prompt,
    `siblings` are the other completions of the request, which draw from the same row."""

    row: int
    completion: Completion
    siblings: Sequence[Completion]


Draws = Sequence[tuple[Completion, Drawn | EngineFailed]]


class Runner:
    """Runs steps of `guest` on `memory`. At the end of a prompt, `siblings` makes the other completions of the request
    and `fork` gives them the prompt's cells. `end` is called with every completion that ends. `trim` evicts
    checkpoints, so that a step has the state rows that it needs."""

    def __init__(
        self,
        guest: Guest,
        memory: Memory,
        *,
        context: int,
        siblings: Siblings,
        fork: Fork,
        end: End,
        trim: Callable[[], None],
    ) -> None:
        self._guest, self._memory, self._context = guest, memory, context
        self._siblings, self._fork, self._end, self._trim = siblings, fork, end, trim

    def step(self, scheduled: Sequence[Scheduled]) -> None:
        """Compute the scheduled tokens, and draw for each completion that has no more to compute."""
        flat = self._guest.mode == "flat"
        for part in [scheduled] if flat else [[one] for one in scheduled]:  # solo: one sequence per forward
            self._run(part)

    def _run(self, scheduled: Sequence[Scheduled]) -> None:
        """One step. If it raises, each completion gets a step of its own, so that only the one at fault ends."""
        # A completion may have ended with another one of its request since it was scheduled.
        scheduled = [one for one in scheduled if one.completion.status is not Status.DONE]
        if not scheduled:
            return
        try:
            ready, draws = self._transact(scheduled)
        except Exception as error:
            consistent = all(
                self._memory.length(_seq(completion)) == completion.computed for completion, _ in scheduled
            )
            if self._memory.step is not None or not consistent:
                raise  # the loop recovers
            self._run_singly(scheduled, error)
            return
        for completion, count in scheduled:
            completion.computed += count
        self._emit(ready, draws)

    def _run_singly(self, scheduled: Sequence[Scheduled], error: Exception) -> None:
        if len(scheduled) == 1:
            log.error("a step failed", exc_info=error)
            self._end(scheduled[0].completion, _failure("the step", error))
            return
        log.warning("a step of %d sequences failed with %s: %s", len(scheduled), type(error).__name__, error)
        for one in scheduled:
            self._run([one])

    def _transact(self, scheduled: Sequence[Scheduled]) -> tuple[list[Ready], Draws]:
        """begin, forward, draw, commit. If any of them raises, memory is as before.

        The commit raises, too, where a model skipped one of its recurrent layers and so wrote no state.
        """
        if self._memory.rows.kept:
            self._trim()
        plan = self._memory.begin(Batch(tuple(_feed(completion, count) for completion, count in scheduled)))
        try:
            logits = self._guest.forward(self._memory, plan, *self._inputs(scheduled))
            ready = self._ready(scheduled)
            draws = self._draw(
                [(one.row, completion) for one in ready for completion in (one.completion, *one.siblings)], logits
            )
            self._memory.commit({_seq(completion): count for completion, count in scheduled})
        except BaseException:
            if self._memory.step is not None:
                self._memory.abandon()
            raise
        return ready, draws

    def _inputs(self, scheduled: Sequence[Scheduled]) -> tuple[list[int], list[int]]:
        """Token ids [T] of the step, and the rows [R] whose logits are wanted."""
        ids: list[int] = []
        rows: list[int] = []
        for completion, count in scheduled:
            ids += completion.tokens[completion.computed : completion.computed + count]
            if count == completion.uncomputed:
                rows.append(len(ids) - 1)
        return ids, rows

    def _ready(self, scheduled: Sequence[Scheduled]) -> list[Ready]:
        ready = [completion for completion, count in scheduled if count == completion.uncomputed]
        return [
            Ready(row, completion, self._siblings(completion) if completion.status is Status.PREFILL else ())
            for row, completion in enumerate(ready)
        ]

    def _draw(self, rows: Sequence[tuple[int, Completion]], logits: Tensor) -> Draws:
        """Draw for each completion from its row of the logits [R,V]. If that raises for all of them together, each is
        drawn for alone. Changes no completion."""
        if not rows:
            return []
        completions = [completion for _, completion in rows]
        try:
            with torch.inference_mode():
                drawn = draw(
                    logits[torch.tensor([row for row, _ in rows], device=logits.device)],  # [n,V]
                    [completion.sampler for completion in completions],
                    [completion.pos for completion in completions],
                )
            return list(zip(completions, drawn, strict=True))
        except Exception as error:
            if len(rows) == 1:
                log.exception("a draw failed")
                return [(completions[0], _failure("the draw", error))]
            log.warning("a draw over %d rows failed with %s: %s", len(rows), type(error).__name__, error)
        return [one for row in rows for one in self._draw([row], logits)]

    def _emit(self, ready: Sequence[Ready], draws: Draws) -> None:
        """After the commit: fork the prompts that are computed, and append the drawn tokens."""
        for _, completion, siblings in ready:
            if completion.status is Status.PREFILL:
                self._fork(completion, siblings)
        for completion, drawn in draws:
            if completion.status is Status.DECODE:  # another completion of its request may have failed just now
                self._accept(completion, drawn)

    def _accept(self, completion: Completion, drawn: Drawn | EngineFailed) -> None:
        if isinstance(drawn, EngineFailed):
            self._end(completion, drawn)
            return
        try:
            reason = drawn.error or completion.accept([(drawn.token_id, drawn.logprob)], self._context).reason
            if reason is not None:
                self._end(completion, reason)
        except Exception as error:
            log.exception("a token could not be delivered")
            self._end(completion, _failure("delivering a token", error))


def _failure(what: str, error: Exception) -> EngineFailed:
    return EngineFailed(f"{what} failed with {type(error).__name__}: {error}")


def _feed(completion: Completion, count: int) -> Feed:
    """The feed of a completion, with a checkpoint at the end of each chunk of a session's prompt, as the next prompt
    may diverge there. The last chunk needs none: it is one token, and the chunk before it ends with a checkpoint."""
    prefill = completion.request.session is not None and completion.status is Status.PREFILL
    span = Span(completion.computed, completion.computed + count)
    return Feed(_seq(completion), span, keep_state=prefill and count < completion.uncomputed)


def _seq(completion: Completion) -> int:
    assert completion.seq is not None, "a completion without a sequence was scheduled"
    return completion.seq
