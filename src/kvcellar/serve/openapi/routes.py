"""routes: /openapi.json, the OpenAPI 3.1 document of a server, from the table of routes and the types of bodies and
answers.

Types become JSON Schemas. The description of a field is the comment on its line, or the comment lines directly above
it.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import get_original_bases

from kvcellar.sample.params import names_in
from kvcellar.serve import ignored_fields
from kvcellar.serve.anthropic.fields import MessagesBody
from kvcellar.serve.health import OPEN
from kvcellar.serve.json_text import to_json
from kvcellar.serve.ollama_fields import Options
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.openai.fields import SAMPLING
from kvcellar.serve.openai.usage import DRAFT_TIMINGS, TIMINGS
from kvcellar.serve.openapi.answers_openai import TimingsFields
from kvcellar.serve.openapi.answers_shared import (
    AnthropicError,
    HealthError,
    OllamaError,
    OpenAIError,
    RecallFields,
    SpeculationFields,
)
from kvcellar.serve.openapi.errors import error_name, error_response, error_statuses, error_type
from kvcellar.serve.openapi.routes_table import ABOUT, TABLE
from kvcellar.serve.operation import JSON, Operation
from kvcellar.serve.recalls import RECALL
from kvcellar.serve.responses_api import fields as responses_fields
from kvcellar.serve.responses_api.fields import ResponsesBody
from kvcellar.serve.shared import Shared
from kvcellar.serve.speculations import SPECULATION
from kvcellar.serve.tokenizing import TokenizeBody
from kvcellar.version import __version__

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def plain(comment: str) -> str:
    """A comment without links to files of the documentation."""
    return _LINK.sub(r"\1", comment)


class Comments:
    """Reads each module once."""

    def __init__(self) -> None:
        self._modules: dict[str, Mapping[str, Mapping[str, str]]] = {}

    def of(self, cls: type) -> Mapping[str, str]:
        """The comment of each field that the body of `cls` declares, empty where there is none."""
        name = cls.__module__
        if name not in self._modules:
            self._modules[name] = _classes(inspect.getsource(sys.modules[name]))
        return self._modules[name].get(cls.__name__, {})


def _classes(source: str) -> dict[str, dict[str, str]]:
    lines = source.split("\n")
    return {node.name: _fields(node, lines) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _fields(cls: ast.ClassDef, lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno is not None:
            comment = [*_above(lines, node.lineno - 1), *_beside(lines[node.end_lineno - 1])]
            found[node.target.id] = " ".join(comment)
    return found


def _above(lines: list[str], at: int) -> list[str]:
    found: list[str] = []
    while lines[at - 1].strip().startswith("# "):
        at -= 1
        found.insert(0, lines[at].strip().removeprefix("# "))
    return found


def _beside(line: str) -> Iterator[str]:
    _, found, comment = line.partition("  # ")
    if found and not comment.startswith("type: "):
        yield comment


Json = dict[str, Any]
Mode = Literal["validation", "serialization"]
BODY: Mode = "validation"
ANSWER: Mode = "serialization"

# Fields that are described elsewhere than in comments.
MEANINGS: Mapping[type, Mapping[str, str]] = MappingProxyType(
    {RecallFields: RECALL, SpeculationFields: SPECULATION, TimingsFields: {**TIMINGS, **DRAFT_TIMINGS}}
)
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
    return {**found, **MEANINGS.get(cls, {}), **own}


Operations = Mapping[tuple[str, str], Operation]  # by method and path
ERRORS = (OpenAIError, OllamaError, AnthropicError, HealthError)
NONE: Operations = MappingProxyType({})
ABOUT_ALL = """\
Routes of a kvcellar server. One without admin keys has no routes below /admin/, and one without its inspector has none
below /inspector/. Fields that are not declared here may be added to answers. A stream is declared by what each of its
events, or lines, has as JSON; streams of OpenAI's chats and completions end with `[DONE]`. Requests that are not valid
HTTP get 400, 408 or 431 with an error of OpenAI's shape, whatever their route.
"""


def document(mounted: Operations = NONE) -> Json:
    """The whole document, as JSON, with the operations of routes that are mounted on the server."""
    table = {**TABLE, **mounted}
    types: list[tuple[Hashable, Mode, Any]] = []
    types.extend((error, ANSWER, error) for error in ERRORS)
    for key, one in table.items():
        types.extend(((*key, part), mode, of) for part, mode, of in _parts(one))
    found, definitions = schemas(types)
    _add_ignored(definitions)
    _add_sampling(definitions)
    paths: dict[str, Json] = {}
    responses: dict[str, Json] = {}
    for (method, path), one in table.items():
        parts = {part: found((method, path, part), mode) for part, mode, _ in _parts(one)}
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, one, parts)
        for status in error_statuses(path, one):
            shape = found(error_type(path), ANSWER)
            responses.setdefault(error_name(status, path), error_response(status, shape))
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcellar", "version": __version__, "description": " ".join(ABOUT_ALL.split())},
        "tags": [
            {"name": name, "description": about}
            for name, about in ABOUT.items()
            if any(one.api == name for one in table.values())
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


def openapi_routes(server: Shared, mounted: Operations) -> list[Route]:
    return [Route("/openapi.json", DocumentHandler(server, mounted).get, methods=["GET"])]


class DocumentHandler:
    def __init__(self, server: Shared, mounted: Operations) -> None:
        self._threads, self._mounted = server.threads, mounted
        self._made: bytes | None = None  # by the first request

    async def get(self, request: Request) -> Response:
        if self._made is None:
            self._made = await self._threads.run("models", lambda: to_json(document(self._mounted)))
        return Response(self._made, media_type="application/json")
