"""ollama_writer: answers of Ollama's routes: a JSON object, or one in each line of a stream.

A call of a tool is told whole, with its arguments as an object. Durations are in nanoseconds; the tokens of a prompt
are counted with those that came from memory, which have a count of their own beside it.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from uuid import uuid4

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.events import TokenLogprob
from kvcellar.serve.api_errors import OLLAMA, ApiError
from kvcellar.serve.chat_request import Json
from kvcellar.serve.json_text import JsonTemplate
from kvcellar.serve.openai.logprobs import TokenText, finite
from kvcellar.serve.replies import Item, Replies, ReplyPart, WholeReply
from kvcellar.serve.writer import NDJSON, json_line
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning

NANO = 10**9


# The fields of a line with a content, reasoning and calls, which differ by route; with none: of the last line.
Shape = Callable[[str, str, Sequence[Json]], Json]


def chat_shape(content: str, thinking: str, calls: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_shape(content: str, thinking: str, calls: Sequence[Json]) -> Json:
    found: Json = {"response": content}
    return found | {"thinking": thinking} if thinking else found


class OllamaWriter:
    media_type = NDJSON

    def __init__(self, engine: ServedEngine, name: str, loading: float, shape: Shape, replies: Replies) -> None:
        """`name`: of the model, as the client has sent it. `loading`: seconds from the request to its submission."""
        self.id = "ollama-" + uuid4().hex
        self._name, self._loading, self._shape, self._replies = name, loading, shape, replies
        self._whole = WholeReply()
        self._tokens = TokenText(engine, not engine.model.has_text)
        self._logprobs: list[TokenLogprob] = []
        self._wants_logprobs = replies.prepared.params.logprobs is not None
        self._templates: dict[type[Content | Reasoning], JsonTemplate] = {}  # of lines with a piece and no more
        self._begun = time.perf_counter()

    # -- one response ---------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        self._whole.add(part.pieces)
        self._logprobs += (part.delta.logprobs if part.delta is not None else None) or ()

    def response(self) -> Json:
        whole = self._whole
        calls = [_call(number, call) for number, call in enumerate(whole.calls)]
        return self._line(self._shape(whole.content, whole.reasoning, calls)) | self._end()

    # -- a stream -------------------------------------------------------------------------------------------------

    def first(self) -> Iterator[bytes]:
        return iter(())

    def chunk(self, part: ReplyPart) -> bytes:
        self.add(part)
        if len(part.pieces) == 1 and not self._wants_logprobs and isinstance(part.pieces[0], Content | Reasoning):
            return self._template(type(part.pieces[0])).fill(time=_now(), text=part.pieces[0].text)
        lines = [line for piece in part.pieces if (line := self._piece(piece)) is not None]
        if lines:
            lines[0] |= self._new_logprobs()
        return b"".join(json_line(self._line(line) | {"done": False}) for line in lines)

    def _template(self, kind: type[Content | Reasoning]) -> JsonTemplate:
        if kind not in self._templates:

            def write(time: str, text: str) -> bytes:
                line = self._piece(kind(text))
                assert line is not None, "each text has a line"
                return json_line(self._line(line) | {"created_at": time, "done": False})

            self._templates[kind] = JsonTemplate(write, "time", "text")
        return self._templates[kind]

    def last(self) -> bytes:
        return json_line(self._line(self._shape("", "", ())) | self._end())

    def failed(self, error: ApiError) -> bytes:
        return json_line(error.body(OLLAMA))

    def ping(self) -> bytes:
        return b""  # NDJSON has no comments

    def _piece(self, piece: Piece) -> Json | None:
        match piece:
            case Content(text=text):
                return self._shape(text, "", ())
            case Reasoning(text=text):
                return self._shape("", text, ())
            case CallClosed(call=call):
                return self._shape("", "", [_call(call, self._whole.calls[call])])
            case CallOpened() | CallArguments():
                return None

    # -- of both --------------------------------------------------------------------------------------------------

    def _line(self, fields: Json) -> Json:
        return {"model": self._name, "created_at": _now()} | fields

    def _new_logprobs(self) -> Json:
        """Those that were not sent yet; an iterator, so that those of a long response are encoded in chunks."""
        if not self._wants_logprobs:
            return {}
        found, self._logprobs = self._logprobs, []
        return {"logprobs": map(self._logprob, found)}

    def _logprob(self, entry: TokenLogprob) -> Json:
        def one(token: int, logprob: float) -> Json:
            return {"token": self._tokens.text(token), "logprob": finite(logprob), "bytes": self._tokens.utf8(token)}

        return one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top]}

    def _end(self) -> Json:
        (reply,) = self._replies.replies
        (done,) = self._replies.done.values()
        assert reply.end is not None, "the choice has not ended"
        times = done.timings
        total = self._loading + time.perf_counter() - self._begun
        return self._new_logprobs() | {
            "done": True,
            "done_reason": reply.end.reason,
            "total_duration": int(NANO * total),
            "load_duration": int(NANO * self._loading),
            "prompt_eval_count": self._replies.prompt_tokens,
            "prompt_eval_cached_count": self._replies.cached_tokens,
            "prompt_eval_duration": int(NANO * max(0.0, times.first_token - times.queued)),
            "eval_count": self._replies.completion_tokens,
            "eval_duration": int(NANO * times.decoding),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _call(number: int, call: Item) -> Json:
    arguments = json.loads(call.text) if call.text.strip() else {}
    return {"id": call.id, "function": {"index": number, "name": call.name, "arguments": arguments}}
