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
from collections.abc import Iterator, Sequence
from typing import Protocol
from uuid import uuid4

from msgspec.structs import replace

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.events import TokenLogprob
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.chat_request import Json
from kvcellar.serve.json_text import JsonTemplate
from kvcellar.serve.openai.echo import Echo, prompt_logprobs
from kvcellar.serve.openai.fields import ResponseOptions
from kvcellar.serve.openai.logprobs import Tokens, TokenText
from kvcellar.serve.openai.usage import timings, usage, usage_so_far
from kvcellar.serve.recalls import recall_fields
from kvcellar.serve.replies import Replies, Reply, ReplyPart, WholeReply
from kvcellar.serve.writer import SSE, SSE_PING, data_events
from kvcellar.text.pieces import Content, Reasoning

DONE = b"data: [DONE]\n\n"


class ResponseFormat(Protocol):
    """What differs between the two routes."""

    id_prefix: str
    object_type: str
    chunk_type: str
    prompts_in_choices: bool  # whether what is told of prompts is in each choice, or in the response

    def first_chunk(self) -> Json | None:
        """What the first chunk of a choice contains before any text, if there is such a chunk."""
        ...

    def deltas(self, part: ReplyPart) -> list[Json]:
        """What the chunks contain that the pieces of a part become."""
        ...

    def empty(self) -> Json:
        """What a chunk without a piece contains."""
        ...

    def message(self, reply: WholeReply) -> Json: ...
    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> Json:
        """Lists as long as the completion are iterators, which are encoded in chunks."""
        ...


