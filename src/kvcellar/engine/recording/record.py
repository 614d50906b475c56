"""record: let a guest run recorded, if that gives the logits of its modules, bit for bit."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcellar.engine.models.guest import MODEL_ERRORS, Guest
from kvcellar.engine.models.input_limits import context_of, random_tokens
from kvcellar.engine.models.registered import our_attention
from kvcellar.engine.recording.facts import Unsettled
from kvcellar.engine.recording.program import CONVOLVE, SCAN_STATES
from kvcellar.engine.recording.recording import Captured, Execute, Hooks, NotRecordable, Recording, inlined, reason_of
from kvcellar.engine.recording.saved import Programs, digest_of
from kvcellar.errors import BadRequest
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from kvcellar.progress import report

log = logging.getLogger("kvcellar.engine.models")

MOST = 24  # positions of a sequence in the test
MANY = 100  # rows of its longest step, where the context has so many
SMALLEST = 16  # that the test needs


def record(guest: Guest, execute: Execute, kept: Programs | None = None) -> None:
    """Set `recording` of a guest, or the reason why it stays as it is. A program that is in `kept` is not captured."""
    report("recording a step")
    try:
        guest.recording = _recording(guest, execute, kept)
        guest.not_recorded = None
    except MODEL_ERRORS as error:
        guest.not_recorded = reason_of(error)


def _recording(guest: Guest, execute: Execute, kept: Programs | None) -> Recording:
    if (hooks := Hooks(guest.model)).found():
        raise NotRecordable(hooks.reason())
    try:
        digest = digest_of(guest) if kept is not None else ""
    except Unsettled:
        kept, digest = None, ""
    if kept is not None and (found := kept.read(digest)) is not None:
        try:
            return tested(guest, found, execute)
        except MODEL_ERRORS as error:  # its modules are not as their classes make them
            log.warning("a kept recording of %s is not used: %s", type(guest.model).__name__, reason_of(error))
    recording = _traced(guest, execute)
    if kept is not None:
        kept.write(digest, recording.captured)
    return recording


def _traced(guest: Guest, execute: Execute) -> Recording:
    from kvcellar.engine.recording.capture import capture  # not at the top: it imports what only tracing needs

    made = capture(guest)
    try:
        return tested(guest, made, execute)
    except MODEL_ERRORS as error:
        if all(op.name not in (CONVOLVE, SCAN_STATES) for op in made.program.ops):
            raise
        log.info("mixers are called in programs: %s", reason_of(error))
        return tested(guest, capture(guest, mixers=False), execute)


def tested(guest: Guest, captured: Captured, execute: Execute) -> Recording:
    """A recording that gave the logits of the modules, without its program for decoding where that did not. Raises
    `NotRecordable`, and what running it raises."""
    try:
        return _tested(guest, captured, execute)
    except MODEL_ERRORS as error:
        if captured.decoding is None:
            raise
        why = {type(module).__name__: f"as it decodes: {reason_of(error)}" for module in guest.shape.mixers}
        return _tested(guest, Captured(captured.program, {**captured.opaque, **why}), execute)


def _tested(guest: Guest, captured: Captured, execute: Execute) -> Recording:
    decoding = captured.decoding
    decoder = None if decoding is None else execute(decoding)
    programs = [captured.program] if decoding is None else [captured.program, decoding]
    around = Hooks(guest.model), inlined(guest.model, programs)
    recording = Recording(captured, execute(captured.program), decoder, *around)
    compare(guest, recording)
    recording.steps = 0
    return recording


def compare(guest: Guest, recording: Recording) -> None:
    """Raise `NotRecordable` unless a recording has the results of the modules of its guest."""
    hidden = "hidden" in recording.captured.program.outputs
    ours, theirs = results_of(guest, recording, hidden=hidden), results_of(guest, None, hidden=hidden)
    wrong = [(a.float() - b.float()).abs().max() for a, b in zip(ours, theirs, strict=True) if not torch.equal(a, b)]
    if wrong:
        raise NotRecordable(
            f"its results differ from those of its modules, by {float(max(wrong)):.1e}, in {len(wrong)} of {len(ours)} "
            f"steps of a test"
        )
    if recording.by_modules:
        raise NotRecordable(f"modules have to run its steps: {', '.join(recording.by_modules)}")


@torch.inference_mode()
def results_of(guest: Guest, recording: Recording | None, *, hidden: bool) -> list[Tensor]:
    """Logits of a few steps with this recording, or by modules: a chunk of a prompt beside a short one, decoding, part
    of a feed that is kept, a query-only row beside a token, a step without logits, decoding again, a long prompt. With
    `hidden`, hidden states of two more steps, a part of whose rows have logits: one that decodes only, as some programs
    are for, and one that does not."""
    before, guest.recording = guest.recording, recording
    our_attention(guest.model)
    try:
        steps = _Steps(guest)
        steps.step([Feed(0, steps.next(0, 11)), Feed(1, steps.next(1, 3))], wanted=5)
        steps.step([Feed(0, steps.next(0, 1)), Feed(1, steps.next(1, 1))])
        if guest.no_partial_commit is None:
            feeds = [Feed(seq, steps.next(seq, 4), revertible=True) for seq in (0, 1)]
            steps.step(feeds, kept={0: 1, 1: 2})
        steps.step([Feed(0, steps.next(0, 1), stores=False), Feed(1, steps.next(1, 1))])
        steps.step([Feed(0, steps.next(0, 1))], wanted=0)
        steps.step([Feed(0, steps.next(0, 1))])
        if hidden:
            steps.step([Feed(0, steps.next(0, 1)), Feed(1, steps.next(1, 3))], wanted=2, hidden=True)
            steps.step([Feed(0, steps.next(0, 1)), Feed(1, steps.next(1, 1))], wanted=1, hidden=True)
        steps.step([Feed(2, Span(0, min(MANY, context_of(guest.model))))], wanted=3)
        return steps.results
    finally:
        guest.recording = before


class _Steps:
    def __init__(self, guest: Guest) -> None:
        if context_of(guest.model) < SMALLEST:
            raise NotRecordable(f"its context of {context_of(guest.model)} positions is too short to test a recording")
        self._guest = guest
        self._memory = guest.memory({group.name: 3 * MOST + MANY for group in guest.shape.groups}, rows=8)
        self._ids = random_tokens(guest.model, 2 * MOST + MANY, torch.Generator().manual_seed(0))
        self.results: list[Tensor] = []

    def next(self, seq: int, count: int) -> Span:
        return Span(self._memory.length(seq), self._memory.length(seq) + count)

    def step(
        self,
        feeds: Sequence[Feed],
        *,
        wanted: int | None = None,
        kept: dict[int, int] | None = None,
        hidden: bool = False,
    ) -> None:
        """`wanted`: only so many rows, the last first."""
        ids = [self._ids[MOST * feed.seq + pos] for feed in feeds for pos in range(feed.pos.start, feed.pos.end)]
        try:
            plan = self._memory.begin(Batch(tuple(feeds)))
        except BadRequest:
            return  # a query-only row that sees nothing, where a chunk begins
        rows = range(len(ids))[::-1][:wanted]
        if hidden:
            result = self._guest.forward_with_hidden(self._memory, plan, ids, rows)[1]
        else:
            result = self._guest.forward(self._memory, plan, ids, rows)
        self.results.append(result.clone())
        self._memory.commit(kept)
