"""session: a conversation whose K/V stay in memory between turns. A turn is a message or text, and its completion.

With `shift`, a conversation may outgrow the context. The prompt of a turn then omits the oldest part: in a chat the
oldest turns, else as many tokens after the first `num_keep` as context shifts would have dropped. The new message or
text is never truncated.

Always true:
  * a turn's completion equals that of a fresh engine for the turn's prompt, which depends on `tokens` or `messages`
    alone: memory may contain any prefix of the prompt, or nothing, which changes only the time;
  * a session has at most one request that is not done.

Therefore K/V that a context shift moved are not used in the next turn: they encode dropped tokens, and could not be
computed again after an eviction. A shift drops half of the context, so this costs one prefill per half a context.
"""

import threading
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from kvcellar.engine import intake
from kvcellar.engine.request import shift_span
from kvcellar.engine.result import Collector, Result, Ticket
from kvcellar.engine.stats import ModelCard
from kvcellar.errors import BadRequest, shown
from kvcellar.events import Delta
from kvcellar.prefix.node import common_prefix
from kvcellar.sample.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from kvcellar.engine.loop import Loop


class Host(Protocol):
    """The methods of the engine that a session calls."""

    model: ModelCard

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]: ...
    def render(self, messages: Sequence[Mapping[str, Any]], *, limit: int | None = None) -> list[int]: ...
    def params(self, **sampling: Unpack[SamplingOptions]) -> SamplingParams: ...
    def start(
        self, ids: Sequence[int], params: SamplingParams, session: int, checkpoint_positions: Sequence[int]
    ) -> tuple[Collector, Ticket]: ...


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a new turn, the whole text before context shifts, and the new `messages` and `omitted`."""

    ids: list[int]
    text: list[int]
    params: SamplingParams
    messages: Sequence[dict[str, Any]] = ()
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn: the length of its prompt, and the state to restore in `rewind`. The tokens before the turn were the first
    `common` tokens of the session, followed by `rest`."""

    prompt: int
    common: int
    rest: tuple[int, ...]
    messages: int
    omitted: int


