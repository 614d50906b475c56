"""session: a conversation whose K/V stay in memory between turns. A turn is a message or text, and its completion.

With `shift`, a conversation may outgrow the context (see `transcript`).

Always true:
  * a turn's completion equals that of a fresh engine for the turn's prompt, which depends on `tokens` or `messages`
    alone: memory may contain any prefix of the prompt, or nothing, which changes only the time;
  * a session has at most one request that is not done.

Therefore K/V that a context shift moved are not used in the next turn: they encode dropped tokens, and could not be
computed again after an eviction. A shift drops half of the context, so this costs one prefill per half a context.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Unpack

from kvcellar.engine.arguments import prompt_ids
from kvcellar.engine.request_options import SubmitOptions
from kvcellar.errors import BadRequest
from kvcellar.events import Delta
from kvcellar.frontend.chat_images import portable
from kvcellar.frontend.conversations import Conversations
from kvcellar.frontend.request_builder import RequestBuilder
from kvcellar.frontend.result import Collector, Result, Ticket
from kvcellar.frontend.transcript import Prompt, Transcript
from kvcellar.memory.retention import RetentionOptions
from kvcellar.sampling_params import SamplingOptions, SamplingParams


class Session:
    """Created by `Engine.session`. In a chat, `send` takes user messages; otherwise it takes text to continue."""

    def __init__(
        self,
        requests: RequestBuilder,
        conversations: Conversations,
        transcript: Transcript,
        retention: RetentionOptions,
    ) -> None:
        """The session changes `transcript`. `retention`: of turns."""
        self._requests, self._client, self._codec = requests, requests.client, requests.codec
        self._conversations, self._transcript, self._retention = conversations, transcript, retention
        self._ticket: Ticket | None = None  # of the running turn
        self._busy = threading.Lock()
        self._closed = False
        self.last: Result | None = None  # of the last complete turn

    @property
    def chat(self) -> bool:
        return self._transcript.chat

    @property
    def tokens(self) -> list[int]:
        """The whole text; in a chat, the last turn's prompt and completion."""
        return self._transcript.tokens

    @property
    def turns(self) -> int:
        """How many turns can be rewound."""
        return self._transcript.turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages of a chat."""
        return self._transcript.messages

    def send(self, text: str | Sequence[Any], **sampling: Unpack[SamplingOptions]) -> Result:
        """Add a turn and wait for the completion. If that raises, the session is unchanged. In a chat, a list has texts
        and images, as the content of a message."""
        with closing(self._turn(text, sampling)) as turn:
            collector = next(turn)
            assert isinstance(collector, Collector)
            for _ in turn:
                pass
            return collector.collected()

    def stream(self, text: str | Sequence[Any], **sampling: Unpack[SamplingOptions]) -> Generator[Delta]:
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
        """A second session that continues from here, with the same retention. What both have in common is in memory
        once."""
        with self._alone():
            return Session(self._requests, self._conversations, self._transcript.copy(), self._retention)

    def rewind(self, turns: int = 1) -> None:
        """Discard the last `turns` turns."""
        with self._alone():
            self._transcript.rewind(turns)

    def save(self, name: str, *, new: bool = False) -> None:
        """Keep the conversation as it is now under a name, in place of what had that name, or with `new` only if there
        is nothing. `Engine.load` continues it, also in a later process where the engine has a store. Raises what
        `Conversations.save` and `create` raise."""
        with self._alone():
            keep = self._conversations.create if new else self._conversations.save
            keep(name, self._transcript)

    def stop(self) -> bool:
        """End the running turn with what of its answer has come: it is added to the session. From any thread. False:
        there is none."""
        if (ticket := self._ticket) is not None:
            ticket.cancel()
        return ticket is not None

    def close(self) -> None:
        """End the session. A running turn is cancelled. Idempotent."""
        self._closed = True
        self.stop()

    # -- inside -------------------------------------------------------------------------------------------------

    def _turn(self, text: str | Sequence[Any], sampling: SamplingOptions) -> Generator[Collector | Delta]:
        """Yields the collector, then the deltas. The turn is added to the session only at its end."""
        with self._alone():
            params = self._requests.params(sampling)
            if params.n != 1:
                raise BadRequest(f"n is {params.n}; a turn of a session has one answer. Fork the session instead.", "n")
            prompt = self._prompt(text, params)
            positions = self._transcript.checkpoint_positions(prompt.ids)
            how = SubmitOptions(retention=self._retention, adapter=self._transcript.adapter)
            how["checkpoint_positions"] = positions
            collector, ticket = self._requests.start(prompt.ids, prompt.params, how)
            self._ticket = ticket
            try:
                yield collector
                yield from collector.deltas()
            finally:
                ticket.cancel()
                self._ticket = None
            answer = collector.collected()
            message = {"role": "assistant", "content": answer.text}
            self._transcript.conclude(prompt, self._text_tokens(answer), message)
            self.last = answer

    def _prompt(self, text: str | Sequence[Any], params: SamplingParams) -> Prompt:
        context = self._client.card.model.context
        if not self._transcript.chat:
            return self._transcript.continued(self._new(text), params, context, self._codec.encode)
        if not isinstance(text, str | list | tuple) or any(isinstance(part, int) for part in text):
            raise BadRequest("the turns of a chat are texts; open a session with chat=False for token ids", "prompt")
        message = {"role": "user", "content": portable(text)}
        return self._transcript.chatted([message], params, context, self._codec.render)

    def _new(self, text: str | Sequence[int]) -> str | Sequence[int]:
        if isinstance(text, str) or (self.tokens and isinstance(text, Sequence) and not len(text)):
            return text  # without tokens: the last completion is continued
        model = self._client.card.model
        return prompt_ids(text, vocab_size=model.vocab_size, context=model.context)

    def _text_tokens(self, answer: Result) -> Sequence[int]:
        """The tokens of a completion's text. After a stop string, `token_ids` are longer, so the text is tokenized."""
        if answer.choices[0].stop_string is None:
            return answer.token_ids
        return self._codec.encode(answer.text, special=False) if answer.text else []

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Raises `BadRequest` if the session is closed, or another call is inside."""
        if self._closed:
            raise BadRequest("the session is closed")
        if not self._busy.acquire(blocking=False):
            raise BadRequest("the session is busy with another request; wait for it, or fork the session")
        try:
            yield
        finally:
            self._busy.release()
