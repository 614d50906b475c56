"""request: what somebody asked for, and the completions of text that answer it. No torch.

A request starts as one completion that reads the prompt. When the prompt has been read, the completion is forked into
`n` completions that share its cells, and each writes one answer.

Always true:
  * a completion's `tokens` are the prompt and what was drawn so far; memory holds the first `read` of them under `seq`;
  * a completion that waits or is done holds nothing in memory;
  * after `Done` or `Failed` nothing more is delivered.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvcellar.events import Delta, Done, Event, Failed, Finished, FinishReason, Timings, TokenLogprob, Usage
from kvcellar.sample.params import SamplingParams
from kvcellar.sample.sampler import Sampler
from kvcellar.spans import Span
from kvcellar.text.output import Output, Stops


class Stage(Enum):
    """The life of a completion."""

    WAITING = "has tokens to read, holds nothing in memory"
    PREFILL = "its tokens are being read, some each step"
    DECODE = "all but its last token are read; draws one each step"
    DONE = "holds nothing; never comes back"


NEXT = {
    Stage.WAITING: {Stage.PREFILL, Stage.DONE},
    Stage.PREFILL: {Stage.DECODE, Stage.WAITING, Stage.DONE},  # WAITING: preempted
    Stage.DECODE: {Stage.PREFILL, Stage.WAITING, Stage.DONE},  # PREFILL: a part of its text is read again
    Stage.DONE: set[Stage](),
}


@dataclass(eq=False, slots=True)
class Request:
    """One submission. `number` is its place in the order of arrival, given to it when it arrives.
    `checkpoint_positions` are places in its prompt, in order, that its session may come back to."""

    prompt: tuple[int, ...]
    params: SamplingParams
    deliver: Callable[[Event], None]
    session: int | None = None
    checkpoint_positions: tuple[int, ...] = ()
    stops: Stops = field(init=False)  # of all its completions
    number: int = -1
    completions: list["Completion"] = field(default_factory=list["Completion"])
    cached: int = 0
    over: bool = False
    ended: Callable[[], None] | None = None  # called once, when it is over
    deaf: bool = False  # `deliver` raised: nobody listens any more, and the loop will cancel it
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.stops = Stops(self.params.stop)

    def tell(self, event: Event) -> None:
        if self.over or self.deaf:
            return
        try:
            self.deliver(event)
        except BaseException:  # noqa: BLE001 - a listener that is gone (a closed event loop) must not hurt others
            self.deaf = True

    def fail(self, error: Exception) -> None:
        """The last thing this request hears."""
        self.tell(Failed(error))
        self._end()

    def conclude(self) -> None:
        """Tell that all completions are done, once."""
        self.tell(Done(self.usage(), self.timings()))
        self._end()

    def _end(self) -> None:
        self.over = True
        ended, self.ended = self.ended, None
        if ended is not None:
            ended()

    def usage(self) -> Usage:
        return Usage(len(self.prompt), self.cached, sum(completion.sampler.produced for completion in self.completions))

    def timings(self) -> Timings:
        now = time.perf_counter()
        first = self.first_token or now
        return Timings(
            queued=(self.admitted or now) - self.submitted,
            first_token=first - self.submitted,
            decoding=(self.last_token or first) - first,
        )


Token = tuple[int, TokenLogprob | None]  # a drawn token, and its log-probability where it is asked for


class Taken(NamedTuple):
    """How many of the drawn tokens a completion took. `over` says why it ended with the last of these, None if it goes
    on."""

    tokens: int
    over: FinishReason | None


@dataclass(eq=False, slots=True)
class Completion:
    """One answer of a request while it is read and written."""

    request: Request
    sampler: Sampler
    output: Output
    tokens: list[int]
    stage: Stage = Stage.WAITING
    seq: int | None = None
    read: int = 0  # tokens in memory
    forgotten: int = 0  # tokens that were shifted out: `tokens` does not have them any more
    shifted: list[tuple[int, list[int]]] = field(
        default_factory=list[tuple[int, list[int]]]
    )  # in memory: where, and which

    @property
    def key(self) -> tuple[int, int]:
        """Order of arrival: earlier requests first, and within one its choices in order."""
        return (self.request.number, self.sampler.index)

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.read

    @property
    def pos(self) -> int:
        """Place of the token that is drawn next, in the whole text, forgotten tokens too."""
        return self.forgotten + len(self.tokens)

    def past(self, context: int) -> bool:
        """Would its last token stand behind the end of the context?"""
        return len(self.tokens) > context

    def excess(self, context: int) -> Span:
        """What to forget so that it can go on: half of what is behind what it keeps."""
        keep = self.request.params.num_keep
        return forgettable(context, len(self.request.prompt) if keep < 0 else keep)

    def full(self, context: int) -> bool:
        """Does memory hold as much of it as there may be, and there is more to read?"""
        return self.read >= context and self.unread > 0

    def shift(self, span: Span) -> None:
        """`span` was removed from memory, and what lies behind it moved down. K/V still encode what was removed, so it
        is remembered: to have them again, all of it has to be read and shifted again."""
        self.shifted.append((span.start, self.tokens[span.start : span.end]))
        self.read -= len(span)
        self._leave_out(span)

    def forget(self, span: Span, kept: int) -> None:
        """Leave `span` out of the tokens, as if it had never been there: all but the first `kept` is read again."""
        self.shifted.clear()
        self.read = kept
        self._leave_out(span)
        if self.stage is Stage.DECODE:
            self.become(Stage.PREFILL)

    def recall(self) -> None:
        """Undo the shifts: memory has been given back, and will be made again from the beginning."""
        while self.shifted:
            start, tokens = self.shifted.pop()
            self.tokens[start:start] = tokens
            self.forgotten -= len(tokens)

    def _leave_out(self, span: Span) -> None:
        del self.tokens[span.start : span.end]
        self.forgotten += len(span)

    def become(self, stage: Stage) -> None:
        assert stage in NEXT[self.stage], f"a completion cannot go from {self.stage.name} to {stage.name}"
        self.stage = stage

    def accept(self, drawn: Sequence[Token], context: int) -> Taken:
        """Take drawn tokens in order up to the first that ends the completion, and deliver each as it is taken."""
        request = self.request
        now = time.perf_counter()
        request.first_token = request.first_token or now
        request.last_token = now
        for count, (token, logprob) in enumerate(drawn, start=1):
            if (over := self._accept(token, logprob, context)) is not None:
                return Taken(count, over)
        return Taken(len(drawn), None)

    def _accept(self, token: int, logprob: TokenLogprob | None, context: int) -> FinishReason | None:
        params = self.request.params
        ends, may_stop = self.sampler.ends_with(token), self.sampler.produced + 1 >= params.min_tokens
        self.sampler.accept(token)
        if ends:
            return "stop"
        self.tokens.append(token)
        text = self.output.push(token, may_stop=may_stop)
        self._tell(text, (token,), (logprob,) if logprob is not None else ())
        if self.output.met is not None:
            return "stop"
        stuck = self.past(context) and not params.shift
        return "length" if stuck or self.sampler.produced == params.max_tokens else None

    def _tell(self, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        if text or tokens:
            asked = self.request.params.logprobs is not None
            self.request.tell(Delta(self.sampler.index, text, tokens, logprobs if asked else None))

    def finish(self, reason: FinishReason) -> None:
        """This answer is over: text that was held back is told. The last of a request's answers concludes it."""
        self.become(Stage.DONE)
        self._tell(self.output.flush(), (), ())
        self.request.tell(Finished(self.sampler.index, "stop" if self.output.met else reason, self.output.met))
        if all(completion.stage is Stage.DONE for completion in self.request.completions):
            self.request.conclude()


def forgettable(context: int, keep: int) -> Span:
    """What a text that fills the context forgets so that it can go on: half of what is behind the first `keep` tokens.

    As in Ollama at least one token goes, so all but one of the context can be kept, and who asks for more gets that.
    """
    keep = min(keep, context - 1)
    return Span(keep, keep + max(1, (context - keep) // 2))


def fresh_seed() -> int:
    """A seed for a request that named none."""
    return random.SystemRandom().getrandbits(63)
