"""response_writer: writes a response of the Responses API, as one object or as a stream of named events.

What clients rely on: every event has its `type` and a `sequence_number` that rises by 1; an item and its part are added
before any delta; `annotations`, `logprobs` and `summary` are never absent; the last event is `response.completed`,
`response.incomplete` or `response.failed` and has the whole response.

A response is kept before the last part of it is sent, so that a client that has read it can continue it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.engine.transcript import Turn, as_json
from kvcellar.events import Delta
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.json_text import JsonTemplate, json_chunks, to_json
from kvcellar.serve.openai.logprobs import TokenText, finite
from kvcellar.serve.replies import Replies, ReplyPart, WholeReply
from kvcellar.serve.responses_api.output import Output
from kvcellar.serve.responses_api.store import Kept, ResponseStore
from kvcellar.serve.writer import SSE, SSE_PING, encoded_event
from kvcellar.text.conversation import texts

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"  # a value of `include`


@dataclass(frozen=True, slots=True)
class Echo:
    """What a response needs of its request. `fields` are part of the response; with a `store` it is kept, and
    `messages` are those of its own input as a `Turn` has them, `parent` is the turn that it continues, and `first` the
    number in the whole conversation of what is message 0 of the prompt. `input`: the items of the request as JSON.
    `begun`: the message that the answer continues, which is not one of `messages`."""

    fields: Json
    store: ResponseStore | None
    owner: str
    messages: bytes
    parent: Turn | None
    first: int
    logprobs: bool
    input: bytes = b""
    begun: Mapping[str, Any] | None = None

    def whole(self, reply: Json) -> Json:
        """The message that the conversation has, whose end is `reply`."""
        if self.begun is None:
            return reply
        return {**self.begun, **reply, "content": "\n".join(texts(self.begun)) + reply["content"]}


class ResponsesWriter:
    """A `Writer`."""

    media_type = SSE

    def __init__(self, engine: ServedEngine, echo: Echo, replies: Replies) -> None:
        self._echo, self._replies = echo, replies
        self._text = TokenText(engine, as_ids=not engine.model.has_text)
        self._output, self._whole = Output(), WholeReply()
        self._sequence = 0
        self._deltas: dict[str, JsonTemplate] = {}  # events with a delta and no log-probabilities, by item
        self.id = f"resp_{uuid4().hex}"
        params = replies.prepared.params
        self._head: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "temperature": params.temperature,
            "top_p": params.top_p,
            **echo.fields,
        }

    # -- one response -------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        self._events(part)

    def response(self) -> Json:
        return self._kept(self._finished())

    # -- a stream -----------------------------------------------------------------------------------------------

    def first(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._record("in_progress", [])})

    def chunk(self, part: ReplyPart) -> bytes:
        return b"".join(map(self._event, self._events(part)))

    def last(self) -> bytes:
        response = self._kept(self._finished())
        return self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> bytes:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        response = self._record("failed", self._output.as_json())
        response["error"] = {"code": code, "message": error.message}
        return self._event({"type": "response.failed", "response": response})

    def ping(self) -> bytes:
        return SSE_PING

    # -- inside -------------------------------------------------------------------------------------------------

    def _events(self, part: ReplyPart) -> list[Json]:
        self._whole.add(part.pieces)
        events = self._output.add(part.pieces, self._logprobs(part.delta) if part.delta is not None else ())
        if part.end is not None:
            events += self._output.end(complete=part.end.reason == "stop")
        return events

    def _logprobs(self, delta: Delta) -> Sequence[bytes]:
        """Of each token, as JSON: it is encoded once, and written in up to five places."""
        if not self._echo.logprobs:
            return ()

        def one(token: int, logprob: float) -> Json:
            return {"token": self._text.text(token), "logprob": finite(logprob), "bytes": self._text.utf8(token) or []}

        return [
            to_json(one(e.token_id, e.logprob) | {"top_logprobs": [one(*top) for top in e.top]})
            for e in delta.logprobs or ()
        ]

    def _event(self, event: Json) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        if "delta" not in event or event.get("logprobs"):
            return _named(event | {"sequence_number": number})
        item = event["item_id"]
        if (template := self._deltas.get(item)) is None:  # all deltas of an item are of one type

            def write(delta: str, number: str) -> bytes:
                return _named(event | {"delta": delta, "sequence_number": number})

            template = self._deltas[item] = JsonTemplate(write, "delta", "number")
        return template.fill(delta=event["delta"], number=number)

    def _record(self, status: str, output: list[Json]) -> Json:
        return self._head | {
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
        }

    def _finished(self) -> Json:
        (reply,) = self._replies.replies
        assert reply.end is not None, "the response has not ended"
        complete = reply.end.reason == "stop" and not self._output.broken
        response = self._record("completed" if complete else "incomplete", self._output.as_json())
        if complete:
            response["completed_at"] = int(time.time())
        else:
            cut_off = reply.end.reason == "length"  # else a call broke off: no reason of this API says that
            response["incomplete_details"] = {"reason": "max_output_tokens" if cut_off else None}
        return response | {"usage": self._usage()}

    def _usage(self) -> Json:
        replies = self._replies
        cached = replies.cached_tokens
        return {
            "input_tokens": replies.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": replies.prompt_tokens - cached,
            },
            "output_tokens": replies.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": replies.reasoning_tokens},
            "total_tokens": replies.prompt_tokens + replies.completion_tokens,
        }

    def _kept(self, response: Json) -> Json:
        echo = self._echo
        if echo.store is not None:
            omitted = max(echo.parent.omitted if echo.parent else 0, echo.first + self._replies.prepared.omitted)
            messages = filter(None, (echo.messages, as_json([echo.whole(self._whole.message())])))
            whole = b"".join(json_chunks(response))
            kept = Kept(whole, echo.input, Turn(echo.parent, b",".join(messages), omitted))
            echo.store.add(echo.owner, self.id, kept)
        return response


def _named(event: Json) -> bytes:
    return encoded_event(event["type"], b"".join(json_chunks(event)))