class Session:
    """Created by `Engine.session`. In a chat, `send` takes user messages; otherwise it takes text to continue."""

    def __init__(self, engine: Host, loop: "Loop", numbers: Iterator[int], *, chat: bool) -> None:
        """`numbers`: session numbers; takes the next one."""
        self._engine, self._loop, self._numbers, self._chat = engine, loop, numbers, chat
        self._number = next(numbers)
        self._busy = threading.Lock()
        self._closed = False
        self.tokens: list[int] = []  # the whole text; in a chat, the last turn's prompt and completion
        self.messages: list[dict[str, Any]] = []  # all messages of a chat
        self.last: Result | None = None  # of the last complete turn
        self._omitted = 0  # messages at the beginning that prompts omit
        self._turns: list[_Turn] = []

    def send(self, text: str | Sequence[int], **sampling: Unpack[SamplingOptions]) -> Result:
        """Add a turn and wait for the completion. If that raises, the session is unchanged."""
        with closing(self._turn(text, sampling)) as turn:
            collector = next(turn)
            assert isinstance(collector, Collector)
            for _ in turn:
                pass
            return collector.collected()

    def stream(self, text: str | Sequence[int], **sampling: Unpack[SamplingOptions]) -> Generator[Delta]:
        """Like `send`, but yields `Delta`s. Leaving the iteration early cancels and discards the turn."""
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
        """A second session that continues from here. What both have in common is in memory once."""
        with self._alone():
            fork = Session(self._engine, self._loop, self._numbers, chat=self._chat)
            fork.tokens, fork.messages, fork._turns = list(self.tokens), list(self.messages), list(self._turns)
            fork._omitted = self._omitted
            return fork

    def rewind(self, turns: int = 1) -> None:
        """Discard the last `turns` turns."""
        with self._alone():
            plain = int.__int__(turns) if isinstance(turns, int) and not isinstance(turns, bool) else -1
            if not 0 <= plain <= len(self._turns):
                raise BadRequest(f"{shown(turns)} turns cannot be discarded; there are {len(self._turns)}", "turns")
            for _ in range(plain):
                turn = self._turns.pop()
                self.tokens[turn.common :] = turn.rest
                del self.messages[turn.messages :]
                self._omitted = turn.omitted

    def close(self) -> None:
        """End the session. A running turn is cancelled. Idempotent."""
        self._closed = True
        self._loop.end_session(self._number)

    # -- inside -------------------------------------------------------------------------------------------------

    def _turn(self, text: str | Sequence[int], sampling: SamplingOptions) -> Generator[Collector | Delta]:
        """Yields the collector, then the deltas. The turn is added to the session only at its end."""
        with self._alone():
            params = self._engine.params(**sampling)
            if params.n != 1:
                raise BadRequest(f"n is {params.n}; a turn of a session has one answer. Fork the session instead.", "n")
            prompt = self._chatted(text, params) if self._chat else self._continued(text, params)
            positions = self._checkpoint_positions(prompt.ids)
            collector, ticket = self._engine.start(prompt.ids, prompt.params, self._number, positions)
            try:
                yield collector
                yield from collector.deltas()
            finally:
                ticket.cancel()
            self._conclude(prompt, collector.collected())

    def _checkpoint_positions(self, prompt: list[int]) -> list[int]:
        """Positions in `prompt` where turns and their completions begin, from which a rewound session resumes. Only
        positions in the prefix that `prompt` shares with these turns."""
        same = common_prefix(self.tokens, prompt)
        positions = {same}
        for turn in reversed(self._turns):
            positions.update(pos for pos in (turn.prompt - 1, turn.common) if pos <= same)
            same = min(same, turn.common)
        return sorted(positions - {0})

    def _conclude(self, prompt: _Prompt, answer: Result) -> None:
        tokens = [*prompt.text, *self._text_tokens(answer)]
        common = common_prefix(self.tokens, tokens)
        rest = tuple(self.tokens[common:])
        self._turns.append(_Turn(len(prompt.ids), common, rest, len(self.messages), self._omitted))
        self.tokens, self.last, self._omitted = tokens, answer, prompt.omitted
        if prompt.messages:
            self.messages = [*prompt.messages, {"role": "assistant", "content": answer.text}]

    def _text_tokens(self, answer: Result) -> Sequence[int]:
        """The tokens of a completion's text. After a stop string, `token_ids` are longer, so the text is tokenized."""
        if answer.choices[0].stop_string is None:
            return answer.token_ids
        return self._engine.encode(answer.text, special=False) if answer.text else []

    def _continued(self, text: str | Sequence[int], params: SamplingParams) -> _Prompt:
        """All tokens so far and those of `text`. `num_keep` -1 keeps the prompt of the first turn."""
        if isinstance(text, str):
            special = False if self.tokens else None  # begin-of-text only at the beginning
            new = self._engine.encode(text, special=special, limit=self._engine.model.context)
        elif self.tokens and isinstance(text, Sequence) and not len(text):
            new = []  # continue the last completion
        else:
            model = self._engine.model
            new = intake.prompt_ids(text, vocab_size=model.vocab_size, context=model.context)
        if params.num_keep < 0 and self._turns:
            params = replace(params, num_keep=self._turns[0].prompt)
        whole = [*self.tokens, *new]
        return _Prompt(self._cut(whole, len(new), params) if params.shift else whole, whole, params)

    def _cut(self, whole: list[int], new: int, params: SamplingParams) -> list[int]:
        """`whole` after the context shifts that make it fit the context, all of which keep its last `new` tokens."""
        context, old = self._engine.model.context, len(whole) - new
        if len(whole) <= context or not old:  # in a first turn, nothing can be dropped
            return whole
        span = shift_span(context, params.num_keep)
        if old <= span.start:
            return whole
        shifts = -(-(len(whole) - context) // len(span))
        return whole[: span.start] + whole[min(span.start + shifts * len(span), old) :]

    def _chatted(self, text: str | Sequence[int], params: SamplingParams) -> _Prompt:
        """The conversation with one more message. If it is too long, whole turns are omitted until half of the context
        is free."""
        if not isinstance(text, str):
            raise BadRequest("the turns of a chat are texts; open a session with chat=False for token ids", "prompt")
        messages = [*self.messages, {"role": "user", "content": text}]
        omitted = self._omitted
        prompt = self._engine.render(messages[omitted:], limit=None if params.shift else self._engine.model.context)
        if params.shift and len(prompt) > self._engine.model.context:
            starts = range(omitted + 2, len(messages), 2)  # user and assistant messages alternate
            half = self._engine.model.context // 2
            at = bisect_left(starts, True, key=lambda start: len(self._engine.render(messages[start:])) <= half)
            omitted = starts[at] if at < len(starts) else len(messages) - 1
            prompt = self._engine.render(messages[omitted:])
        return _Prompt(prompt, prompt, params, messages, omitted)

    def _alone(self) -> "_Alone":
        if self._closed:
            raise BadRequest("the session is closed")
        return _Alone(self)


class _Alone:
    """Acquires a session's lock, and releases it at exit. Raises `BadRequest` if it is already held."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        if not self._session._busy.acquire(blocking=False):
            raise BadRequest("the session is busy with another request; wait for it, or fork the session")

    def __exit__(self, *_: object) -> None:
        self._session._busy.release()
