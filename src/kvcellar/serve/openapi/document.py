"""document: the OpenAPI 3.1 document of a server, from the table of routes and the types of bodies and answers."""

import re
from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvcellar.sample.params import bounds
from kvcellar.serve import ignored_fields
from kvcellar.serve.anthropic.fields import MessagesBody
from kvcellar.serve.health import OPEN
from kvcellar.serve.ollama_fields import Options
from kvcellar.serve.ollama_options import RENAMED
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.openapi.answers_shared import AnthropicError, HealthError, OllamaError, OpenAIError
from kvcellar.serve.openapi.errors import error_name, error_response, error_statuses, error_type
from kvcellar.serve.openapi.routes_table import ABOUT, TABLE
from kvcellar.serve.openapi.schemas import ANSWER, BODY, Json, Mode, schemas
from kvcellar.serve.operation import JSON, Operation
from kvcellar.serve.responses_api import fields as responses_fields
from kvcellar.serve.responses_api.fields import ResponsesBody
from kvcellar.serve.tokenizing import TokenizeBody
from kvcellar.version import __version__

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
    _add_bounds(definitions)
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


def _add_bounds(definitions: dict[str, Json]) -> None:
    """Of sampling parameters, which are checked as those of all requests are."""
    for body in (ChatBody, CompletionBody, ResponsesBody, MessagesBody, Options):
        for name, schema in definitions[body.__name__]["properties"].items():
            found = bounds(RENAMED.get(name, name) if body is Options else name)
            for one in schema.get("anyOf", [schema]) if found is not None else ():
                if one.get("type") in ("integer", "number"):
                    one.update(found)
    score_only: Json = definitions[CompletionBody.__name__]["properties"]["max_tokens"]["anyOf"][0]
    score_only["minimum"] = 0  # with `echo`


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
