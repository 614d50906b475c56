"""A server listens before its models are loaded: it is alive, not ready, and refuses requests until they are."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kvcellar.errors import EngineClosed, ModelRefused
from kvcellar.progress import Progress
from kvcellar.serve import ModelManager, ServeSettings, key_digest
from kvcellar.serve.http.lifecycle import Startup
from kvcellar.serve.http.server import Server, bind, run
from kvcellar.serve.models.model_manager import Limits
from kvcellar.serve.models.model_spec import ModelSpec
from tests.serve.fake_engine import PATIENCE, FakeEngine, FakeModel
from tests.serve.wire import CHAT, chat, error_of

KEYED = ServeSettings(port=0, key_digests=(key_digest("a-good-key"),))


class Starting:
    """A server whose two models are loaded when the test says; `run` is in a thread, as a signal would end it."""

    def __init__(self, settings: ServeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines = [FakeEngine(FakeModel(name)) for name in ("first", "second")]
        self.host = ModelManager(None, Limits(0, 2), unload=lambda engine: None, startup=Startup(("first", "second")))
        self.entered, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: Exception | None = None
        self.raised: BaseException | None = None
        self.served = threading.Event()
        self.servers: list[Server] = []
        listener = bind(settings)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made = Server.__init__

        def remembered(server: Server, *given: Any, **options: Any) -> None:
            made(server, *given, **options)
            self.servers.append(server)

        monkeypatch.setattr(Server, "__init__", remembered)

        def body() -> None:
            try:
                run(self.host, settings, listener=listener, load=self.load, ready=lambda url: self.served.set())
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.raised = error

        self.thread = threading.Thread(target=body)
        self.thread.start()
        assert self.entered.acquire(timeout=PATIENCE)

    def load(self) -> None:
        for at, engine in enumerate(self.engines):
            self.host.startup.loads(at)
            self.wait()
            self.host.startup.heard(Progress("loading weights", 3, 8))
            self.wait()
            self.host.startup.going_on()
            if self.failure is not None:
                raise self.failure
            name = engine.model.name
            self.host.open(ModelSpec(name, name, 0, 0, 0, lambda cache, going_on, one=engine: one))

    def wait(self) -> None:
        self.entered.release()
        assert self.go_on.acquire(timeout=PATIENCE)

    def next(self) -> None:
        """Let the load go on to where it waits again."""
        self.go_on.release()
        assert self.entered.acquire(timeout=PATIENCE)

    def finish(self) -> None:
        for _ in range(4):
            self.go_on.release()
        assert self.served.wait(PATIENCE)

    def end(self) -> None:
        self.servers[0].stop()
        for _ in range(4):
            self.go_on.release()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.host.close()
        for engine in self.engines:
            engine.close()


Start = Callable[[ServeSettings], Any]


@pytest.fixture
def starting(monkeypatch) -> Start:
    @contextmanager
    def start(settings: ServeSettings) -> Iterator[tuple[Starting, httpx.Client]]:
        one = Starting(settings, monkeypatch)
        try:
            with httpx.Client(base_url=one.url, timeout=PATIENCE, trust_env=False) as client:
                yield one, client
        finally:
            one.end()

    return start


def test_the_port_answers_while_models_are_loaded_and_says_how_far_that_is(starting):
    with starting(ServeSettings(port=0)) as (one, client):
        assert client.get("/live").json() == client.get("/ping").json() == {"status": "ok"}
        healthy = client.get("/health")
        assert (healthy.status_code, healthy.json()) == (
            503,
            {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}},
        )
        told = client.get("/ready")
        assert (told.status_code, error_of(told)["code"]) == (503, "loading_model")
        assert error_of(told)["message"] == (
            "the server is loading the model first, 0 of 2 are loaded; try again later"
        )
        one.next()
        assert "first, 0 of 2 are loaded: loading weights, 3 of 8; try" in error_of(client.get("/ready"))["message"]
        one.next()
        assert "second, 1 of 2 are loaded; try" in error_of(client.get("/ready"))["message"]
        one.finish()
        assert client.get("/ready").json() == {"status": "ready", "model": "first"}
        assert client.get("/health").json() == {"status": "ok", "model": "first"}
        assert client.post(CHAT, json=chat(model="second")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/api/tags", "/no-such-route", "/kvcellar/conversations"])
def test_requests_are_refused_until_the_models_are_loaded(starting, path):
    with starting(ServeSettings(port=0)) as (one, client):
        told = client.get(path)
        assert (told.status_code, told.headers["retry-after"]) == (503, "5")
        assert "the server is loading the model first" in told.text
        one.finish()
        assert client.get(path).status_code in (200, 404)


def test_each_api_gets_the_error_in_its_own_format(starting):
    with starting(ServeSettings(port=0)) as (_, client):
        assert client.post(CHAT, json=chat()).json()["error"]["code"] == "loading_model"
        assert client.post("/v1/messages", json={}).json()["error"]["type"] == "overloaded_error"
        assert "is loading" in client.post("/api/chat", json={}).json()["error"]


def test_without_a_key_no_model_is_named(starting):
    with starting(KEYED) as (_, client):
        told = client.get("/ready")
        assert (told.status_code, "first" in told.text) == (503, False)
        assert "the model, 0 of 2 are loaded" in error_of(told)["message"]
        assert client.get("/v1/models").status_code == 401
        keyed = client.get("/v1/models", headers={"authorization": "Bearer a-good-key"})
        assert "the model first" in error_of(keyed)["message"]


def test_a_server_that_is_stopped_while_it_loads_ends_the_load(starting):
    with starting(ServeSettings(port=0)) as (one, _):
        stop = one.host.startup.stop

        def stopped() -> None:
            stop()
            one.go_on.release()

        one.host.startup.stop = stopped
        one.servers[0].stop()
        one.thread.join(PATIENCE)
        assert not one.thread.is_alive()
        assert one.raised is None
        assert one.host.names == []
        assert not one.served.is_set()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(starting):
    with starting(ServeSettings(port=0)) as (one, _):
        one.failure = ModelRefused("its weights are pickled")
        one.go_on.release()
        one.go_on.release()
        one.thread.join(PATIENCE)
        assert not one.thread.is_alive()
        assert one.raised is one.failure


def test_a_load_that_ends_by_itself_as_if_closed_is_an_error(starting):
    with starting(ServeSettings(port=0)) as (one, _):
        one.failure = EngineClosed("something closed it")
        one.go_on.release()
        one.go_on.release()
        one.thread.join(PATIENCE)
        assert one.raised is one.failure


def test_signals_are_heard_until_a_load_that_was_stopped_has_ended(monkeypatch):
    host = ModelManager(None, Limits(0, 1), unload=lambda engine: None)
    heard: list[int] = []
    missed: list[int] = []
    stopped, second = threading.Event(), threading.Event()

    def signalled(number: int) -> None:
        heard.append(number)
        if len(heard) == 2:
            second.set()

    def load() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)
        assert second.wait(PATIENCE)
        host.startup.stopped = True
        host.startup.going_on()

    def miss(number: int, frame: object) -> None:
        missed.append(number)
        second.set()

    monkeypatch.setattr(host.startup, "stop", stopped.set)  # called after the server has ended
    before = signal.signal(signal.SIGINT, miss)
    try:
        run(host, ServeSettings(port=0), load=load, signalled=signalled)
        assert signal.getsignal(signal.SIGINT) == miss
    finally:
        signal.signal(signal.SIGINT, before)
        host.close()
    assert (heard, missed) == ([signal.SIGINT, signal.SIGINT], [])
