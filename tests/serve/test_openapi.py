"""/openapi.json is a valid document of every route, and what the server returns has the shapes that it declares."""

import json
import re

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.api_errors import AnthropicError, ApiError, HealthError, OllamaError, OpenAIError
from kvcellar.serve.http.body import BodyBudget
from kvcellar.serve.http.json_text import to_json
from kvcellar.serve.http.key_ring import KeyRing
from kvcellar.serve.http.lifecycle import Drain
from kvcellar.serve.http.reader_threads import ReaderThreads
from kvcellar.serve.http.server import build_app, hosting
from kvcellar.serve.metrics.engines import EngineCounts
from kvcellar.serve.openapi import ABOUT, document
from kvcellar.serve.routes import TABLE
from kvcellar.serve.shared import Shared
from tests.serve.declared import declared
from tests.serve.wire import CHAT, COMPLETIONS, chat, completion

DOCUMENT = document(TABLE)


def test_only_a_server_with_admin_keys_has_routes_of_operators(shared_engine):
    host, threads = hosting(shared_engine), ReaderThreads()
    for settings in (ServeSettings(), ServeSettings(admin_digests=(key_digest("an-admin-key"),))):
        counts, keys = EngineCounts(host), KeyRing(settings)
        app = build_app(Shared(host, settings, threads, BodyBudget(1), Drain(), counts, keys))
        paths = {re.sub(r":\w+\}", "}", one.path) for one in app.routes if isinstance(one, Route)}
        operated = bool(settings.admin_digests)
        assert paths == {path for (_, path), one in TABLE.items() if operated or one.api != "Operator"}
    threads.close()


def test_the_document_is_valid(http, engine):
    served = http.get("/openapi.json").json()
    assert served == DOCUMENT
    OpenAPIV31SpecValidator(served).validate()
    identities = [one["operationId"] for path in served["paths"].values() for one in path.values()]
    assert len(set(identities)) == len(identities) == len(TABLE)
    assert {one["name"] for one in served["tags"]} == {one.api for one in TABLE.values()} == set(ABOUT) - {"Inspector"}


def test_every_schema_has_the_name_of_its_type_and_fields_their_comments():
    schemas = DOCUMENT["components"]["schemas"]
    assert not [name for name in schemas if "__" in name], "two types have the same name"
    chat, options = schemas["ChatBody"]["properties"], schemas["Options"]["properties"]
    assert chat["temperature"]["description"] == "0: always the most likely token", "of a sampling parameter"
    assert chat["tools"]["description"].endswith("see tool calls"), "without a link to a file"
    assert schemas["OutputFormat"]["properties"].keys() == {"type", "schema"}, "by the names that clients send"
    counts = schemas["NamespaceContents"]
    assert counts["required"] == list(counts["properties"]), "fields with a default are always there, too"
    assert schemas["RecallFields"]["properties"]["asked"]["description"].startswith("tokens of the prompt")
    assert {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0} in chat["top_p"]["anyOf"]
    assert {"type": "number", "minimum": 0.01, "maximum": 100.0} in options["repeat_penalty"]["anyOf"]


def test_no_response_is_declared_for_whatever_is_sent():
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            assert "default" not in operation["responses"], (method, path)
            assert {"403", "431", "500", "503"} <= operation["responses"].keys(), (method, path)


def test_a_method_that_a_path_does_not_have_is_refused_with_all_that_it_has(http):
    for path in {path for (_, path), one in TABLE.items() if one.api != "Operator"}:
        response = http.patch(re.sub(r"{\w+}", "x", path))
        assert response.status_code == 405, path
        assert {method for method, of in TABLE if of == path} <= set(response.headers["allow"].split(", ")), path
    assert http.patch("/v1/responses/x").headers["allow"] == "DELETE, GET, HEAD"


def sent(**changes: object) -> bytes:
    model = {"id": "a", "object": "model", "created": 1, "owned_by": "kvcellar", "type": "model"}
    return json.dumps(model | {"display_name": "a", "created_at": "2026-01-01"} | changes).encode()


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (200, "application/json", sent(more=1)),
        (200, "application/json", sent(created=None)),
        (200, "application/json", b"{}"),
        (200, "text/plain", sent()),
        (404, "application/json", b'{"error": "no"}'),
        (418, "application/json", sent()),
    ],
)
def test_what_is_not_declared_is_found(status, kind, body):
    declared().check("GET", "/v1/models/owner/name", 200, "application/json", sent(max_model_len=8))
    with pytest.raises(AssertionError):
        declared().check("GET", "/v1/models/owner/name", status, kind, body)


def test_what_is_not_declared_is_found_in_a_stream():
    good, bad = b'data: {"type": "ping"}', b'data: {"type": "pong"}'
    declared().check("POST", "/v1/messages", 200, "text/event-stream", b"event: ping\n" + good + b"\n\n")
    with pytest.raises(AssertionError):
        declared().check("POST", "/v1/messages", 200, "text/event-stream", good + b"\n\n" + bad + b"\n\n")


def test_the_document_needs_a_key(shared_engine, engine):
    with Server(shared_engine, ServeSettings(port=0, key_digests=(key_digest("a-good-key"),))) as server:
        assert httpx.get(f"{server.url}/openapi.json").status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, completion(frob=1)), (CHAT, chat(frob=1)), (COMPLETIONS, completion(max_tokens="5"))],
)
def test_what_the_schema_of_a_body_refuses_the_server_refuses(http, path, body):
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": DOCUMENT["components"]}
    assert not Draft202012Validator(whole).is_valid(body)
    assert http.post(path, json=body).status_code == 400
    for extra in ({}, {"stop": "x"}, {"stop": ["x"]}, {"logit_bias": None}, {"metadata": {"a": "b"}}, {"audio": None}):
        valid = completion(**extra) if path == COMPLETIONS else chat(**extra)
        Draft202012Validator(whole).validate(valid)
        assert http.post(path, json=valid).status_code == 200


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/models", OpenAIError),
        ("/v1/messages", AnthropicError),
        ("/api/tags", OllamaError),
        ("/health", HealthError),
    ],
)
def test_an_error_that_no_route_declares_must_have_the_form_of_its_api(path, form):
    method = "POST" if path == "/v1/messages" else "GET"
    for one in (OpenAIError, AnthropicError, OllamaError, HealthError):
        body = to_json(one.of_error(ApiError(405, "x", code="y")))
        if one is form:
            declared().check(method, path, 405, "application/json", body)
        else:
            with pytest.raises(AssertionError, match=path):
                declared().check(method, path, 405, "application/json", body)
