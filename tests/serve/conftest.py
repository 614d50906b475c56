"""One server with a fake engine for all tests of this folder, and a check after each that no request is running."""

from collections.abc import Iterator

import httpx
import pytest

from kvcellar.serve import Server, ServeSettings
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine, Script
from tests.tiers.places import documents, server_url  # noqa: F401  # pytest finds them by name


@pytest.fixture(scope="session", autouse=True)
def gateways(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--gateways"):
        yield
        return
    from tests.cluster.two_gateways import two_gateways  # imports torch

    with two_gateways():
        yield


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def server(shared_engine: FakeEngine) -> Iterator[Server]:
    with Server(shared_engine, ServeSettings(port=0, max_body_bytes=2**20, ping_seconds=0.2)) as server:
        yield server


@pytest.fixture
def engine(shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine of `server`. After a test no request may be running."""
    shared_engine.script, shared_engine.healthy = Script(), True
    shared_engine.cancels = shared_engine.rejected = 0
    shared_engine.seen.clear()
    shared_engine.rendered.clear()
    shared_engine.replies.use(None)
    yield shared_engine
    assert shared_engine.rest(), "a request was left running"


@pytest.fixture(scope="session")
def shared_http(server: Server) -> Iterator[httpx.Client]:
    with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def http(shared_http: httpx.Client, engine: FakeEngine) -> httpx.Client:
    """A client of `server`."""
    return shared_http
