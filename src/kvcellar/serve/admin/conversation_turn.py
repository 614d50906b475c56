"""conversation_turn: the turn that a request adds to a named conversation.

Always true:
  * from `begin_chat` or `begin_text` until the request has ended, the conversation is held, unless they raise;
  * the turn is added by `save` alone, so a request that fails, or whose client leaves before its end, changes nothing.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from kvcellar.errors import EngineClosed
from kvcellar.frontend.conversations import Held
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.transcript import Prompt, Render
from kvcellar.sampling_params import SamplingParams
from kvcellar.serve.generation.replies import ReplyPart, WholeReply
from kvcellar.serve.http.api_errors import invalid


class ConversationTurn(AbstractContextManager["ConversationTurn"]):
    """A context manager on the event loop, which leaves the conversation as it is without `save`. `begin_chat`,
    `begin_text` and `save` are called in a thread; the request may end meanwhile, and then they release the
    conversation."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._engine: Engine | None = None
        self._held: Held | None = None
        self._prompt: Prompt | None = None
        self._reply = WholeReply()
        self._tokens: list[int] = []
        self._stopped = False  # by a stop string, which is not in the text, but in the tokens
        self._stack = ExitStack()
        self._lock = threading.Lock()  # orders the end of the request and the thread
        self._working = self._ended = False

    @property
    def name(self) -> str | None:
        """Of the conversation that the request continues."""
        return self._held.info.name if self._held is not None else None

    @property
    def begun(self) -> bool:
        return self._prompt is not None

    def begin_chat(
        self,
        engine: Engine,
        name: str,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        render: Render,
    ) -> Prompt:
        """The prompt that continues a chat with more messages. Raises what `Conversations.hold` and `render` raise."""
        with self._work():
            transcript = self._hold(engine, name, params, chat=True).transcript
            self._prompt = transcript.chatted(messages, params, engine.model.context, render)
            return self._prompt

    def begin_text(self, engine: Engine, name: str, text: str | list[int], params: SamplingParams) -> Prompt:
        """The prompt that continues a text. Raises what `Conversations.hold` and `Engine.encode` raise."""
        with self._work():
            transcript, context = self._hold(engine, name, params, chat=False).transcript, engine.model.context
            self._prompt = transcript.continued(text, params, context, engine.encode)
            return self._prompt

    def _hold(self, engine: Engine, name: str, params: SamplingParams, *, chat: bool) -> Held:
        if params.n != 1:
            raise invalid("n", f"n is {params.n}; a turn of a conversation has one completion. Fork the conversation")
        self._engine = engine
        self._held = held = self._stack.enter_context(engine.conversations.hold(name, owner=self._owner))
        if held.transcript.chat != chat:
            what, route = ("text", "/v1/completions") if chat else ("chat", "/v1/chat/completions")
            raise invalid("conversation", f"the conversation {name} is a {what}; continue it with {route}")
        return held

    def add(self, part: ReplyPart) -> None:
        """Collect the completion as it arrives."""
        if not self.begun:
            return
        self._reply.add(part.pieces)
        if part.delta is not None:
            self._tokens += part.delta.token_ids
        if part.end is not None:
            self._stopped = part.end.stop_string is not None

    def save(self) -> None:
        """Add the turn, whose completion is whole, to the conversation. Raises what `Held.save` raises."""
        with self._work():
            assert self._engine and self._held and self._prompt is not None, "no turn was begun"
            text, tokens = self._reply.content, self._tokens
            if self._stopped:
                tokens = self._engine.encode(text, special=False) if text else []
            self._held.transcript.conclude(self._prompt, tokens, self._reply.message())
            self._held.save()

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Around what a thread does. Raises `EngineClosed` if the request has ended."""
        with self._lock:
            if self._ended:
                raise EngineClosed("the request has ended")
            self._working = True
        try:
            yield
        finally:
            with self._lock:
                self._working = False
                if self._ended:
                    self._stack.close()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            if not self._working:
                self._stack.close()
