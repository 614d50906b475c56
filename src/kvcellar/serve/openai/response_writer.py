"""response_writer: writes the responses to chats and text completions. A `ResponseFormat` has what differs.

What clients rely on: only the first chunk of a choice has the role; its `finish_reason` comes before the chunk with the
usage, whose `choices` are empty; `prompt_tokens_details.cached_tokens` is always present, 0 if nothing was cached; a
stream ends with `data: [DONE]` if and only if it succeeded. An error in a stream is one more `data:` line,
`{"error": ...}`.

Beyond OpenAI's fields, a choice has `stop_reason` (the stop string that ended it, as in vLLM) and, on request,
`token_ids`, as each of its chunks has; `prompt_token_ids` are told with the prompt's first choice, or its first chunk.
A response has `timings`, with the names of llama.cpp. Where drafts were used, the usage has OpenAI's counts of them,
and the timings those of llama.cpp and a record of our own.
"""

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from kvcellar.events import Delta
from kvcellar.frontend.served_engine import ServedEngine
from kvcellar.serve.generation.recalls import recall_fields
from kvcellar.serve.generation.replies import Replies, Reply, ReplyPart, WholeReply
from kvcellar.serve.generation.writer import SSE, SSE_PING, data_event
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.openai.echo import Echo, join, prompt_logprobs
from kvcellar.serve.openai.fields import ResponseOptions
from kvcellar.serve.openai.formats import (
    ChatChunk,
    ChatCompletion,
    ChatFormat,
    TextChoice,
    TextChunk,
    TextChunkChoice,
    TextCompletion,
    TextFormat,
)
from kvcellar.serve.openai.logprobs import Tokens, TokenText
from kvcellar.serve.openai.usage import Usage, timings, usage, usage_so_far

DONE = b"data: [DONE]\n\n"


