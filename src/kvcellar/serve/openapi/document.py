"""document: the OpenAPI 3.1 document of a server, from the table of routes and the models that check bodies."""

import re
from typing import Any

from pydantic.json_schema import models_json_schema

from kvcellar.serve.health import OPEN
from kvcellar.serve.ignored_fields import NEUTRAL, NO_EFFECT
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.openapi.routes_table import ABOUT, TABLE, Api, Operation
from kvcellar.version import __version__

ERROR_OF: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
OLLAMA_ERROR: dict[str, Any] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
ERRORS = {"Error": ERROR_OF, "OllamaError": OLLAMA_ERROR, "AnthropicError": ANTHROPIC_ERROR}
ERROR_NAMES: dict[Api, str] = {"Ollama": "OllamaError", "Anthropic": "AnthropicError"}
JSON = "application/json"


def document() -> dict[str, Any]:
    """The whole document, as JSON."""
    bodies = sorted({one.body for one in TABLE.values() if one.body is not None}, key=lambda body: body.__qualname__)
    references, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    found = definitions.get("$defs", {})
    for body in (ChatBody, CompletionBody):
        _add_ignored(found[body.__name__]["properties"])
    schemas = {body: references[body, "validation"] for body in bodies}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in TABLE.items():
        schema = schemas[operation.body] if operation.body is not None else None
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, schema)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvcellar",
            "version": __version__,
            "description": "Routes of a kvcellar server. A server without admin keys has no routes below /admin/.",
        },
        "tags": [{"name": name, "description": about} for name, about in ABOUT.items()],
        "paths": paths,
        "security": [{"bearer": []}, {"header": []}, {}],
        "components": {
            "schemas": {**found, **ERRORS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _add_ignored(properties: dict[str, Any]) -> None:
    """Fields that are accepted without being implemented."""
    for name, why in NO_EFFECT.items():
        properties.setdefault(name, {"description": f"Ignored: {why}."})
    for name, values in NEUTRAL.items():
        properties.setdefault(name, {"enum": list(values), "description": "Only values that change nothing."})


def _operation(method: str, path: str, operation: Operation, schema: Any) -> dict[str, Any]:
    error = ERROR_NAMES.get(operation.api, "Error")
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.about,
        "tags": [operation.api],
        "responses": {
            "200": {"description": "Success.", **_content(operation)},
            "default": {
                "description": "An error: 4xx is for the client to correct, 5xx is not.",
                "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{error}"}}},
            },
        },
    }
    if names := re.findall(r"\{(\w+)\}", path):
        found["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    if schema is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    elif operation.binary is not None:
        found["requestBody"] = {"required": True, "content": {operation.binary: {"schema": {}}}}
    if path in OPEN:
        found["security"] = [{}]
    return found


def _content(operation: Operation) -> dict[str, Any]:
    kinds = {JSON: operation.answer, operation.media: {}, operation.streams: {}}
    content = {kind: {"schema": schema} for kind, schema in kinds.items() if kind is not None and schema is not None}
    return {"content": content} if content else {}
