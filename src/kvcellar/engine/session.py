"""session: a conversation whose memory stays between its turns. What is sent is read; what was read is not read again.

With `shift`, a conversation may outgrow the context. A turn then begins without the oldest part: in a chat without its
oldest turns, else without as many tokens behind the first `num_keep` as shifts would have forgotten by now. What is
sent is never cut.

Always true:
  * a turn's answer is that of a fresh engine to the turn's prompt, which follows from `tokens` or `messages` alone:
    memory may hold any prefix of it, or nothing, and it only costs time;
  * a session has at most one request under way.

That is why what a shift moved is not gone on from in the next turn: its K/V encode what was forgotten, and could not be
made again once memory was needed for others. Half a context is forgotten at once, so it is read again once in so long.
"""

import threading
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from kvcellar.engine import intake
from kvcellar.engine.manager import common_prefix
from kvcellar.engine.request import forgettable
from kvcellar.engine.result import Collector, Result, Ticket
from kvcellar.engine.stats import ModelCard
from kvcellar.errors import BadRequest, shown
from kvcellar.events import Delta
from kvcellar.sample.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from kvcellar.engine.loop import Loop


class Host(Protocol):
    """What a session calls on its engine."""

    model: ModelCard

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]: ...
    def render(self, messages: Sequence[Mapping[str, Any]], *, limit: int | None = None) -> list[int]: ...
    def params(self, **sampling: Unpack[SamplingOptions]) -> SamplingParams: ...
    def start(
        self, ids: Sequence[int], params: SamplingParams, session: int, checkpoint_positions: Sequence[int]
    ) -> tuple[Collector, Ticket]: ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """A turn that begins: its prompt, and the text that it is of."""

    prompt: list[int]
    text: list[int]
    params: SamplingParams
    messages: Sequence[dict[str, Any]] = ()
    forgotten: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a turn read, and what there was before it: the first `common` tokens of now, then `rest`."""

    prompt: int
    common: int
    rest: tuple[int, ...]
    messages: int
    forgotten: int


class Session:
    """Made by `Engine.session`. In a chat, texts that are sent are the user's messages; else they are just text."""

    def __init__(self, engine: Host, loop: "Loop", numbers: Iterator[int], *, chat: bool) -> None:
        """`numbers`: of the sessions to come, this one the next."""
        self._engine, self._loop, self._numbers, self._chat = engine, loop, numbers, chat
        self._number = next(numbers)
        self._busy = threading.Lock()
        self._closed = False
        loop.open_session(self._number)
        self.tokens: list[int] = []  # all of the text; of a chat, the last turn's prompt and answer
        self.messages: list[dict[str, Any]] = []  # of a chat, all of them
        self.last: Result | None = None  # of the last turn that came to its end
        self._forgotten = 0  # messages at the beginning that turns begin without
        self._turns: list[_Turn] = []

    def send(self, text: str | Sequence[int], **sampling: Unpack[SamplingOptions]) -> Result:
        """Add a turn and wait for the answer. If it fails, the session is as it was before."""
        with closing(self._turn(text, sampling)) as turn:
            collector = next(turn)
            assert isinstance(collector, Collector)
            for _ in turn:
                pass
            return collector.collected()

    def stream(self, text: str | Sequence[int], **sampling: Unpack[SamplingOptions]) -> Generator[Delta]:
        """The same, piece by piece. Leaving early cancels, and forgets the turn."""
        with closing(self._turn(text, sampling)) as turn:
            next(turn)
            for piece in turn:
                assert isinstance(piece, Delta)
                yield piece

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self) -> "Session":
        """A second conversation that goes on from here, sharing this one's memory."""
        with self._alone():
            twin = Session(self._engine, self._loop, self._numbers, chat=self._chat)
            twin.tokens, twin.messages, twin._turns = list(self.tokens), list(self.messages), list(self._turns)
            twin._forgotten = self._forgotten
            number, other = self._number, twin._number
            fork = self._loop.manager.fork_session
            self._loop.ask(lambda: fork(number, other), changes="forking the session")
            return twin

    def rewind(self, turns: int = 1) -> None:
        """Forget the last `turns` turns. What they left in memory is cut when the next turn is sent."""
        with self._alone():
            plain = int.__int__(turns) if isinstance(turns, int) and not isinstance(turns, bool) else -1
            if not 0 <= plain <= len(self._turns):
                raise BadRequest(f"{shown(turns)} turns cannot be forgotten; there are {len(self._turns)}", "turns")
            for _ in range(plain):
                turn = self._turns.pop()
                self.tokens[turn.common :] = turn.rest
                del self.messages[turn.messages :]
                self._forgotten = turn.forgotten

    def close(self) -> None:
        """Give back what the session holds in memory. A turn that is under way is cancelled. May be called again."""
        self._closed = True
        self._loop.end_session(self._number)

    # -- inside -------------------------------------------------------------------------------------------------

    def _turn(self, text: str | Sequence[int], sampling: SamplingOptions) -> Generator[Collector | Delta]:
        """First the collector, then the pieces; the turn counts only once it has come to its end."""
        with self._alone():
            params = self._engine.params(**sampling)
            if params.n != 1:
                raise BadRequest(f"n is {params.n}; a turn of a session has one answer. Fork the session instead.", "n")
            asked = self._chatted(text, params) if self._chat else self._continued(text, params)
            checkpoint_positions = self._checkpoint_positions(asked.prompt)
            collector, ticket = self._engine.start(asked.prompt, asked.params, self._number, checkpoint_positions)
            try:
                yield collector
                yield from collector.pieces()
            finally:
                ticket.cancel()
            self._conclude(asked, collector.collected())

    def _checkpoint_positions(self, prompt: list[int]) -> list[int]:
        """Where in `prompt` turns began, and their answers: who rewinds goes on from there. As far as it is the text
        that they were of; only time is lost where it is not."""
        same = common_prefix(self.tokens, prompt)
        checkpoint_positions = {same}
        for turn in reversed(self._turns):
            checkpoint_positions.update(place for place in (turn.prompt - 1, turn.common) if place <= same)
            same = min(same, turn.common)
        return sorted(checkpoint_positions - {0})

    def _conclude(self, asked: _Asked, answer: Result) -> None:
        tokens = [*asked.text, *self._told(answer)]
        common = common_prefix(self.tokens, tokens)
        rest = tuple(self.tokens[common:])
        self._turns.append(_Turn(len(asked.prompt), common, rest, len(self.messages), self._forgotten))
        self.tokens, self.last, self._forgotten = tokens, answer, asked.forgotten
        if asked.messages:
            self.messages = [*asked.messages, {"role": "assistant", "content": answer.text}]

    def _told(self, answer: Result) -> Sequence[int]:
        """The tokens of an answer as it was told. Those that made up a stop string go beyond its text."""
        if answer.choices[0].stop_string is None:
            return answer.token_ids
        return self._engine.encode(answer.text, special=False) if answer.text else []

    def _continued(self, text: str | Sequence[int], params: SamplingParams) -> _Asked:
        """All tokens with those of `text`. `num_keep` -1 keeps the prompt of the first turn."""
        if isinstance(text, str):
            special = False if self.tokens else None  # what opens a text opens it once
            new = self._engine.encode(text, special=special, limit=self._engine.model.context)
        elif self.tokens and isinstance(text, Sequence) and not len(text):
            new = []  # the answer before goes on
        else:
            model = self._engine.model
            new = intake.prompt_ids(text, vocab_size=model.vocab_size, context=model.context)
        if params.num_keep < 0 and self._turns:
            params = replace(params, num_keep=self._turns[0].prompt)
        whole = [*self.tokens, *new]
        return _Asked(self._cut(whole, len(new), params) if params.shift else whole, whole, params)

    def _cut(self, whole: list[int], new: int, params: SamplingParams) -> list[int]:
        """`whole` as it is after the shifts that bring it within the context; its last `new` tokens all stay."""
        context, old = self._engine.model.context, len(whole) - new
        if len(whole) <= context or not old:  # a first turn may keep all of its prompt, and has nothing else
            return whole
        span = forgettable(context, params.num_keep)
        if old <= span.start:
            return whole
        shifts = -(-(len(whole) - context) // len(span))
        return whole[: span.start] + whole[min(span.start + shifts * len(span), old) :]

    def _chatted(self, text: str | Sequence[int], params: SamplingParams) -> _Asked:
        """The conversation with one more message. If it must forget, whole turns go, until half the context is free."""
        if not isinstance(text, str):
            raise BadRequest("the turns of a chat are texts; open a session with chat=False for token ids", "prompt")
        messages = [*self.messages, {"role": "user", "content": text}]
        forgotten = self._forgotten
        prompt = self._engine.render(messages[forgotten:], limit=None if params.shift else self._engine.model.context)
        if params.shift and len(prompt) > self._engine.model.context:
            starts = range(forgotten + 2, len(messages), 2)  # a user's message is followed by its answer
            half = self._engine.model.context // 2
            at = bisect_left(starts, True, key=lambda start: len(self._engine.render(messages[start:])) <= half)
            forgotten = starts[at] if at < len(starts) else len(messages) - 1
            prompt = self._engine.render(messages[forgotten:])
        return _Asked(prompt, prompt, params, messages, forgotten)

    def _alone(self) -> "_Alone":
        if self._closed:
            raise BadRequest("the session is closed")
        return _Alone(self)


class _Alone:
    """Holds a session's lock, or says that it is busy."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        if not self._session._busy.acquire(blocking=False):
            raise BadRequest("the session is busy with another request; wait for it, or fork the session")

    def __exit__(self, *_: object) -> None:
        self._session._busy.release()
