"""runner: runs a step: begin, forward, draw, commit, emit.

A completion in decode computes its last token and the drafts behind it. Each of these rows draws a token; the drafts
that were drawn are kept (`engine/speculate/chain.py`), up to one that ends the completion.

Always true:
  * where begin, forward, draw or commit raises, memory and completions are as before the step, and each completion gets
    a step of its own; a completion whose own step raises ends its request. Where memory is missing, `CacheFull` is
    raised instead, and no request ends. Where the device is lost, that ends the engine;
  * an error while a token is accepted ends the request of its completion and no other;
  * `recent` has the last steps that did not raise, `RECENT` at most, with rising numbers.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.control_replies import StepRecord
from kvcellar.engine.core.drafting import Drafting
from kvcellar.engine.core.failures import check_device
from kvcellar.engine.core.prompt_rows import PromptRows
from kvcellar.engine.core.request import Completion, Scheduled, Status
from kvcellar.engine.core.seeing import Seeing
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.vision import StepImages
from kvcellar.engine.speculate.chain import Chain, Verified, verify
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.errors import CacheFull, EngineFailed
from kvcellar.events import FinishReason
from kvcellar.images.image import is_row
from kvcellar.kernels.uploads import uploaded
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Plan

log = logging.getLogger("kvcellar.engine")

RECENT = 240  # steps that are remembered

Siblings = Callable[[Completion, int], Sequence[Completion]]
Fork = Callable[[Completion, Sequence[Completion]], None]
End = Callable[[Completion, FinishReason | Exception], None]


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A completion whose last token was computed in this step, and the rows of the logits [R,V] of this token and its
    drafts; none if it ends with its prompt. At the end of a prompt, `siblings` are the other completions of the
    request, which draw from the same row.
    """

    rows: range
    completion: Completion
    siblings: Sequence[Completion]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a completion has drawn: up to `takes` tokens are appended to it, or it ends with an error. If it is `late`,
    it has drawn none, as the mask of its constraint was not known in time: it takes part in a later step."""

    completion: Completion
    verified: Verified
    takes: int
    error: Exception | None = None
    late: bool = False

    @property
    def kept(self) -> int:
        """How many rows of the completion stay in memory: as in plain decoding, all tokens but the last."""
        return 0 if self.late else max(1, self.takes)

    @property
    def drafted(self) -> bool:
        """Are rows of it kept that are fewer than it computed? Else it keeps all: of a prompt, which is drawn from."""
        return self.completion.status is Status.DECODE or self.late


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A step that was kept: how many rows of each sequence, its claims and its hidden states [T,H]; and the rows that
    requests read of their prompts, with what they found."""

    chains: Mapping[Completion, Chain]
    ready: Sequence[Ready]
    results: Sequence[Result]
    rows: Mapping[int, int]
    claims: Mapping[int, int]
    hidden: Tensor | None
    reads: PromptRows | None
    found: Sequence[Any]


NOTHING = Verified((), 0, 0)
Outcome = tuple[Result, FinishReason | Exception | None]  # why the completion ends, if it does


