"""errors: which statuses an operation may have beside success, and the shapes of their bodies."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvcellar.serve.api_errors import SHAPES, anthropic_shape, health_shape, ollama_shape
from kvcellar.serve.health import OPEN
from kvcellar.serve.openapi.answers_shared import AnthropicError, HealthError, OllamaError, OpenAIError
from kvcellar.serve.operation import JSON, Operation

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        400: "The request is not valid, or the model cannot do it. `param` is the field.",
        401: "A valid key is needed.",
        403: "The key may not do this, or the header Host does not name this server.",
        404: "There is no such model, conversation or other thing.",
        408: "The body did not arrive in time.",
        409: "The state of the server does not allow it now.",
        413: "The body is too long.",
        415: "The body has another content type, or a content encoding.",
        431: "The headers are too many or too long.",
        500: "The server met an unexpected error, and its log has the details; or engines have died of the request.",
        503: "Try again later: the server has too much to do, is loading, is shutting down, or has failed.",
        507: "The disk of the server is full.",
    }
)
EVERY = (403, 431, 500, 503)  # of every request
WITH_BODY = (400, 408, 413, 415)
SHAPE_NAMES: Mapping[Any, Any] = MappingProxyType(
    {anthropic_shape: AnthropicError, ollama_shape: OllamaError, health_shape: HealthError}
)
HEADERS: Mapping[int, str] = MappingProxyType({401: "www-authenticate", 503: "retry-after"})


def error_type(path: str) -> Any:
    """The type of errors below a path."""
    return next((SHAPE_NAMES[shape] for prefix, shape in SHAPES.items() if path.startswith(prefix)), OpenAIError)


def error_statuses(path: str, operation: Operation) -> list[int]:
    found = {*EVERY, *operation.errors}
    if path not in OPEN:
        found.add(401)
    if operation.body is not None or operation.binary is not None:
        found.update(WITH_BODY)
    return sorted(found)


def error_name(status: int, path: str) -> str:
    """Of a response in the components of the document."""
    return f"{error_type(path).__name__}{status}"


def error_response(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": MEANINGS[status], "content": {JSON: {"schema": schema}}}
    if status in HEADERS:
        found["headers"] = {HEADERS[status]: {"schema": {"type": "string"}}}
    return found
