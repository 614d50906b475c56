"""api_errors: errors in the formats of the APIs, and the conversion of exceptions to them.

The format is that of OpenAI, `{"error": {"message", "type", "param", "code"}}`, except below the paths of `FORMATS`.
The status is 4xx for what the client can correct and 5xx for what it cannot; clients retry 408, 429 and 5xx themselves.
Details of unexpected errors are only in the log.

Messages name fields of the API, never options of the command line or names in Python; tests/serve/test_messages.py
contains every message.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvcellar.errors import (
    BadRequest,
    CacheFull,
    ConstraintFailed,
    ConversationConflict,
    ConversationNotSaved,
    ConversationUnreadable,
    EngineClosed,
    EngineDied,
    KvcellarError,
    ModelNotFound,
    NoToken,
    NotSupported,
    Overloaded,
    PromptTooLong,
    ScoresNotNumbers,
    UnknownConversation,
)
from kvcellar.serve.answers import Answer
from kvcellar.serve.http.json_text import printable, to_json

RETRY_SECONDS = "1"
OLLAMA = "/api/"  # the routes below it have errors in the format of Ollama's API
ANTHROPIC = "/v1/messages"  # this route, and those below it, have errors in the format of Anthropic's API
HEALTH = "/health"  # this route has errors in the format of llama.cpp's server, whose clients read it


@dataclass(eq=False)
class ApiError(Exception):
    """An error with its HTTP status."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self, path: str = "") -> Answer:
        """In the format of the API that has `path`."""
        return error_format(path).of_error(self)

    def response(self, path: str = "") -> Response:
        """For a request to `path`."""
        return Response(to_json(self.body(path)), self.status, self.headers, "application/json")


class OpenAIErrorFields(Answer):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None  # the field that the client can correct
    code: str | None


class OpenAIError(Answer):
    error: OpenAIErrorFields

    @staticmethod
    def of_error(error: ApiError) -> "OpenAIError":
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return OpenAIError(OpenAIErrorFields(error.message, kind, error.param, error.code))


class OllamaError(Answer):
    error: str

    @staticmethod
    def of_error(error: ApiError) -> "OllamaError":
        return OllamaError(error.message)


AnthropicKind = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "overloaded_error",
    "api_error",
]
ANTHROPIC_TYPES: Mapping[int, AnthropicKind] = {  # by status; others below 500 are invalid requests
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorFields(Answer):
    type: AnthropicKind
    message: str


class AnthropicError(Answer):
    error: AnthropicErrorFields
    type: Literal["error"] = "error"

    @staticmethod
    def of_error(error: ApiError) -> "AnthropicError":
        other = "api_error" if error.status >= 500 else "invalid_request_error"
        return AnthropicError(AnthropicErrorFields(ANTHROPIC_TYPES.get(error.status, other), error.message))


HealthKind = Literal[
    "invalid_request_error", "authentication_error", "not_found_error", "server_error", "unavailable_error"
]
HEALTH_TYPES: Mapping[int, HealthKind] = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "unavailable_error",
}


class HealthErrorFields(Answer):
    code: int  # the status
    message: str
    type: HealthKind


class HealthError(Answer):
    """As llama.cpp's server has it."""

    error: HealthErrorFields

    @staticmethod
    def of_error(error: ApiError) -> "HealthError":
        kind = HEALTH_TYPES.get(error.status, "invalid_request_error")
        return HealthError(HealthErrorFields(error.status, error.message, kind))


ErrorFormat = type[OpenAIError] | type[OllamaError] | type[AnthropicError] | type[HealthError]
# By the beginnings of paths.
FORMATS: Mapping[str, ErrorFormat] = {OLLAMA: OllamaError, ANTHROPIC: AnthropicError, HEALTH: HealthError}


def error_format(path: str) -> ErrorFormat:
    """What errors of a path are."""
    return next((form for prefix, form in FORMATS.items() if path.startswith(prefix)), OpenAIError)


class ClientDisconnected(Exception):
    """The client closed its connection before the response ended."""


# The status and the code of an error, and its field unless it has one, by the first class that fits.
OF_ERRORS: Mapping[type[KvcellarError], tuple[int, str | None, str | None]] = {
    UnknownConversation: (404, "conversation_not_found", None),
    ConversationConflict: (409, "conversation_conflict", None),
    ConversationUnreadable: (409, "conversation_unreadable", "conversation"),
    ConversationNotSaved: (503, "conversation_not_saved", "conversation"),
    PromptTooLong: (400, "context_length_exceeded", None),
    BadRequest: (400, None, None),
    NotSupported: (400, "not_supported", None),
    ScoresNotNumbers: (500, "scores_not_numbers", None),
    ConstraintFailed: (400, "constraint_failed", None),
    NoToken: (400, "no_token", None),  # the request allows none
    ModelNotFound: (404, "model_not_found", "model"),
    EngineDied: (500, "engine_died", None),
}
HINTS: Mapping[type[KvcellarError], str] = {
    ConversationUnreadable: "; delete it, or try again",
    ConversationNotSaved: "; try again later",
}


def api_error(error: BaseException) -> ApiError:
    """`error` as the client gets it. Only exceptions raised for the client keep their message."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return _http_error(error)
        case Overloaded():
            return overloaded(str(error))
        case CacheFull():
            return overloaded("the memory for keys and values is full; try again later")
        case EngineClosed():
            return shutting_down()
    if (kind := next((one for one in OF_ERRORS if isinstance(error, one)), None)) is None:
        return ApiError(500, "the server met an unexpected error; its log has the details", code="internal_error")
    status, code, param = OF_ERRORS[kind]
    said, param = (error.message, error.param) if isinstance(error, BadRequest) else (str(error), param)
    message = error.reason if isinstance(error, NotSupported) else said + HINTS.get(kind, "")
    return ApiError(status, printable(message, 2000), param, code)


def _http_error(error: HTTPException) -> ApiError:
    message = "this route does not have that method; the header Allow lists those that it has"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = "there is no such route"
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))


def invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param, "invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param, "unsupported_parameter")


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, code="overloaded", headers={"retry-after": RETRY_SECONDS})


def model_refused(name: str) -> ApiError:
    """The reason may name files of the server, so it is only in the log."""
    message = f"the model {name} is damaged or cannot be loaded here; the log of the server has the reason"
    return ApiError(400, message, "model", "model_refused")


def shutting_down() -> ApiError:
    headers = {"retry-after": RETRY_SECONDS, "connection": "close"}
    return ApiError(503, "the server is shutting down; try again later", code="shutting_down", headers=headers)