class Runner:
    """Runs steps of `guest` on `memory`. At the end of a prompt, `siblings` makes the other completions of the request,
    beside so many that the step starts already, and `fork` gives them the prompt's cells. `end` is called with every
    completion that ends. `feeds` are those of a step, for which memory is made free; `keep` is called with what each
    completion has of a step that was kept: rows, claim and drafts."""

    def __init__(
        self,
        guest: Guest,
        memory: Memory,
        drafting: Drafting,
        *,
        context: int,
        siblings: Siblings,
        fork: Fork,
        end: End,
        feeds: Callable[[Sequence[Scheduled]], tuple[Feed, ...]],
        keep: Callable[[Completion, int, int | None, Sequence[int]], None],
        seeing: Seeing | None = None,
    ) -> None:
        """`seeing`: features of images; None: the model takes none."""
        self._seeing = seeing
        self._guest, self._memory, self._drafting, self._context = guest, memory, drafting, context
        self._siblings, self._fork, self._end = siblings, fork, end
        self._feeds, self._keep = feeds, keep
        self.recent: deque[StepRecord] = deque(maxlen=RECENT)
        self._number = 0
        self.prefill_tokens, self.decode_tokens = 0, 0  # since the start

    def step(self, scheduled: Sequence[Scheduled]) -> None:
        """Compute the scheduled tokens and drafts, and draw for each completion that has no more to compute."""
        flat, began = self._guest.mode == "flat", time.perf_counter()
        prompts = sum(one.tokens for one in scheduled if one.completion.status is Status.PREFILL)
        outcomes: list[Outcome] = []
        try:
            for part in [scheduled] if flat else [[one] for one in scheduled]:  # solo: one sequence per forward
                self._run(part, outcomes)
            verified = {one.completion: one.verified for one, _ in outcomes if one.error is None}
            self._drafting.learn(verified, alone=not prompts)
        finally:
            for one, reason in outcomes:
                # Not if the error of another one has ended it.
                if reason is not None and one.completion.status is Status.DECODE:
                    self._end(one.completion, reason)
        self._remember(scheduled, prompts, time.perf_counter() - began)

    def _remember(self, scheduled: Sequence[Scheduled], prompts: int, seconds: float) -> None:
        tokens, drafts = sum(one.tokens for one in scheduled), sum(one.drafts for one in scheduled)
        recording = self._guest.recording
        modules = self._guest.not_recorded if recording is None else recording.last_refusal
        self._number += 1
        self.prefill_tokens += prompts
        self.decode_tokens += tokens - prompts
        what = prompts, tokens - prompts, drafts, len(scheduled), modules
        self.recent.append(StepRecord(self._number, time.time(), seconds, *what))

    def _run(self, scheduled: Sequence[Scheduled], outcomes: list[Outcome]) -> None:
        """One step, which adds what completions have accepted to `outcomes`. If it raises, each completion gets a step
        of its own, so that only the one at fault ends."""
        # A completion may have ended with another one of its request since it was scheduled.
        scheduled = [one for one in scheduled if one.completion.status is not Status.DONE]
        if not scheduled:
            return
        try:
            kept = self._transact(scheduled)
        except CacheFull:
            raise  # nothing has changed, and fewer sequences at once would not help those that are left
        except Exception as error:
            check_device(self._memory.device)
            consistent = all(self._memory.length(_seq(one.completion)) == one.completion.computed for one in scheduled)
            if self._memory.step is not None or not consistent:
                raise  # the loop recovers
            if any(one.drafts for one in scheduled):
                self._drafting.failed(error)
            if self._seeing is not None:
                self._seeing.abandon()  # what a tower holds may be the memory that this step lacks
            self._run_singly(scheduled, error, outcomes)
        else:
            self._emit(scheduled, kept, outcomes)

    def _run_singly(self, scheduled: Sequence[Scheduled], error: Exception, outcomes: list[Outcome]) -> None:
        if len(scheduled) == 1 and not scheduled[0].drafts:
            log.error("a step failed", exc_info=error)
            self._end(scheduled[0].completion, _failure("the step", error))
            return
        log.warning("a step of %d sequences failed with %s: %s", len(scheduled), type(error).__name__, error)
        for one in scheduled:
            self._run([one._replace(drafts=0)], outcomes)

    def _transact(self, scheduled: Sequence[Scheduled]) -> Kept:
        """begin, forward, draw, commit. If any of them raises, memory is as before.

        The commit raises, too, where a model skipped one of its recurrent layers and so wrote no state.
        """
        chains = {one.completion: self._drafting.chain(one.completion, one.drafts) for one in scheduled}
        ahead = self._seeing.ahead(scheduled) if self._seeing is not None else ()
        with self._memory.stepping(Batch(self._feeds(scheduled), ahead)) as plan:
            ids, rows = _inputs(scheduled, chains)
            ids, images = self._seeing.step(scheduled, ids) if self._seeing is not None else (ids, None)
            reads = PromptRows(scheduled, self._guest.draws) if any(one.completion.reads for one in scheduled) else None
            logits, hidden = self._forward(plan, ids, rows, reads, images)
            found = reads.values(logits[len(rows) :], hidden) if reads is not None else ()
            if reads is not None:
                logits = logits[: len(rows)].clone()  # the others are freed before tokens are drawn
            ready = self._ready(scheduled)
            results = self._results(
                [(chains[one.completion], one.rows, one.completion) for one in ready]
                + [(self._drafting.chain(other), one.rows, other) for one in ready for other in one.siblings],
                logits,
            )
            drafted = {_seq(one.completion): one.kept for one in results if one.drafted}
            counts = {_seq(one.completion): one.tokens for one in scheduled} | drafted
            return Kept(chains, ready, results, counts, self._memory.commit(counts), hidden, reads, found)

    def _forward(
        self,
        plan: Plan,
        ids: Sequence[int],
        rows: Sequence[int],
        reads: PromptRows | None,
        images: StepImages | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R,V] of `rows`, and behind them of the rows that requests read; hidden states [T,H], if needed."""
        wanted = rows if reads is None else [*rows, *reads.scored]
        seen = () if images is None else (images,)
        if self._drafting.reads_hidden or (reads is not None and reads.hidden):
            return self._guest.forward_with_hidden(self._memory, plan, ids, wanted, *seen)
        return self._guest.forward(self._memory, plan, ids, wanted, *seen), None

    def _ready(self, scheduled: Sequence[Scheduled]) -> list[Ready]:
        found: list[Ready] = []
        row = started = 0
        for completion, tokens, drafts in scheduled:
            if tokens == completion.uncomputed:
                siblings = self._siblings(completion, started) if completion.status is Status.PREFILL else ()
                started += len(siblings)
                draws = 1 + drafts if completion.draws else 0
                found.append(Ready(range(row, row + draws), completion, siblings))
                row += draws
        return found

    def _results(self, rows: Sequence[tuple[Chain, range, Completion]], logits: Tensor) -> list[Result]:
        """`_draw`, and nothing for completions that end with their prompt, which have no rows."""
        ended = [Result(completion, NOTHING, 0) for _, of, completion in rows if not of]
        return self._draw([row for row in rows if row[1]], logits) + ended

    def _draw(self, rows: Sequence[tuple[Chain, range, Completion]], logits: Tensor) -> list[Result]:
        """Draw for each completion from its rows of the logits [R,V]. If that raises for all of them together, each is
        drawn for alone. Changes no completion."""
        if not rows:
            return []
        try:
            at = [row for _, of, _ in rows for row in of]
            with torch.inference_mode():
                own = logits  # all rows in order need no copy
                if at != [*range(len(logits))]:
                    own = logits[uploaded(at, torch.int64, logits.device)]
                verified = verify([chain for chain, _, _ in rows], own)  # [n,V]
            return [self._judged(completion, one) for (_, _, completion), one in zip(rows, verified, strict=True)]
        except Exception as error:
            check_device(self._memory.device)
            if len(rows) == 1:
                chain, of, completion = rows[0]
                if chain.drafts:
                    self._drafting.failed(error)
                    chain.cut(0)
                    return self._draw([(chain, of[:1], completion)], logits)
                log.exception("a draw failed")
                return [Result(rows[0][2], NOTHING, 0, _failure("the draw", error))]
            log.warning("a draw of %d completions failed with %s: %s", len(rows), type(error).__name__, error)
        return [result for row in rows for result in self._draw([row], logits)]

    def _judged(self, completion: Completion, verified: Verified) -> Result:
        """What a completion takes of its tokens. An error behind some of them is met again in the next step: their text
        may have ended the completion by then."""
        if not verified.drawn:
            return Result(completion, verified, 0, late=True)
        error = verified.drawn[-1].error
        tokens = [one.token_id for one in verified.drawn if one.error is None]
        takes = completion.takes(tokens, self._context) if tokens else 0
        return Result(completion, verified, takes, None if tokens else error)

    # -- after the commit ---------------------------------------------------------------------------------------

    def _emit(self, scheduled: Sequence[Scheduled], kept: Kept, outcomes: list[Outcome]) -> None:
        """Record what memory has, fork the prompts that are computed, and append the drawn tokens."""
        for one in scheduled:
            seq = _seq(one.completion)
            drafts = kept.chains[one.completion].tokens[: max(0, kept.rows[seq] - 1)] if one.drafts else ()
            self._keep(one.completion, kept.rows[seq], kept.claims.get(seq), drafts)
        failed = kept.reads.deliver(kept.found) if kept.reads is not None else ()
        self._pass_on(scheduled, kept)  # before forks, which begin with what drafters know of the prompt
        for completion, error in failed:
            self._end(completion, error)
        late = [one.completion for one in kept.results if one.late]
        for one in kept.ready:
            if one.completion.status is Status.PREFILL and one.completion not in late:
                self._fork(one.completion, one.siblings)
        # Another completion of its request may have failed just now.
        going = [one for one in kept.results if one.completion.status is Status.DECODE and not one.late]
        outcomes.extend((one, self._accept(one)) for one in going)

    def _pass_on(self, scheduled: Sequence[Scheduled], kept: Kept) -> None:
        """Let the drafter read the hidden states of what was kept."""
        if kept.hidden is None or not self._drafting.reads_hidden:
            return
        news: list[Committed] = []
        row = 0
        for completion, tokens, drafts in scheduled:
            count, request, text = kept.rows[_seq(completion)], completion.request, completion.tokens
            start, hidden = completion.computed - count, kept.hidden[row : row + count]
            new, namespace = [*text[start : start + count], *kept.chains[completion].tokens][:count], request.space
            if (images := request.images) is not None:
                kept_rows = [at for at, token in enumerate(new) if not is_row(token)]
                text, start = self._drafting.text(completion), images.text_before(start)
                new, hidden = [new[at] for at in kept_rows], hidden[kept_rows]
            if new:
                news.append(Committed(completion.key, namespace, text, start, new, hidden, request.retention))
            row += tokens + drafts
        self._drafting.committed(news)

    def _accept(self, result: Result) -> FinishReason | Exception | None:
        """Append its tokens to a completion, and emit them. Returns why it ends, if it does."""
        if not result.completion.draws:
            return "length"
        drawn = [(one.token_id, one.logprob) for one in result.verified.drawn[: result.takes]]
        try:
            reason = result.completion.accept(drawn, self._context).reason if drawn else None
            return reason or result.error
        except Exception as error:
            log.exception("a token could not be accepted")
            return _failure("accepting a token", error)


def _inputs(scheduled: Sequence[Scheduled], chains: Mapping[Completion, Chain]) -> tuple[list[int], list[int]]:
    """Token ids [T] of the step, and the rows [R] whose logits are wanted."""
    ids: list[int] = []
    rows: list[int] = []
    for completion, tokens, drafts in scheduled:
        ids += completion.tokens[completion.computed : completion.computed + tokens]
        if tokens == completion.uncomputed and completion.draws:
            rows += range(len(ids) - 1, len(ids) + drafts)
        ids += chains[completion].tokens
    return ids, rows


def _failure(what: str, error: Exception) -> EngineFailed:
    return EngineFailed(f"{what} failed with {type(error).__name__}: {error}")


def _seq(completion: Completion) -> int:
    assert completion.seq is not None, "a completion without a sequence was scheduled"
    return completion.seq
