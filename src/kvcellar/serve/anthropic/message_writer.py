"""message_writer: a message of content blocks, whole or as a stream.

In a stream, blocks are numbered, and one is open at a time. `message_start` comes with the first token, when it is
known how many tokens of the prompt came from memory.

The tokens of a request as Anthropic counts them: `input_tokens` are those of the prompt that were neither
read from memory nor lie before a breakpoint.
"""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from kvcellar.serve.api_errors import ANTHROPIC, ApiError
from kvcellar.serve.chat_request import Json
from kvcellar.serve.json_text import JsonTemplate
from kvcellar.serve.replies import Item, Replies, ReplyPart, WholeReply
from kvcellar.serve.writer import SSE, named_event
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning


def usage(replies: Replies, cached: int | None = None) -> Json:
    """`cached`: tokens that came from memory, before it is known from the end of the request.

    Computed tokens before the last breakpoint are `cache_creation_input_tokens`; without breakpoints there are none,
    although later requests may find those tokens, too.
    """
    prepared = replies.prepared
    (prompt,) = prepared.prompt_tokens
    read = replies.cached_tokens if cached is None else cached
    marked = max(prepared.breakpoints, default=0)
    created = max(0, marked - read)
    hour = created if prepared.retention.ttl == 3600.0 else 0
    return {
        "input_tokens": prompt - read - created,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "cache_creation": {"ephemeral_5m_input_tokens": created - hour, "ephemeral_1h_input_tokens": hour},
        # at the end with the token that ended the answer, which no delta has
        "output_tokens": replies.completion_tokens if cached is None else replies.replies[0].completion_tokens,
        "service_tier": "standard",
    }


SIGNATURE = "kvcellar"  # of reasoning: clients send it back, and it is not read then
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    media_type = SSE

    def __init__(self, model: str, replies: Replies) -> None:
        self.id = "msg_" + uuid4().hex
        self._model, self._replies = model, replies
        self._whole = WholeReply()
        self._begun = False  # `message_start` was sent
        self._open: str | None = None  # the type of the open block
        self._blocks = 0  # that were opened
        self._deltas: dict[str, JsonTemplate] = {}  # of the open block, by kind

    # -- one response ---------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        self._whole.add(part.pieces)

    def response(self) -> Json:
        return self._message(list(map(_block, self._whole.items))) | self._end() | {"usage": usage(self._replies)}

    # -- a stream -------------------------------------------------------------------------------------------------

    def first(self) -> Iterator[bytes]:
        return iter(())

    def chunk(self, part: ReplyPart) -> bytes:
        events: list[bytes] = []
        if part.delta is not None and not self._begun:
            events.append(self._start(usage(self._replies, part.delta.cached_tokens)))
        for piece in part.pieces:
            events += self._piece(piece)
        return b"".join(events)

    def last(self) -> bytes:
        used = usage(self._replies)
        events = [] if self._begun else [self._start(used | {"output_tokens": 0})]
        end = {"type": "message_delta", "delta": self._end(), "usage": used}
        return b"".join((*events, *self._close(), named_event("message_delta", end), _event("message_stop")))

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", error.body(ANTHROPIC))

    def ping(self) -> bytes:
        return _event("ping")

    def _start(self, used: Json) -> bytes:
        self._begun = True
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": used}
        return named_event("message_start", {"type": "message_start", "message": message})

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Reasoning(text=text):
                yield from self._opened("thinking", {"thinking": "", "signature": ""})
                yield self._delta("thinking_delta", "thinking", text)
            case Content(text=text):
                yield from self._opened("text", {"text": ""})
                yield self._delta("text_delta", "text", text)
            case CallOpened(id=id, name=name):
                yield from self._close()
                yield from self._opened("tool_use", {"id": id, "name": name, "input": {}})
            case CallArguments(text=text):
                yield self._delta("input_json_delta", "partial_json", text)
            case CallClosed():
                yield from self._close()

    def _opened(self, kind: str, fields: Json) -> Iterator[bytes]:
        """Events that open a block of this type, unless it is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._blocks += 1
        self._deltas.clear()
        yield _event("content_block_start", index=self._blocks - 1, content_block={"type": kind} | fields)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", SIGNATURE)
        self._open = None
        yield _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        if (template := self._deltas.get(kind)) is None:
            index = self._blocks - 1
            template = self._deltas[kind] = JsonTemplate(
                lambda text: _event("content_block_delta", index=index, delta={"type": kind, name: text}), "text"
            )
        return template.fill(text=text)

    # -- of both --------------------------------------------------------------------------------------------------

    def _message(self, content: list[Json]) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _end(self) -> Json:
        (reply,) = self._replies.replies
        assert reply.end is not None, "the choice has not ended"
        stop = reply.end.stop_string
        reason = "stop_sequence" if stop is not None else STOP_REASONS[reply.finish_reason]
        return {"stop_reason": reason, "stop_sequence": stop}


def _event(kind: str, **fields: object) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _block(item: Item) -> Json:
    match item.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": item.text, "signature": SIGNATURE}
        case "content":
            return {"type": "text", "text": item.text}
        case "call":
            return {"type": "tool_use", "id": item.id, "name": item.name, "input": arguments(item.text)}


def arguments(text: str) -> Any:
    """The arguments of a call, which its reader has found to be JSON, or none."""
    return json.loads(text) if text.strip() else {}
