"""/openapi.json is a valid document of every route, and what the server returns has the shapes that it declares."""

import re

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
    assert {one["name"] for one in served["tags"]} == {one.api for one in TABLE.values()} == set(ABOUT) - {"Inspector"}


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
