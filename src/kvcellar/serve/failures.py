"""failures: everything that can go wrong, in the shape that OpenAI's clients read.

Messages name fields of the API and nothing of the command line or of Python; tests/serve/test_messages.py has each.

`{"error": {"message", "type", "param", "code"}}` with 4xx for what the client can change and 5xx for what it cannot;
clients repeat 408, 429 and 5xx by themselves. What was not expected is answered without details: those are in the log.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvcellar.errors import BadRequest, CacheFull, EngineClosed, NotSupported, Overloaded, PromptTooLong

RETRY_SECONDS = "1"
PIECE = 64  # items of a list


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal, ready to be sent."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def shape(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(to_json(self.shape()), self.status, self.headers, "application/json")


class ClientGone(Exception):
    """Nobody is left to answer."""


def to_json(value: object) -> bytes:
    """ASCII only, on one line: some clients take U+2028 and U+0085 for the end of a line of a stream."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_listed).encode("ascii")


def json_pieces(value: object) -> Iterator[bytes]:
    """The same bytes in pieces. An iterator is a list, of which `PIECE` items are taken at a time."""
    if isinstance(value, dict):
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(key) + b":"
            yield from json_pieces(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_pieces(item)
        yield b"]"
    elif isinstance(value, Iterator):
        start = b"["
        while items := list(islice(value, PIECE)):
            yield start + to_json(items)[1:-1]
            start = b","
        yield b"]" if start == b"," else b"[]"
    else:
        yield to_json(value)


def _listed(value: object) -> object:
    """An iterator as the list that it stands for."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def printable(text: str, limit: int = 200) -> str:
    """`text` as it may stand in a log or a message: no control characters, not longer than `limit`."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def api_error(error: Exception) -> ApiError:
    """How `error` is told to the client. Only errors that were raised for the client keep their message."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        message = "this route does not have that method; the header Allow lists those that it has"
        if error.status_code == HTTPStatus.NOT_FOUND:
            message = "there is no such route"
        code = _code_of(HTTPStatus(error.status_code).phrase)
        return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    if isinstance(error, BadRequest):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return ApiError(400, printable(error.message, 2000), error.param, code)
    if isinstance(error, NotSupported):
        return ApiError(400, printable(error.reason, 2000), code="not_supported")
    if isinstance(error, Overloaded):
        return ApiError(503, str(error), code="overloaded", headers={"retry-after": RETRY_SECONDS})
    if isinstance(error, CacheFull):
        message = "the memory for keys and values is full; try again later"
        return ApiError(503, message, code="overloaded", headers={"retry-after": RETRY_SECONDS})
    if isinstance(error, EngineClosed):
        return shutting_down()
    return ApiError(500, "the server met an unexpected error; its log has the details", code="internal_error")


def shutting_down() -> ApiError:
    headers = {"retry-after": RETRY_SECONDS, "connection": "close"}
    return ApiError(503, "the server is shutting down; try again later", code="shutting_down", headers=headers)


def _code_of(phrase: str) -> str:
    return phrase.lower().replace(" ", "_")
