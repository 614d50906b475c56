"""writer: what each API has of its own: how a body is read, and how a response is written.

`generation` calls a `Parse` function in a thread, and the methods of its `Writer`, but for `keep`, on the event loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcellar.frontend.engine import Engine
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.chat_request import ChatRequest, TextRequest
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.replies import Replies, ReplyPart, WholeReply
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.json_text import to_json
from kvcellar.serve.http.parsing import Fields

SSE = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"
SSE_PING = b"\n"  # an empty line, which parsers skip; of a comment, vLLM's clients lose all that follows


class Writer(ABC):
    """Writes the response to one request: one object, by `add` for each part and then `response`; or a stream, by
    `first`, `chunk` for each part, and `last`. What it knows of the request and its usage is in the `Replies`."""

    media_type = SSE  # of a stream
    keeps = False  # whether `keep` is to be called

    def __init__(self, id: str, replies: Replies) -> None:
        self.id = id  # of the response; the record of the request has it, too
        self._replies = replies
        self._whole = WholeReply()

    def add(self, part: ReplyPart) -> None:
        self._whole.add(part.pieces)

    def keep(self) -> None:
        """In a thread, when all prompts have ended: keep what later requests need of the response."""
        raise NotImplementedError

    @abstractmethod
    def response(self) -> Answer:
        """When all prompts have ended. Iterators in it become lists, which are encoded in chunks."""

    def first(self) -> Iterator[bytes]:
        """What is sent before any part, in small pieces. The status is 200 from here on."""
        return iter(())

    @abstractmethod
    def chunk(self, part: ReplyPart) -> bytes:
        """May be empty."""

    @abstractmethod
    def last(self) -> bytes:
        """When all prompts have ended, and what has to be kept is durable."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """In place of `last`, perhaps before `first` has ended. An error before a stream begins is written by
        `ApiError.response`."""

    def ping(self) -> bytes:
        """What keeps a connection open on which nothing is sent. Empty: nothing does."""
        return SSE_PING


MakeWriter = Callable[[Replies], Writer]


@dataclass(frozen=True, slots=True)
class Generation:
    """A body that was read. `writer` makes the writer of the response when the prompts were submitted; it keeps `kept`
    bytes of the body until the response has ended."""

    request: TextRequest | ChatRequest
    writer: MakeWriter
    kept: int = 0


Parse = Callable[[Engine, Fields, Caller], Generation]  # slow, in a thread; raises `ApiError` and `BadRequest`


def data_event(value: Answer) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: Answer) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


def json_line(value: Answer) -> bytes:
    """A line of NDJSON."""
    return to_json(value) + b"\n"
