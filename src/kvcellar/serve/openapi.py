"""openapi: /openapi.json, the OpenAPI 3.1 document of a server, from its operations and the types of bodies and
answers.

Types become JSON Schemas. The description of a field is the comment on its line, or the comment lines directly above
it.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import get_original_bases

from kvcellar.comments import Comments
from kvcellar.sampling_params import names_in
from kvcellar.serve.admin.health import OPEN
from kvcellar.serve.answers import Answer, Anything
from kvcellar.serve.anthropic.fields import MessagesBody
from kvcellar.serve.generation import ignored_fields
from kvcellar.serve.http.api_errors import AnthropicError, HealthError, OllamaError, OpenAIError, error_format
from kvcellar.serve.http.json_text import to_json
from kvcellar.serve.ollama.fields import Options
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.openai.fields import SAMPLING
from kvcellar.serve.openai.tokenizing import TokenizeBody
from kvcellar.serve.operation import JSON, Api, Operation, Operations
from kvcellar.serve.responses import fields as responses_fields
from kvcellar.serve.responses.fields import ResponsesBody
from kvcellar.serve.shared import Shared
from kvcellar.version import __version__

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def plain(comment: str) -> str:
    """A comment without links to files of the documentation."""
    return _LINK.sub(r"\1", comment)


Json = dict[str, Any]
Mode = Literal["validation", "serialization"]
BODY: Mode = "validation"
ANSWER: Mode = "serialization"

Found = tuple[Callable[[Hashable, Mode], Json], dict[str, Json]]


def schemas(types: Iterable[tuple[Hashable, Mode, Any]]) -> Found:
    """`types` are keys, what each is of, and the types. Returns the schema of a key, and what all refer to by name."""
    inputs: list[tuple[Hashable, Mode, TypeAdapter[Any]]] = [(key, mode, TypeAdapter(of)) for key, mode, of in types]
    made, definitions = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_generator(Comments())
    )
    return lambda key, mode: made[key, mode], definitions.get("$defs", {})


def _generator(comments: Comments) -> type[GenerateJsonSchema]:
    class Described(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def model_schema(self, schema: Any) -> Json:
            return _described(super().model_schema(schema), schema["cls"], comments)

        def dataclass_schema(self, schema: Any) -> Json:
            made = _described(super().dataclass_schema(schema), schema["cls"], comments)
            return made | {"required": [*made["properties"]]}  # answers have all, those with a default, too

        def typed_dict_schema(self, schema: Any) -> Json:
            return _described(super().typed_dict_schema(schema), schema["cls"], comments)

    return Described


def _described(made: Json, cls: type, comments: Comments) -> Json:
    found = {_name_sent(cls, name): text for name, text in _comments(cls, comments).items()}
    for name, schema in made.get("properties", {}).items():
        if text := found.get(name):
            schema["description"] = plain(text)
    return made


def _name_sent(cls: type, name: str) -> str:
    """The name of a field as clients write it."""
    found = cls.model_fields.get(name) if issubclass(cls, BaseModel) else None
    return found.alias or name if found is not None else name


def _comments(cls: type, comments: Comments) -> dict[str, str]:
    """Of its own fields and of those of its bases."""
    found: dict[str, str] = {}
    for base in get_original_bases(cls):
        if isinstance(base, type) and base.__module__.startswith("kvcellar."):
            found |= _comments(base, comments)
    own = {name: text for name, text in comments.of(cls).items() if text}
    return found | own


MEANINGS: Mapping[int, str] = {
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
EVERY = (403, 431, 500, 503)  # of every request
WITH_BODY = (400, 408, 413, 415)
HEADERS: Mapping[int, str] = {401: "www-authenticate", 503: "retry-after"}


def error_statuses(path: str, operation: Operation) -> list[int]:
    found = {*EVERY, *operation.errors}
    if path not in OPEN:
        found.add(401)
    if operation.body is not None or operation.binary is not None:
        found.update(WITH_BODY)
    return sorted(found)


def error_name(status: int, path: str) -> str:
    """Of a response in the components of the document."""
    return f"{error_format(path).__name__}{status}"


def error_response(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": MEANINGS[status], "content": {JSON: {"schema": schema}}}
    if status in HEADERS:
        found["headers"] = {HEADERS[status]: {"schema": {"type": "string"}}}
    return found


ERRORS = (OpenAIError, OllamaError, AnthropicError, HealthError)
ABOUT: Mapping[Api, str] = {  # of each API, with its rule for fields that it does not know
    "OpenAI": "OpenAI's API. A field that is not in a schema is refused with 400 and its name, except those that "
    "cannot change an answer, which have a description that says so.",
    "Anthropic": "Anthropic's API. Unknown fields are ignored: its clients send new ones with a beta header.",
    "Ollama": "Ollama's API for models. Unknown fields and unknown options are ignored.",
    "Conversations": "Named conversations. An unknown field is refused with 400 and its name.",
    "Server": "The state of the server.",
    "Operator": "For operators: they need an admin key. An unknown field is refused with 400 and its name.",
    "Inspector": "What the inspector shows. An API key sees its own requests only.",
}
ABOUT_ALL = """\
Routes of a kvcellar server. One without admin keys has no routes below /admin/, and one without its inspector has none
below /inspector/. Fields that are not declared here may be added to answers. A stream is declared by what each of its
events, or lines, has as JSON; streams of OpenAI's chats and completions end with `[DONE]`. Requests that are not valid
HTTP get 400, 408 or 431 with an error of OpenAI's shape, whatever their route.
"""


def document(operations: Operations) -> Json:
    """The whole document, as JSON."""
    types: list[tuple[Hashable, Mode, Any]] = []
    types.extend((error, ANSWER, error) for error in ERRORS)
    for key, one in operations.items():
        types.extend(((*key, part), mode, of) for part, mode, of in _parts(one))
    found, definitions = schemas(types)
    _add_ignored(definitions)
    _add_sampling(definitions)
    paths: dict[str, Json] = {}
    responses: dict[str, Json] = {}
    for (method, path), one in operations.items():
        parts = {part: found((method, path, part), mode) for part, mode, _ in _parts(one)}
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, one, parts)
        for status in error_statuses(path, one):
            shape = found(error_format(path), ANSWER)
            responses.setdefault(error_name(status, path), error_response(status, shape))
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcellar", "version": __version__, "description": " ".join(ABOUT_ALL.split())},
        "tags": [
            {"name": name, "description": about}
            for name, about in ABOUT.items()
            if any(one.api == name for one in operations.values())
        ],
        "paths": paths,
        "security": [{"bearer": []}, {"header": []}, {}],
        "components": {
            "schemas": definitions,
            "responses": responses,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _parts(operation: Operation) -> Iterator[tuple[str, Mode, Any]]:
    """What has a schema, and its type."""
    parts: tuple[tuple[str, Mode, Any], ...] = (
        ("body", BODY, operation.body),
        ("answer", ANSWER, operation.answer),
        ("event", ANSWER, operation.event),
    )
    yield from (part for part in parts if part[2] is not None)


def _add_ignored(definitions: dict[str, Json]) -> None:
    """Fields that are accepted without being implemented."""
    for body, tables in (
        (ChatBody, ignored_fields),
        (CompletionBody, ignored_fields),
        (ResponsesBody, responses_fields),
        (TokenizeBody, ignored_fields),
    ):
        properties = definitions[body.__name__]["properties"]
        for name, why in tables.NO_EFFECT.items():
            properties.setdefault(name, {"description": f"Ignored: {why}."})
        for name, values in tables.NEUTRAL.items():
            properties.setdefault(name, {"enum": list(values), "description": "Only values that change nothing."})


def _add_sampling(definitions: dict[str, Json]) -> None:
    """Sampling parameters, from their declarations."""
    for body, names in (
        (ChatBody, SAMPLING),
        (CompletionBody, SAMPLING),
        (ResponsesBody, SAMPLING),
        (MessagesBody, names_in("anthropic")),
        (Options, names_in("ollama")),
    ):
        properties = definitions[body.__name__]["properties"]
        for name, one in names.items():
            schema = one.kind.schema()
            kinds = [*schema.get("anyOf", [schema]), {"type": "null"}]
            properties.setdefault(name, {"anyOf": kinds, "default": None, "description": one.about})
    definitions[CompletionBody.__name__]["properties"]["max_tokens"]["anyOf"][0]["minimum"] = 0  # with `echo`


def _operation(method: str, path: str, operation: Operation, schemas: dict[str, Json]) -> Json:
    responses: Json = {}
    for status in operation.statuses:
        responses[str(status)] = {"description": "Success.", **_content(operation, schemas)}
    for status in error_statuses(path, operation):
        responses[str(status)] = {"$ref": f"#/components/responses/{error_name(status, path)}"}
    if method == "HEAD":  # without bodies
        responses = {status: {"description": "Without a body."} for status in responses}
    found: Json = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.about,
        "tags": [operation.api],
        "responses": responses,
    }
    if parameters := [*_path_parameters(path, operation), *_query_parameters(operation)]:
        found["parameters"] = parameters
    if "body" in schemas:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas["body"]}}}
    elif operation.binary is not None:
        found["requestBody"] = {"required": True, "content": {operation.binary: {"schema": {}}}}
    if path in OPEN:
        found["security"] = [{}]
    return found


def _path_parameters(path: str, operation: Operation) -> list[Json]:
    names = re.findall(r"\{(\w+)\}", path)
    text: Json = {"type": "string"}
    return [{"name": n, "in": "path", "required": True, "schema": operation.path.get(n, text)} for n in names]


def _query_parameters(operation: Operation) -> list[Json]:
    return [
        {"name": name, "in": "query", "description": one.about, "schema": one.schema}
        for name, one in operation.query.items()
    ]


def _content(operation: Operation, schemas: dict[str, Json]) -> Json:
    content: Json = {}
    if "answer" in schemas:
        content[JSON] = {"schema": schemas["answer"]}
    for media in operation.media:
        content[media] = {"schema": {"type": "string"} if media.startswith("text/") else {}}
    if operation.streams is not None:
        content[operation.streams] = {"schema": schemas["event"]}
    return {"content": content} if content else {}


class OpenApiDocument(Answer):
    openapi: str
    info: Anything
    tags: list[Anything]
    paths: dict[str, Any]
    security: list[Anything]
    components: Anything


class DocumentHandler:
    def __init__(self, server: Shared, operations: Operations) -> None:
        self._threads, self._operations = server.threads, operations
        self._made: bytes | None = None  # by the first request

    async def get(self, request: Request) -> Response:
        if self._made is None:
            self._made = await self._threads.run("models", lambda: to_json(document(self._operations)))
        return Response(self._made, media_type="application/json")
