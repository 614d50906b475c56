"""operation: what the OpenAPI document says of one method of one route."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

Api = Literal["OpenAI", "Anthropic", "Ollama", "Conversations", "Server", "Operator", "Inspector"]
Schema = dict[str, Any]
JSON, SSE, NDJSON, BYTES = "application/json", "text/event-stream", "application/x-ndjson", "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Of the query. All of them may be left out."""

    about: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class Operation:
    """A type is one that pydantic makes a schema of. `errors`: statuses beside those that every request may get, or
    every one with a body."""

    api: Api
    about: str
    _: KW_ONLY
    body: type[BaseModel] | None = None  # the model that checks the body
    binary: str | None = None  # media type of a body that is no JSON
    path: Mapping[str, Schema] = field(default_factory=dict[str, Schema])  # of the parameters of the path
    query: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])
    statuses: tuple[int, ...] = (200,)  # of a success; none: every request is refused
    answer: Any = None  # type of a successful response; None: it has no JSON
    media: tuple[str, ...] = ()  # media types of a successful response that is no JSON
    streams: str | None = None  # media type of the response if `stream` is set
    event: Any = None  # type of an event, or a line, of that stream
    errors: tuple[int, ...] = ()


Operations = Mapping[tuple[str, str], Operation]  # by method and path
