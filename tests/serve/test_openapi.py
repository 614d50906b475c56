"""/openapi.json is a valid document of every route, and what the server returns has the shapes that it declares."""

import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.app import build_app
from kvcellar.serve.body import BodyBudget
from kvcellar.serve.drain import Drain
from kvcellar.serve.key_ring import KeyRing
from kvcellar.serve.metrics.engines import EngineCounts
from kvcellar.serve.one_engine import hosting
from kvcellar.serve.openapi.document import document
from kvcellar.serve.openapi.routes_table import ABOUT, TABLE
from kvcellar.serve.reader_threads import ReaderThreads
from kvcellar.serve.shared import Shared
from tests.serve.fake_engine import FakeEngine
from tests.serve.wire import CHAT, COMPLETIONS, chat, completion

DOCUMENT = document()


def routes(engine: FakeEngine) -> set[tuple[str, str]]:
    """Methods and paths of a server that has every kind of keys."""
    settings, host = ServeSettings(admin_digests=(key_digest("an-admin-key"),)), hosting(engine)
    threads, bodies = ReaderThreads(), BodyBudget(1)
    app = build_app(Shared(host, settings, threads, bodies, Drain(), EngineCounts(host), KeyRing(settings)))
    threads.close()
    found = [one for one in app.routes if isinstance(one, Route)]
    assert len(found) == len(app.routes)
    pairs = {(method, re.sub(r":\w+\}", "}", one.path)) for one in found for method in one.methods or ()}
    return {(method, path) for method, path in pairs if method != "HEAD" or ("GET", path) not in pairs}


def test_every_route_has_a_row_and_every_row_a_route(shared_engine):
    assert routes(shared_engine) == set(TABLE)


def test_the_document_is_valid(http, engine):
    served = http.get("/openapi.json").json()
    assert served == DOCUMENT
    OpenAPIV31SpecValidator(served).validate()
    identities = [one["operationId"] for path in served["paths"].values() for one in path.values()]
    assert len(set(identities)) == len(identities) == len(TABLE)
    assert {one["name"] for one in served["tags"]} == set(ABOUT) == {one.api for one in TABLE.values()}


def test_the_document_needs_a_key(shared_engine, engine):
    with Server(shared_engine, ServeSettings(port=0, key_digests=(key_digest("a-good-key"),))) as server:
        assert httpx.get(f"{server.url}/openapi.json").status_code == 401


def schema_of(method: str, path: str, status: str) -> dict[str, Any]:
    """The declared schema of a response, with all that it refers to."""
    content = DOCUMENT["paths"][path][method.lower()]["responses"][status]["content"]
    return {**content["application/json"]["schema"], "components": DOCUMENT["components"]}


SENT = {
    "models": ("GET", "/v1/models", "/v1/models", None),
    "a model": ("GET", "/v1/models/{name}", "/v1/models/cellar/fake-1", None),
    "a completion": ("POST", COMPLETIONS, COMPLETIONS, completion(n=2, max_tokens=2)),
    "a chat": ("POST", CHAT, CHAT, chat()),
    "tokens": ("POST", "/tokenize", "/tokenize", {"prompt": "hello"}),
    "text": ("POST", "/detokenize", "/detokenize", {"tokens": [104, 105]}),
    "health": ("GET", "/health", "/health", None),
    "version": ("GET", "/api/version", "/api/version", None),
    "tags": ("GET", "/api/tags", "/api/tags", None),
    "loaded": ("GET", "/api/ps", "/api/ps", None),
    "document": ("GET", "/openapi.json", "/openapi.json", None),
}


@pytest.mark.parametrize(("method", "path", "url", "body"), SENT.values(), ids=SENT)
def test_responses_have_the_declared_shape(http, method, path, url, body):
    response = http.request(method, url, json=body)
    assert response.status_code == 200, response.text
    Draft202012Validator(schema_of(method, path, "200")).validate(response.json())


@pytest.mark.parametrize("path", [path for method, path in TABLE if method == "POST" and TABLE[method, path].body])
def test_errors_have_the_declared_shape(http, path):
    for body in ({"no such field at all": {}}, []):
        response = http.post(path.replace("{name}", "x"), json=body)
        if response.status_code < 400 or path.startswith("/admin"):
            continue
        Draft202012Validator(schema_of("POST", path, "default")).validate(response.json())


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
