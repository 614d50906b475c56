"""A client that compares every response with the OpenAPI document: a status, a content type or a field that is not
declared fails the test that got it."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from kvcellar.inspector.routes import OPERATIONS
from kvcellar.serve.http.api_errors import error_format
from kvcellar.serve.openapi import document
from kvcellar.serve.routes import TABLE

Json = dict[str, Any]
STREAMS = ("text/event-stream", "application/x-ndjson")
NO_ROUTE = b'"message":"there is no such route"'  # a server without admin keys has fewer
BEFORE_ROUTES = (400, 405, 408, 431)  # statuses of requests that are not valid HTTP, or have another method


def closed(schema: Any) -> Any:
    """The same schema, in which objects of declared fields have no others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


class Declared:
    """The responses that a document declares."""

    def __init__(self, document: Json) -> None:
        self.document, self._components = document, closed(document["components"])
        self._paths = [(re.compile(_pattern(path)), path) for path in sorted(document["paths"], key=_least_general)]
        self._validators: dict[tuple[str, str, str, str], Draft202012Validator] = {}

    def path_of(self, url: str) -> str | None:
        return next((path for pattern, path in self._paths if pattern.fullmatch(url)), None)

    def check(self, method: str, url: str, status: int, content_type: str, body: bytes) -> None:
        path = self.path_of(url)
        operation = self.document["paths"][path].get(method.lower()) if path is not None else None
        if path is None or operation is None:
            return
        where = f"{method} {path}"
        declared = operation["responses"].get(str(status))
        if declared is None and (status in BEFORE_ROUTES or NO_ROUTE in body):
            self._check_error(method, url, content_type, body)
            return
        assert declared is not None, f"{where}: the status {status} is not declared: {body[:300]!r}"
        content = self._resolved(declared).get("content", {})
        kind = content_type.partition(";")[0]
        if not content:
            assert method == "HEAD" or not body, f"{where}: a body of {status} is not declared: {body[:300]!r}"
            return
        assert kind in content, f"{where}: {kind!r} of {status} is not declared"
        if kind == "application/json" or kind in STREAMS:
            validator = self._validator(path, method, str(status), kind)
            for value in _values(kind, body):
                for error in validator.iter_errors(value):
                    raise AssertionError(f"{where}, {status}: {error.json_path}: {error.message[:500]}")

    def _check_error(self, method: str, url: str, content_type: str, body: bytes) -> None:
        """An error that no route declares has the form of the API that has the path."""
        assert content_type.partition(";")[0] == "application/json", f"{method} {url}: an error of {content_type!r}"
        if method == "HEAD":
            return
        form = {"$ref": f"#/components/schemas/{error_format(url).__name__}", "components": self._components}
        for error in Draft202012Validator(form).iter_errors(json.loads(body)):
            raise AssertionError(f"{method} {url}: {error.json_path}: {error.message[:500]}")

    def _resolved(self, value: Json) -> Json:
        return self._components["responses"][value["$ref"].split("/")[-1]] if "$ref" in value else value

    def _validator(self, path: str, method: str, status: str, kind: str) -> Draft202012Validator:
        if (key := (path, method, status, kind)) not in self._validators:
            response = self._resolved(self.document["paths"][path][method.lower()]["responses"][status])
            schema = closed(response["content"][kind]["schema"])
            self._validators[key] = Draft202012Validator({**schema, "components": self._components})
        return self._validators[key]


def _pattern(path: str) -> str:
    """Of the URLs of a path. Names of models have slashes."""
    one = ".+" if path == "/v1/models/{name}" else "[^/]+"
    return re.sub(r"\\\{\w+\\\}", one, re.escape(path))


def _least_general(path: str) -> tuple[int, str]:
    return path.count("{"), path


def _values(kind: str, body: bytes) -> Iterator[Any]:
    """The JSON of a body, of each line, or of each event."""
    if kind == "application/json":
        yield json.loads(body)
        return
    for line in body.decode().split("\n"):
        text = line.removeprefix("data: ") if kind == STREAMS[0] else line
        if text and (kind != STREAMS[0] or line.startswith("data: ")) and text != "[DONE]":
            yield json.loads(text)


@cache
def declared() -> Declared:
    """Of a server with its inspector."""
    return Declared(document({**TABLE, **OPERATIONS}))


class DeclaredClient(httpx.Client):
    """Responses that a test reads as they come are not compared."""

    def request(self, method: str, url: Any, **fields: Any) -> httpx.Response:  # type: ignore[override]
        response = super().request(method, url, **fields)
        headers: Mapping[str, str] = response.headers
        kind = headers.get("content-type", "")
        declared().check(method, response.url.path, response.status_code, kind, response.content)
        return response
