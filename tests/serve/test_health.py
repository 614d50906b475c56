"""/health, /live, /ready and /ping: they need no key, tell nothing else, and /ready is 503 during shutdown."""

import asyncio
from contextlib import closing

import httpx
import pytest

from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.body import BodyBudget
from kvcellar.serve.http.key_ring import KeyRing
from kvcellar.serve.http.lifecycle import Drain
from kvcellar.serve.http.reader_threads import ReaderThreads
from kvcellar.serve.http.server import build_app, hosting
from kvcellar.serve.metrics.engines import EngineCounts
from kvcellar.serve.shared import Shared
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import MODEL, error_of

PATHS = ["/health", "/ready", "/live", "/ping"]
STATUS = {"/health": "ok", "/ready": "ready", "/live": "ok", "/ping": "ok"}


@pytest.fixture
def locked(shared_engine: FakeEngine, engine: FakeEngine):
    settings = ServeSettings(
        port=0, key_digests=(key_digest("a-good-key"),), admin_digests=(key_digest("an-admin-key"),)
    )
    with Server(shared_engine, settings) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
            yield client


@pytest.mark.parametrize("path", PATHS)
def test_without_keys_the_default_model_is_named(http, path):
    assert http.get(path).json() == {"status": STATUS[path], "model": MODEL}


@pytest.mark.parametrize("path", PATHS)
def test_no_key_is_needed_and_no_model_is_named(locked, path):
    for headers in ({}, {"authorization": "Bearer wrong"}):
        response = locked.get(path, headers=headers)
        assert (response.status_code, response.json()) == (200, {"status": STATUS[path]})
    assert (locked.head(path).status_code, locked.head(path).content) == (200, b"")


@pytest.mark.parametrize("path", ["/health/", "//health", "/HEALTH", "/health%2f", "/ready/x", "/v1/models"])
def test_a_path_that_is_not_exactly_one_of_these_needs_a_key(locked, path):
    assert locked.get(path).status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_a_failed_engine_is_neither_healthy_nor_ready(http, engine, path):
    engine.healthy = False
    response = http.get(path)
    assert response.status_code == 503
    if path == "/health":
        assert {**response.json()["error"], "message": ""} == {"code": 503, "message": "", "type": "unavailable_error"}
    else:
        assert error_of(response)["code"] == "engine_unhealthy"
    assert http.head(path).status_code == 503


def test_during_shutdown_the_server_is_alive_but_not_ready(shared_engine, engine):
    async def states() -> list[tuple[int, str]]:
        host = hosting(shared_engine)
        shared = Shared(
            host, ServeSettings(), threads, BodyBudget(1), Drain(), EngineCounts(host), KeyRing(ServeSettings())
        )
        transport = httpx.ASGITransport(build_app(shared))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            shared.drain.start()
            responses = [await client.get(path) for path in PATHS]
            return [(one.status_code, one.json().get("status") or error_of(one)["code"]) for one in responses]

    with closing(ReaderThreads()) as threads:
        assert asyncio.run(states()) == [(200, "ok"), (503, "shutting_down"), (200, "ok"), (200, "ok")]
