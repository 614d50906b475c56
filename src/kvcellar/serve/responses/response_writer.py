"""response_writer: writes a response of the Responses API, as one object or as a stream of named events.

What clients rely on: every event has its `type` and a `sequence_number` that rises by 1; an item and its part are added
before any delta; `annotations`, `logprobs` and `summary` are never absent; the last event is `response.completed`,
`response.incomplete` or `response.failed` and has the whole response.

A response is kept before the last part of it is sent, so that a client that has read it can continue it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from msgspec import Raw
from msgspec.structs import asdict, replace

from kvcellar.events import Delta
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.transcript import Turn, as_json
from kvcellar.serve.answers import OTHER, TEXT, Answer, Anything, Template
from kvcellar.serve.generation.replies import Replies, ReplyPart
from kvcellar.serve.generation.writer import Writer, named_event
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.json_text import to_json
from kvcellar.serve.openai.logprobs import TokenText
from kvcellar.serve.responses.output import (
    ArgumentsDeltaEvent,
    Output,
    OutputCall,
    OutputEvent,
    OutputMessage,
    OutputReasoning,
    TextDeltaEvent,
)
from kvcellar.serve.responses.store import Kept, ResponseStore
from kvcellar.text.conversation import texts

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"  # a value of `include`


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"] | None  # None: a call broke off


class ResponseReasoning(Answer):
    effort: str | None
    summary: None = None


class ResponseText(Answer):
    format: Anything


class RequestFields(Answer, kw_only=True):
    """What a response says of its request."""

    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    text: ResponseText
    tool_choice: str | Anything
    tools: list[Anything]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseObject(RequestFields, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: Sequence[OutputMessage | OutputReasoning | OutputCall] = ()
    usage: ResponseUsage | None = None
    temperature: float
    top_p: float


class ResponseStateEvent(Answer, kw_only=True):
    """The first two of a stream, and its last one."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject
    sequence_number: int = 0


class InputTokens(Answer):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(Answer):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


ResponseEvent = ResponseStateEvent | OutputEvent


@dataclass(frozen=True, slots=True)
class Echo:
    """What a response needs of its request. `model` and `fields` are part of the response; with a `store` it is kept,
    and `messages` are those of its own input as a `Turn` has them, `parent` is the turn that it continues, and `first`
    the number in the whole conversation of what is message 0 of the prompt. `input`: the items of the request as JSON.
    `begun`: the message that the answer continues, which is not one of `messages`."""

    model: str
    fields: RequestFields
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


class ResponsesWriter(Writer):
    def __init__(self, engine: Engine, echo: Echo, replies: Replies) -> None:
        super().__init__(f"resp_{uuid4().hex}", replies)
        self._echo, self._output = echo, Output()
        self._text = TokenText(engine, as_ids=not engine.model.has_text)
        self._sequence = 0
        self.keeps = echo.store is not None
        self._ended: ResponseObject | None = None  # as it is kept
        self._deltas: dict[str, Template] = {}  # without log-probabilities, by item
        params = replies.prepared.params
        self._begun = ResponseObject(
            id=self.id,
            created_at=int(time.time()),
            status="in_progress",
            model=echo.model,
            temperature=params.temperature,
            top_p=params.top_p,
            **asdict(echo.fields),
        )

    # -- one response -------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        self._events(part)

    def response(self) -> ResponseObject:
        return self._ended or self._finished()

    # -- a stream -----------------------------------------------------------------------------------------------

    def first(self) -> Iterator[bytes]:
        yield self._event(ResponseStateEvent(type="response.created", response=self._begun))
        yield self._event(ResponseStateEvent(type="response.in_progress", response=self._begun))

    def chunk(self, part: ReplyPart) -> bytes:
        return b"".join(map(self._event, self._events(part)))

    def last(self) -> bytes:
        response = self._ended or self._finished()
        ended = "response.completed" if response.status == "completed" else "response.incomplete"
        return self._event(ResponseStateEvent(type=ended, response=response))

    def failed(self, error: ApiError) -> bytes:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        about = ResponseError(code, error.message)
        response = replace(self._begun, status="failed", output=self._output.answers(), error=about)
        return self._event(ResponseStateEvent(type="response.failed", response=response))

    # -- inside -------------------------------------------------------------------------------------------------

    def _events(self, part: ReplyPart) -> list[OutputEvent]:
        super().add(part)
        events = self._output.add(part.pieces, self._logprobs(part.delta) if part.delta is not None else ())
        if part.end is not None:
            events += self._output.end(complete=part.end.reason == "stop")
        return events

    def _logprobs(self, delta: Delta) -> Sequence[Raw]:
        if not self._echo.logprobs:
            return ()
        return [Raw(to_json(self._text.scored(entry, unknown=[]))) for entry in delta.logprobs or ()]

    def _event(self, event: ResponseEvent) -> bytes:
        event.sequence_number, self._sequence = self._sequence, self._sequence + 1
        if (isinstance(event, TextDeltaEvent) and not event.logprobs) or isinstance(event, ArgumentsDeltaEvent):
            return self._delta(event)
        return named_event(event.type, event)

    def _delta(self, event: ArgumentsDeltaEvent | TextDeltaEvent) -> bytes:
        if (template := self._deltas.get(event.item_id)) is None:  # all deltas of an item are of one type
            marked = named_event(event.type, replace(event, delta=TEXT, sequence_number=OTHER))
            template = self._deltas[event.item_id] = Template(marked)
        return template.fill(event.delta, str(event.sequence_number))

    def _finished(self) -> ResponseObject:
        (reply,) = self._replies.replies
        response = replace(self._begun, output=self._output.answers(), usage=self._usage())
        if reply.ended.reason == "stop" and not self._output.broken:
            response.status, response.completed_at = "completed", int(time.time())
        else:
            cut_off = reply.ended.reason == "length"  # else a call broke off: no reason of this API says that
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens" if cut_off else None)
        return response

    def _usage(self) -> ResponseUsage:
        replies, cached = self._replies, self._replies.cached_tokens
        return ResponseUsage(
            input_tokens=replies.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached, replies.prompt_tokens - cached),
            output_tokens=replies.completion_tokens,
            output_tokens_details=OutputTokensDetails(replies.reasoning_tokens),
            total_tokens=replies.prompt_tokens + replies.completion_tokens,
        )

    def keep(self) -> None:
        echo, self._ended = self._echo, self._finished()
        assert echo.store is not None, "it is not to be kept"
        omitted = max(echo.parent.omitted if echo.parent else 0, echo.first + self._replies.prepared.omitted)
        messages = filter(None, (echo.messages, as_json([echo.whole(self._whole.message())])))
        turn = Turn(echo.parent, b",".join(messages), omitted, id=self.id)
        echo.store.add(echo.owner, self.id, Kept(to_json(self._ended), echo.input, turn))
