"""request: a submission and its completions. No torch.

A request starts as one completion, which prefills the prompt. Then it is forked into as many of its `n` outputs as
there are sequences for; they share the prompt's cells, and each decodes. Where outputs are left, the next one waits as
a completion of its own, and is forked in the same way once it has the prompt: from what memory has of it.

A request that another engine has answered in part (`Submission.produced`) starts with more of them: `intake.py`.

Always true:
  * a completion's `tokens` are the prompt and the tokens drawn so far, without those that context shifts dropped;
    memory holds K/V and state of the first `computed` of them, under sequence `seq`;
  * a completion that is waiting or done has no sequence in memory;
  * once its prompt is computed, a request has made all of its outputs, or one of them has drawn nothing yet and is not
    over;
  * after `Done` or `Failed` no event is delivered.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.prompt_reading import Pooled, PromptLogprobs, PromptReading, to_read
from kvcellar.engine.messages import Drawn, Ended, EngineEvent, Submission
from kvcellar.engine.request_options import shift_span, timings_of
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.events import Done, Failed, FinishReason, Recall, Speculation, Timings, TokenLogprob, Usage
from kvcellar.memory.prefix.node import ids_of, key_of
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.snapshot import with_adapter
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams


class AdapterUse(NamedTuple):
    """The adapter of a request: `number` tells it from others that are loaded, `digest` from all that compute anything
    else."""

    name: str
    number: int
    digest: str


class Status(Enum):
    """The states of a completion."""

    WAITING = "for admission, or preempted: has tokens, and nothing in memory"
    PREFILL = "its tokens are computed, some in each step"
    DECODE = "all tokens but the last are computed; draws one in each step"
    DONE = "has nothing in memory; final"


NEXT = {
    Status.WAITING: {Status.PREFILL, Status.DONE},
    Status.PREFILL: {Status.DECODE, Status.WAITING, Status.DONE},  # WAITING: preempted
    Status.DECODE: {Status.PREFILL, Status.WAITING, Status.DONE},  # PREFILL: a context shift recomputes its text
    Status.DONE: set[Status](),
}


@dataclass(eq=False, slots=True)
class Request:
    """One submission. It shares memory with the requests of its namespace and its adapter only, and where all tokens of
    a prompt see each other, of its prompt: these of its `space`."""

    submission: Submission
    deliver: Callable[[EngineEvent], None]
    adapter: AdapterUse | None = None
    images: PromptImages | None = None  # of its prompt
    prompt_reading: PromptReading | None = field(init=False, default=None)  # None: nothing is read of it
    prompt: Sequence[int] = field(init=False)
    space: str = field(init=False)
    completions: list["Completion"] = field(default_factory=list["Completion"])
    cached: int = 0  # tokens of the prompt that were taken from memory at admission
    recall: Recall | None = None
    speculation: Speculation | None = None  # of the completions that have ended
    pinned: bool = False  # its prompt is, since a completion has left memory
    done: bool = False
    outcome: str = ""  # once it is done: the reason why its last completion ended here, or the name of an error's class
    on_done: "Callable[[Request], None] | None" = None  # called once
    unreachable: bool = False  # `deliver` raised: no more events are delivered, and the loop cancels the request
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    _unclaimed: list[None] = field(default_factory=lambda: [None])  # empty once it is claimed

    def claim(self) -> bool:
        """Whether this is the first call. The engine's thread claims a request when it takes it in, and then what it
        holds is given back at its end; a submission that was interrupted claims it to give that back itself."""
        try:
            self._unclaimed.pop()  # atomic
        except IndexError:
            return False
        return True

    def __post_init__(self) -> None:
        self.prompt = ids_of(self.submission.prompt)
        namespace, pooling = self.submission.namespace, self.submission.pooling
        if self.submission.prompt_told or self.submission.produced:  # the prompt was read before a token was drawn
            self.prompt_reading = None
        elif pooling is not None:
            self.prompt_reading = Pooled(self.prompt, pooling)
        elif self.params.prompt_logprobs is not None:
            self.prompt_reading = PromptLogprobs(self.prompt, self.params.prompt_logprobs)
        digest = self.adapter.digest if self.adapter is not None else ""
        if self.images is not None and self.images.digest:  # other prompts do not begin with what is kept of this one
            digest = f"{digest}/{self.images.digest}"
        self.space = with_adapter(namespace, digest) if digest else namespace

    @property
    def number(self) -> int:
        return self.submission.number

    @property
    def key(self) -> bytes:
        """Of its prompt."""
        return self.submission.prompt

    @property
    def params(self) -> SamplingParams:
        return self.submission.params

    @property
    def retention(self) -> RetentionOptions:
        return self.submission.retention

    def depths(self) -> dict[int, int]:
        """By index of each output that was made: how many earlier ones are not over."""
        found, depth = dict[int, int](), 0
        for completion in sorted(self.completions, key=lambda one: one.key):  # not so where a request goes on
            found[completion.sampler.index] = depth
            depth += completion.status is not Status.DONE
        return found

    def emit(self, event: EngineEvent) -> None:
        if self.done or self.unreachable:
            return
        try:
            self.deliver(event)
        except BaseException:  # noqa: BLE001 - an error of one receiver (a closed event loop) must not affect others
            self.unreachable = True

    def fail(self, error: Exception) -> None:
        """Emit `Failed`, as the last event."""
        self.outcome = type(error).__name__
        self.emit(Failed(error))
        self._end()

    def conclude(self) -> None:
        """Emit `Done`, as the last event."""
        self.emit(Done(self.usage(), self.timings(), self.recall, self.speculation, pinned=self.pinned))
        self._end()

    def _end(self) -> None:
        self.done = True
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(self)

    def usage(self) -> Usage:
        return Usage(len(self.prompt), self.cached, sum(completion.counted for completion in self.completions))

    def timings(self) -> Timings:
        return timings_of(self.submitted, self.admitted, self.first_token, self.last_token)


Token = tuple[int, TokenLogprob | None]  # a drawn token, with its log-probability if that is wanted


class Accepted(NamedTuple):
    """How many of the drawn tokens a completion accepted, and why it ends with the last of these; None: it goes on."""

    tokens: int
    reason: FinishReason | None


@dataclass(eq=False, slots=True)
class Completion:
    """One of the outputs of a request, while it runs."""

    request: Request
    sampler: Sampler
    tokens: list[int]
    status: Status = Status.WAITING
    seq: int | None = None
    computed: int = 0  # tokens in memory
    dropped: int = 0  # tokens that context shifts dropped: `tokens` does not contain them
    told: int | None = None  # drawn tokens up to the end of its text; None: all, as far as is known
    shifts: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])  # those in memory

    @property
    def key(self) -> tuple[int, int]:
        """Order of arrival: by request, then by index of the completion."""
        return (self.request.number, self.sampler.index)

    @property
    def text_key(self) -> bytes:
        """The key of its tokens in the prefix tree. Costs those behind the prompt, or all after a context shift."""
        if self.dropped:
            return key_of(self.tokens)
        return self.request.key + key_of(self.tokens[len(self.request.prompt) :])

    @property
    def counted(self) -> int:
        """Drawn tokens, without those behind the end of its text."""
        return self.sampler.produced if self.told is None else self.told

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def late(self) -> bool:
        """Does the next token have to wait for the mask of its constraint?"""
        return self.sampler.matcher is not None and self.sampler.matcher.late

    def await_mask(self, seconds: float) -> None:
        """Wait until it is not `late` any more."""
        if self.sampler.matcher is not None:
            self.sampler.matcher.wait(seconds)

    @property
    def draws(self) -> bool:
        """Does it go on behind its prompt?"""
        return self.request.submission.pooling is None and self.request.params.max_tokens != 0

    @property
    def reads(self) -> bool:
        """Does its request read rows that are still to be computed?"""
        return self.request.prompt_reading is not None and not self.request.prompt_reading.done

    @property
    def reusable(self) -> int:
        """How many of its first tokens need not be computed where memory has them: all but the last, but those that are
        still read, and but those that see one of these."""
        reading, images, most = self.request.prompt_reading, self.request.images, len(self.tokens) - 1
        most = most if reading is None or reading.done else min(most, reading.known)
        return most if images is None else images.resumes(most)

    def scored(self, tokens: int) -> Sequence[int]:
        """Which of its next tokens, counted from 0, have logits that its request reads."""
        reading = self.request.prompt_reading
        if reading is None or isinstance(reading, Pooled):
            return ()
        rows = to_read(reading, self.computed, tokens)
        if self.request.images is None:
            return rows
        return [rows.start + row for row in reading.scored(self.computed + rows.start, len(rows))]

    @property
    def pos(self) -> int:
        """Position of the next token to draw in the whole text, dropped tokens included."""
        return self.dropped + len(self.tokens)

    def overflow(self, context: int) -> Span:
        """What a context shift drops: half of what follows the tokens that are kept."""
        keep = self.request.params.num_keep
        return shift_span(context, len(self.request.prompt) if keep < 0 else keep)

    def full(self, context: int) -> bool:
        """Is the whole context in memory, and are there tokens left to compute?"""
        return self.computed >= context and self.uncomputed > 0

    def shift(self, span: Span) -> None:
        """Follow a removal of `span` from memory that moved what follows. K/V there still encode the removed tokens,
        so these are kept: K/V are recomputed by computing the whole text and shifting again."""
        self.shifts.append((span.start, self.tokens[span.start : span.end]))
        self.computed -= len(span)
        self._drop(span)

    def drop(self, span: Span) -> None:
        """Drop `span` from the text, which is then as if it had never contained it. It has nothing in memory."""
        self.shifts.clear()
        self._drop(span)
        if self.status is Status.DECODE:
            self.become(Status.PREFILL)

    def undo_shifts(self) -> None:
        """Insert what shifts dropped: the memory was freed, and the text is computed again from the beginning."""
        while self.shifts:
            start, tokens = self.shifts.pop()
            self.tokens[start:start] = tokens
            self.dropped -= len(tokens)

    def _drop(self, span: Span) -> None:
        del self.tokens[span.start : span.end]
        self.dropped += len(span)

    def become(self, status: Status) -> None:
        assert status in NEXT[self.status], f"a completion cannot go from {self.status.name} to {status.name}"
        self.status = status

    def takes(self, tokens: Sequence[int], context: int) -> int:
        """How many of the next tokens, in order, it accepts: those up to the first that ends it. Changes nothing."""
        for count, token in enumerate(tokens[:-1], start=1):
            if self.sampler.ends_with(token) or self._full(count, context):
                return count
        return len(tokens)

    def spent(self, context: int) -> bool:
        """Was its last token drawn in another engine, which did not tell its end? One without tokens has a prompt to
        compute."""
        return self.sampler.produced > 0 and self._full(0, context)

    def _full(self, count: int, context: int) -> bool:
        """Does it end with the next `count` tokens because no more of them are allowed?"""
        params = self.request.params
        at_end = len(self.tokens) + count > context and not params.shift
        return at_end or self.sampler.produced + count == params.max_tokens

    def accept(self, drawn: Sequence[Token], context: int) -> Accepted:
        """Append drawn tokens in order, as many as it takes, and emit them as one `Drawn`."""
        request = self.request
        now = time.perf_counter()
        request.first_token = request.first_token or now
        request.last_token = now
        drawn = drawn[: self.takes([token for token, _ in drawn], context)]
        ends, full = self.sampler.ends_with(drawn[-1][0]), self._full(len(drawn), context)
        for token, _ in drawn:
            self.sampler.accept(token)
        kept = drawn[:-1] if ends else drawn
        if kept:
            ids = tuple(token for token, _ in kept)
            self.tokens += ids
            logprobs = tuple(logprob for _, logprob in kept if logprob is not None)
            wanted = request.params.logprobs is not None
            request.emit(Drawn(self.sampler.index, ids, logprobs if wanted else None, request.cached))
        if ends:
            return Accepted(len(drawn), "stop")
        return Accepted(len(drawn), "length" if full else None)

    def finish(self, reason: FinishReason) -> None:
        """Emit `Ended`; after the last completion of the request, `Done`."""
        self.become(Status.DONE)
        self.request.outcome = reason
        self.request.emit(Ended(self.sampler.index, reason, self.counted))
        if all(completion.status is Status.DONE for completion in self.request.completions):
            self.request.conclude()


class Scheduled(NamedTuple):
    """The next `tokens` tokens of a completion are computed in the step, and behind them its first `drafts` drafts."""

    completion: Completion
    tokens: int
    drafts: int = 0

    @property
    def rows(self) -> int:
        return self.tokens + self.drafts

    @property
    def ends(self) -> bool:
        """Is the last token of a prompt among them?"""
        completion = self.completion
        return completion.status is Status.PREFILL and completion.draws and self.tokens >= completion.uncomputed
