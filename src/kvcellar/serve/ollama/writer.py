"""writer: answers of Ollama's routes: a JSON object, or one in each line of a stream.

A call of a tool is told whole, with its arguments as an object. Durations are in nanoseconds; the tokens of a prompt
are counted with those that came from memory, which have a count of their own beside it.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import uuid4

from msgspec import UNSET, Raw, UnsetType

from kvcellar.events import TokenLogprob
from kvcellar.frontend.engine import Engine
from kvcellar.serve.answers import OTHER, TEXT, Answer, Anything, EncodedAs, Template
from kvcellar.serve.generation.replies import Item, Replies, ReplyPart
from kvcellar.serve.generation.writer import NDJSON, Writer, json_line
from kvcellar.serve.http.api_errors import OLLAMA, ApiError, OllamaError
from kvcellar.serve.openai.logprobs import ScoredToken, TokenText
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning

NANO = 10**9


class CalledTool(Answer):
    index: int
    name: str
    arguments: Annotated[Raw, EncodedAs(Anything)]


class OllamaToolCall(Answer):
    id: str
    function: CalledTool


class OllamaAnswer(Answer):
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class LineHead(Answer, kw_only=True):
    model: str
    created_at: str
    logprobs: Iterable[ScoredToken] | UnsetType = UNSET


class LineEnd(LineHead, kw_only=True):
    """Durations are nanoseconds. A model that was loaded or unloaded has none."""

    done: Literal[True] = True
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_cached_count: int | UnsetType = UNSET  # prompt tokens that came from memory
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class GenerateLine(LineHead, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    done: Literal[False] = False


class GenerateAnswer(LineEnd, kw_only=True):
    """The whole answer, or the last line of a stream."""

    response: str
    thinking: str | UnsetType = UNSET


class ChatLine(LineHead, kw_only=True):
    message: OllamaAnswer
    done: Literal[False] = False


class ChatLineEnd(LineEnd, kw_only=True):
    """The whole answer, or the last line of a stream."""

    message: OllamaAnswer


GenerateEvent = GenerateLine | GenerateAnswer | OllamaError
ChatLineEvent = ChatLine | ChatLineEnd | OllamaError


class GenerateFormat:
    line, end = GenerateLine, GenerateAnswer

    @staticmethod
    def fields(content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        """Of a line, or with none of the last line."""
        return {"response": content, "thinking": thinking or UNSET}


class ChatFormat:
    line, end = ChatLine, ChatLineEnd

    @staticmethod
    def fields(content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        return {"message": OllamaAnswer(content, thinking or UNSET, [*calls] or UNSET)}


Format = type[GenerateFormat] | type[ChatFormat]


class OllamaWriter(Writer):
    media_type = NDJSON

    def __init__(self, engine: Engine, name: str, loading: float, form: Format, replies: Replies) -> None:
        """`name`: of the model, as the client has sent it. `loading`: seconds from the request to its submission."""
        super().__init__("ollama-" + uuid4().hex, replies)
        self._name, self._loading, self._format = name, loading, form
        self._tokens = TokenText(engine, not engine.model.has_text)
        self._logprobs: list[TokenLogprob] = []
        self._wants_logprobs = replies.prepared.params.logprobs is not None
        self._templates: dict[type[Content | Reasoning], Template] = {}
        self._begun = time.perf_counter()

    # -- one response ---------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        super().add(part)
        self._logprobs += (part.delta.logprobs if part.delta is not None else None) or ()

    def response(self) -> GenerateAnswer | ChatLineEnd:
        whole = self._whole
        calls = [_call(number, call) for number, call in enumerate(whole.calls)]
        return self._end(self._format.fields(whole.content, whole.reasoning, calls))

    # -- a stream -------------------------------------------------------------------------------------------------

    def chunk(self, part: ReplyPart) -> bytes:
        self.add(part)
        if self._wants_logprobs or (piece := part.only_text) is None:
            return self._lines(part.pieces, _now())
        if (template := self._templates.get(type(piece))) is None:
            template = self._templates[type(piece)] = Template(self._lines([type(piece)(TEXT)], OTHER))
        return template.fill(piece.text, f'"{_now()}"')

    def _lines(self, pieces: Sequence[Piece], now: str) -> bytes:
        found = [fields for piece in pieces if (fields := self._piece(piece)) is not None]
        lines = [self._format.line(model=self._name, created_at=now, **fields) for fields in found]
        if lines:
            lines[0].logprobs = self._new_logprobs()
        return b"".join(map(json_line, lines))

    def last(self) -> bytes:
        return json_line(self._end(self._format.fields()))

    def failed(self, error: ApiError) -> bytes:
        return json_line(error.body(OLLAMA))

    def ping(self) -> bytes:
        return b""  # NDJSON has no comments

    def _piece(self, piece: Piece) -> dict[str, Any] | None:
        match piece:
            case Content(text=text):
                return self._format.fields(text)
            case Reasoning(text=text):
                return self._format.fields(thinking=text)
            case CallClosed(call=call):
                return self._format.fields(calls=[_call(call, self._whole.calls[call])])
            case CallOpened() | CallArguments():
                return None

    # -- of both --------------------------------------------------------------------------------------------------

    def _new_logprobs(self) -> Iterator[ScoredToken] | UnsetType:
        """Those that were not sent yet; an iterator, so that those of a long response are encoded in chunks."""
        if not self._wants_logprobs:
            return UNSET
        found, self._logprobs = self._logprobs, []
        return map(self._tokens.scored, found)

    def _end(self, fields: dict[str, Any]) -> GenerateAnswer | ChatLineEnd:
        (reply,) = self._replies.replies
        (done,) = self._replies.done.values()
        times = done.timings
        total = self._loading + time.perf_counter() - self._begun
        return self._format.end(
            model=self._name,
            created_at=_now(),
            logprobs=self._new_logprobs(),
            done_reason="length" if reply.ended.reason == "length" else "stop",
            total_duration=int(NANO * total),
            load_duration=int(NANO * self._loading),
            prompt_eval_count=self._replies.prompt_tokens,
            prompt_eval_cached_count=self._replies.cached_tokens,
            prompt_eval_duration=int(NANO * max(0.0, times.first_token - times.queued)),
            eval_count=self._replies.completion_tokens,
            eval_duration=int(NANO * times.decoding),
            **fields,
        )


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _call(number: int, call: Item) -> OllamaToolCall:
    return OllamaToolCall(call.id, CalledTool(number, call.name, call.arguments()))