class ResponseWriter:
    """A `Writer`."""

    media_type = SSE

    def __init__(
        self,
        engine: ServedEngine,
        wanted: ResponseOptions,
        form: ChatFormat | TextFormat,
        replies: Replies,
        *,
        echo: Echo | None = None,
    ) -> None:
        """`echo`: the prompts, if they are in front of the completions."""
        self._engine, self._wanted, self._format, self._replies = engine, wanted, form, replies
        self._echo, self._opened = echo, set[int]()
        self._text = TokenText(engine, wanted.tokens_as_ids)
        self._wholes = [WholeReply() for _ in replies.replies]
        self._tokens = [Tokens(self._text, self._before(reply)) for reply in replies.replies]
        self._of_each_token = (  # whether a chunk has more than the text of its part
            echo is not None
            or replies.prepared.params.logprobs is not None
            or wanted.token_ids
            or (wanted.include_usage and wanted.continuous_usage)
        )
        self.id = form.id_prefix + uuid4().hex
        created = int(time.time())
        self._head: dict[str, Any] = {"id": self.id, "created": created, "model": wanted.model}

    def _before(self, reply: Reply) -> str:
        """The text in front of a choice."""
        return "" if self._echo is None else self._echo.text(self._replies.prompt_of(reply))

    # -- one response -------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        self._wholes[part.reply.index].add(part.pieces)
        if part.delta is not None:
            self._tokens[part.reply.index].add(part.delta)

    def response(self) -> ChatCompletion | TextCompletion:
        choices, form = [*map(self._choice, self._replies.replies)], self._format
        response = form.response(choices=choices, usage=self._usage(), timings=timings(self._replies), **self._head)
        if isinstance(response, ChatCompletion):
            self._tell_prompt(response, self._replies.replies[0])
        return response

    def _tell_prompt(self, into: ChatCompletion | TextChoice, reply: Reply) -> None:
        """What vLLM tells of a prompt."""
        self._tell_prompt_ids(into, reply)
        if (most := self._wanted.prompt_logprobs) is not None:
            scored = self._replies.scored[self._replies.prompt_of(reply)]
            into.prompt_logprobs = prompt_logprobs(scored, most, self._text)

    def _tell_prompt_ids(self, into: ChatCompletion | ChatChunk | TextChoice | TextChunkChoice, reply: Reply) -> None:
        if prompts := self._replies.prepared.prompts:
            into.prompt_token_ids = iter(prompts[self._replies.prompt_of(reply)])

    def _choice(self, reply: Reply) -> Any:
        tokens = self._tokens[reply.index]
        choice: Any = self._format.choice(self._wholes[reply.index], index=reply.index, **self._end(reply))
        if self._replies.prepared.params.logprobs is not None:
            choice.logprobs = self._format.logprobs(tokens.logprobs, tokens.offsets, self._text)
        if self._wanted.token_ids:
            choice.token_ids = iter(tokens.ids)
        if isinstance(choice, TextChoice):
            self._tell_prompt(choice, reply)
            if self._echo is not None:
                join(self._opening(reply, self._echo), choice)
        return choice

    def _opening(self, reply: Reply, echo: Echo) -> TextChunkChoice:
        """What is in front of a choice."""
        prompt, most = self._replies.prompt_of(reply), self._replies.prepared.params.logprobs
        return echo.opening(reply.index, prompt, self._replies.scored.get(prompt), most, self._text)

    # -- a stream -----------------------------------------------------------------------------------------------

    def first(self) -> Iterator[bytes]:
        for reply in self._replies.replies:
            if (choice := self._format.first(reply.index)) is not None:
                chunk = self._chunk(reply, choice)
                if reply.index == 0 and isinstance(chunk, ChatChunk):
                    self._tell_prompt_ids(chunk, reply)
                yield data_event(chunk)

    def chunk(self, part: ReplyPart) -> bytes:
        """No chunk for an empty text, unless it has logprobs or token ids, which are in the last chunk of a part."""
        reply = part.reply
        choices: list[Any] = self._format.deltas(part)
        if part.delta is not None and self._of_each_token:
            self._add_tokens(part.delta, choices, reply)
        if part.end is not None:
            end = self._format.empty(reply.index)
            end.finish_reason, end.stop_reason = reply.finish_reason, part.end.stop_string
            choices.append(end)
        if choices and isinstance(first := choices[0], TextChunkChoice) and reply.index not in self._opened:
            self._opened.add(reply.index)
            if self._echo is not None:
                first = self._opening(reply, self._echo)
                choices.insert(0, first)
            self._tell_prompt_ids(first, reply)
        return b"".join([data_event(self._chunk(reply, choice)) for choice in choices])

    def _add_tokens(self, delta: Delta, choices: list[Any], reply: Reply) -> None:
        """The log-probabilities and ids of the tokens of a delta."""
        tokens, ids = self._tokens[reply.index], self._wanted.token_ids and delta.token_ids
        tokens.add(delta)
        if (delta.logprobs or ids) and not choices:
            choices.append(self._format.empty(reply.index))
        if delta.logprobs:
            choices[-1].logprobs = self._format.logprobs(tokens.logprobs, tokens.offsets, self._text)
        if ids:
            choices[-1].token_ids = tokens.ids
        tokens.mark_sent()

    def last(self) -> bytes:
        if not self._wanted.include_usage:
            return DONE
        total = {"usage": self._usage(), "timings": timings(self._replies)}
        return data_event(self._format.chunk(choices=[], **total, **self._head)) + DONE

    def failed(self, error: ApiError) -> bytes:
        return data_event(error.body())

    def ping(self) -> bytes:
        return SSE_PING

    def _chunk(self, reply: Reply, choice: Any) -> ChatChunk | TextChunk:
        if self._wanted.token_ids and choice.token_ids is UNSET:
            choice.token_ids = []
        chunk = self._format.chunk(choices=[choice], **self._head)
        if self._wanted.include_usage:
            chunk.usage = usage_so_far(self._replies, reply) if self._wanted.continuous_usage else None
        return chunk

    # -- of both ------------------------------------------------------------------------------------------------

    def _end(self, reply: Reply) -> dict[str, Any]:
        assert reply.end is not None, "the choice has not ended"
        return {"finish_reason": reply.finish_reason, "stop_reason": reply.end.stop_string}

    def _usage(self) -> Usage:
        used = usage(self._replies)
        if self._wanted.recall:
            texts = self._wanted.recall_texts
            found = (one.recall for one in self._replies.done.values() if one.recall is not None)
            used.recall = [recall_fields(one, self._engine, texts=texts) for one in found]
        return used
