"""session: a conversation whose memory stays between its turns. What is sent is read; what was read is not read again.

Always true:
  * `tokens` are all tokens of the conversation; memory may hold any prefix of them, or nothing, and it only costs time;
  * a session has at most one request under way.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from kvcellar.engine.result import Collector, Result
from kvcellar.errors import BadRequest
from kvcellar.events import Piece

if TYPE_CHECKING:
    from kvcellar.engine.engine import Engine


class Session:
    """Made by `Engine.session`. In a chat, texts that are sent are the user's messages; else they are just text."""

    def __init__(self, engine: "Engine", number: int, *, chat: bool) -> None:
        self._engine, self._number, self._chat = engine, number, chat
        self._busy = threading.Lock()
        self._closed = False
        engine._loop.open_session(number)
        self.tokens: list[int] = []
        self.messages: list[dict[str, Any]] = []  # of a chat
        self.last: Result | None = None  # of the last turn that came to its end
        self._turns: list[tuple[int, int]] = []  # (tokens, messages) at the end of each turn

    def send(self, text: str | Sequence[int], **sampling: Any) -> Result:
        """Add a turn and wait for the answer. If it fails, the session is as it was before."""
        with closing(self._turn(text, sampling)) as turn:
            collector = next(turn)
            assert isinstance(collector, Collector)
            for _ in turn:
                pass
            return collector.collected()

    def stream(self, text: str | Sequence[int], **sampling: Any) -> Generator[Piece]:
        """The same, piece by piece. Leaving early cancels, and forgets the turn."""
        with closing(self._turn(text, sampling)) as turn:
            next(turn)
            for piece in turn:
                assert isinstance(piece, Piece)
                yield piece

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self) -> "Session":
        """A second conversation that goes on from here, sharing this one's memory."""
        with self._alone():
            twin = self._engine.session(chat=self._chat)
            twin.tokens, twin.messages, twin._turns = list(self.tokens), list(self.messages), list(self._turns)
            number, other = self._number, twin._number
            self._engine._loop.ask(lambda: self._engine._loop.cellar.fork_session(number, other))
            return twin

    def rewind(self, turns: int = 1) -> None:
        """Forget the last `turns` turns. What they left in memory is cut when the next turn is sent."""
        with self._alone():
            if not isinstance(turns, int) or isinstance(turns, bool) or not 0 <= turns <= len(self._turns):
                raise BadRequest(f"{turns!r} turns cannot be forgotten; there are {len(self._turns)}", "turns")
            del self._turns[len(self._turns) - turns :]
            tokens, messages = self._turns[-1] if self._turns else (0, 0)
            del self.tokens[tokens:], self.messages[messages:]

    def close(self) -> None:
        """Give back what the session holds in memory. A turn that is under way is cancelled. May be called again."""
        self._closed = True
        self._engine._loop.end_session(self._number)

    # -- inside -------------------------------------------------------------------------------------------------

    def _turn(self, text: str | Sequence[int], sampling: dict[str, Any]) -> Generator[Collector | Piece]:
        """First the collector, then the pieces; the turn counts only once it has come to its end."""
        with self._alone():
            params = self._engine.params(**sampling)
            if params.n != 1:
                raise BadRequest(f"n is {params.n}; a turn of a session has one answer. Fork the session instead.", "n")
            prompt, messages = self._prompt(text)
            collector, ticket = self._engine.start(prompt, params, session=self._number)
            try:
                yield collector
                yield from collector.pieces()
            finally:
                ticket.cancel()
            answer = collector.collected()
            self.tokens = [*prompt, *self._told(answer)]
            self.messages = [*messages, {"role": "assistant", "content": answer.text}] if messages else []
            self.last = answer
            self._turns.append((len(self.tokens), len(self.messages)))

    def _told(self, answer: Result) -> Sequence[int]:
        """The tokens of an answer as it was told. Those that made up a stop string go beyond its text."""
        if answer.choices[0].stop_string is None:
            return answer.token_ids
        return self._engine.encode(answer.text, special=False) if answer.text else []

    def _prompt(self, text: str | Sequence[int]) -> tuple[list[int], list[dict[str, Any]]]:
        """The tokens of the conversation with `text` added, and its messages if it is one by template."""
        if self._chat:
            if not isinstance(text, str):
                raise BadRequest(
                    "the turns of a chat are texts; open a session with chat=False for token ids", "prompt"
                )
            messages = [*self.messages, {"role": "user", "content": text}]
            return self._engine.render(messages), messages
        if not isinstance(text, str):
            return [*self.tokens, *self._engine._ids(text)], []
        ids = self._engine.encode(text, special=False if self.tokens else None)  # what opens a text opens it once
        return [*self.tokens, *ids], []

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