class ResponseWriter:
    """A `Writer`."""

    media_type = SSE

    def __init__(
        self,
        engine: ServedEngine,
        wanted: ResponseOptions,
        form: ResponseFormat,
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
        self._templates: dict[tuple[int, type[Content | Reasoning]], JsonTemplate] = {}  # by choice and kind of piece
        self.id = form.id_prefix + uuid4().hex
        self._head: Json = {
            "id": self.id,
            "created": int(time.time()),
            "model": wanted.model,
            "system_fingerprint": None,
        }

    def _before(self, reply: Reply) -> str:
        """The text in front of a choice."""
        return "" if self._echo is None else self._echo.text(self._replies.prompt_of(reply))

    # -- one response -------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        self._wholes[part.reply.index].add(part.pieces)
        if part.delta is not None:
            self._tokens[part.reply.index].add(part.delta)

    def response(self) -> Json:
        choices = [self._whole(reply) for reply in self._replies.replies]
        whole = self._record(self._format.object_type, choices) | self._totals()
        return whole if self._format.prompts_in_choices else whole | self._of_prompt(self._replies.replies[0])

    def _of_prompt(self, reply: Reply) -> Json:
        """What vLLM tells of a prompt."""
        found, number, most = self._prompt_ids(reply), self._replies.prompt_of(reply), self._wanted.prompt_logprobs
        if most is not None:
            found["prompt_logprobs"] = prompt_logprobs(self._replies.scored[number], most, self._text)
        return found

    def _prompt_ids(self, reply: Reply) -> Json:
        prompts = self._replies.prepared.prompts
        return {"prompt_token_ids": iter(prompts[self._replies.prompt_of(reply)])} if prompts else {}

    def _whole(self, reply: Reply) -> Json:
        tokens = self._tokens[reply.index]
        fields: Json = {"index": reply.index, "logprobs": None} | self._format.message(self._wholes[reply.index])
        fields |= self._end(reply)
        if self._replies.prepared.params.logprobs is not None:
            fields["logprobs"] = self._format.logprobs(tokens.logprobs, tokens.offsets, self._text)
        if self._wanted.token_ids:
            fields["token_ids"] = iter(tokens.ids)
        if self._format.prompts_in_choices:
            fields |= self._of_prompt(reply)
        return fields if self._echo is None else self._echo.joined(self._opening(reply, self._echo), fields)

    def _opening(self, reply: Reply, echo: Echo) -> Json:
        """What is in front of a choice."""
        number = self._replies.prompt_of(reply)
        return echo.body(number, self._replies.scored.get(number), self._replies.prepared.params.logprobs, self._text)

    # -- a stream -----------------------------------------------------------------------------------------------

    def first(self) -> Iterator[bytes]:
        first = self._format.first_chunk()
        if first is not None:
            for reply in self._replies.replies:
                of_prompt = self._prompt_ids(reply) if reply.index == 0 else {}
                yield data_events([self._chunk(reply, first) | of_prompt])

    def chunk(self, part: ReplyPart) -> bytes:
        """No chunk for an empty text, unless it has logprobs or token ids, which are in the last chunk of a part."""
        if self._of_each_token or part.end is not None or len(part.pieces) > 1:
            return self._chunks(part)
        if not part.pieces:
            return b""
        piece = part.pieces[0]
        if not isinstance(piece, Content | Reasoning):
            return self._chunks(part)
        kind = type(piece)
        if (template := self._templates.get((part.reply.index, kind))) is None:
            template = JsonTemplate(lambda text: self._chunks(replace(part, pieces=[kind(text)])), "text")
            self._templates[part.reply.index, kind] = template
        return template.fill(text=piece.text)

    def _chunks(self, part: ReplyPart) -> bytes:
        reply, bodies = part.reply, self._format.deltas(part)
        if part.delta is not None and (more := self._of_tokens(part)):
            bodies = bodies or [self._format.empty()]
            bodies[-1] |= more
        if part.end is not None:
            bodies.append(self._format.empty() | self._end(reply))
        if reply.index not in self._opened and self._format.prompts_in_choices and bodies:
            self._opened.add(reply.index)
            if self._echo is not None:
                bodies.insert(0, self._opening(reply, self._echo))
            bodies[0] |= self._prompt_ids(reply)
        return data_events(self._chunk(reply, body) for body in bodies)

    def _of_tokens(self, part: ReplyPart) -> Json:
        """The log-probabilities and ids of the tokens of a part."""
        assert part.delta is not None
        tokens, body = self._tokens[part.reply.index], {}
        tokens.add(part.delta)
        if part.delta.logprobs:
            body["logprobs"] = self._format.logprobs(tokens.logprobs, tokens.offsets, self._text)
        if self._wanted.token_ids and part.delta.token_ids:
            body["token_ids"] = tokens.ids
        tokens.mark_sent()
        return body

    def last(self) -> bytes:
        if not self._wanted.include_usage:
            return DONE
        return data_events([self._record(self._format.chunk_type, []) | self._totals()]) + DONE

    def failed(self, error: ApiError) -> bytes:
        return data_events([error.body()])

    def ping(self) -> bytes:
        return SSE_PING

    def _chunk(self, reply: Reply, body: Json) -> Json:
        fields: Json = {"index": reply.index, "logprobs": None, "finish_reason": None}
        if self._wanted.token_ids:
            fields["token_ids"] = []
        fields |= body
        chunk = self._record(self._format.chunk_type, [fields])
        if self._wanted.include_usage:
            chunk["usage"] = usage_so_far(self._replies, reply) if self._wanted.continuous_usage else None
        return chunk

    # -- of both ------------------------------------------------------------------------------------------------

    def _end(self, reply: Reply) -> Json:
        assert reply.end is not None, "the choice has not ended"
        return {"finish_reason": reply.finish_reason, "stop_reason": reply.end.stop_string}

    def _record(self, kind: str, choices: list[Json]) -> Json:
        return self._head | {"object": kind, "choices": choices}

    def _totals(self) -> Json:
        used = usage(self._replies)
        if self._wanted.recall:
            texts = self._wanted.recall_texts
            found = (one.recall for one in self._replies.done.values() if one.recall is not None)
            used["recall"] = [recall_fields(one, self._engine, texts=texts) for one in found]
        return {"usage": used, "timings": timings(self._replies)}
