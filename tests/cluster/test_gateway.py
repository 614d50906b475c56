"""Gateways, as Ray Serve makes them: each with handles, of which it learns where replicas are. Ray is not started."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")

from ray import cloudpickle

from kvcellar import Engine
from kvcellar.cluster import app, node_files
from kvcellar.cluster.gateway import HA_PROXY, Deployed, Gateway
from kvcellar.cluster.replica import Replica
from kvcellar.serve.settings import ServeSettings
from tests.cluster.replicas import address_of
from tests.engine.places import SMALL, model_in

KEYS = ("key-number-one-of-a-client", "key-number-two-of-a-client")
PROMPT = "Who keeps the cellar? " * 6
ASKED: Any = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Handle:
    """Serve's handle of replicas, of which it tells who meets them."""

    def __init__(self, replicas: Mapping[str, Replica], made: str = "") -> None:
        self._replicas, self._made, self.meet = replicas, made, SimpleNamespace(remote=self._meet)

    async def _meet(self, listener: Any) -> None:
        told = [address_of(name, one, made=self._made) for name, one in self._replicas.items()]
        listener.seen([SimpleNamespace(replica_metadata=msgspec.to_builtins(one)) for one in told])


@pytest.fixture(autouse=True)
def end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What Serve awaits, and does not leave to the collector."""
    found = Gateway.__del__
    monkeypatch.delattr(Gateway, "__del__")
    yield found
    gc.collect()


@asynccontextmanager
async def running(end: Any, application: Any, handles: Mapping[str, Sequence[Handle]]) -> AsyncIterator[Any]:
    """A gateway that was made as `app` describes it, and a client of it."""
    engines, settings, keys = application._bound_deployment.init_args
    told = {name: Deployed(handles[name], one.settings, one.made, one.to_zero) for name, one in engines.items()}
    gateway = Gateway(told, settings, cloudpickle.loads(cloudpickle.dumps(keys)))
    try:
        transport = httpx.ASGITransport(app=await gateway.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client
        gateway.check_health()
    finally:
        await end(gateway)


async def completed(client: httpx.AsyncClient, model: str, key: str) -> tuple[str, int]:
    """The text, and cached tokens."""
    headers = {"authorization": f"Bearer {key}"}
    response = await client.post("/v1/completions", json=ASKED | {"model": model}, headers=headers)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_models_with_options_of_their_own_are_served_by_two_gateways_as_by_engines(end: Any, tmp_path: Path) -> None:
    """A draft and quantised weights, an adapter, and two API keys."""
    one, two = (str(model_in(tmp_path / name)) for name in ("one", "two"))
    (tmp_path / "keys").write_text("\n".join(KEYS))
    (tmp_path / "keys").chmod(0o600)
    own = {"one": {"weights": "int8", "draft": "ngram"}, "two": {"adapters": {"style": f"{two}/adapter"}}}
    models = [{"path": one, "engine": own["one"]}, {"path": two, "engine": own["two"]}]
    shared = {"gateways": 2, "engine": SMALL | {"store_remote": f"file://{tmp_path}/store"}}
    application = app({"models": models, "api_key_file": str(tmp_path / "keys"), **shared})
    wanted: dict[str, str] = {}
    options: dict[str, Any] = {name: ASKED[name] for name in ("max_tokens", "temperature", "ignore_eos")}
    for name, path in (("one", one), ("two", two)):
        with Engine(path, **SMALL, **own[name]) as engine:
            wanted[name] = engine.generate(PROMPT, **options).text
            if name == "two":
                wanted["style"] = engine.generate(PROMPT, adapter="style", **options).text
    assert wanted["style"] != wanted["two"]

    async def ask(handles: Mapping[str, Sequence[Handle]]) -> None:
        async with AsyncExitStack() as opened:
            clients = [await opened.enter_async_context(running(end, application, handles)) for _ in range(2)]
            listed = await clients[0].get("/v1/models", headers={"authorization": f"Bearer {KEYS[0]}"})
            assert [found["id"] for found in listed.json()["data"]] == ["one", "two", "style"]
            assert (await clients[0].get("/v1/models")).status_code == 401
            for name, text in wanted.items():
                for key in KEYS:
                    found = [await completed(client, name, key) for client in clients]
                    assert [said for said, _ in found] == [text] * 2
                    assert found[0][1] == 0 < found[1][1]

    with ExitStack() as opened:
        engines, _, _ = application._bound_deployment.init_args
        handles: dict[str, Sequence[Handle]] = {}
        for name, path in (("one", one), ("two", two)):
            told = engines[name].settings
            replica = opened.enter_context(closing(Replica(path, told, "127.0.0.1", time.monotonic())))
            handles[name] = [Handle({name: replica}, engines[name].made)]
        asyncio.run(ask(handles))


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = str(model_in(tmp_path_factory.mktemp("model")))
    with closing(Replica(model, SMALL, "127.0.0.1", time.monotonic())) as found:
        yield found


def test_a_gateway_is_there_once_a_replica_of_its_own_is(end: Any, replica: Replica, monkeypatch: Any) -> None:
    """Serve ends those that it replaces when it is."""
    monkeypatch.setattr("kvcellar.cluster.gateway.MEET_SECONDS", 0.01)
    monkeypatch.setattr("kvcellar.cluster.gateway.AGAIN_SECONDS", 0.01)
    application = app({"engine": SMALL})
    handle = Handle({"old": replica}, "made before")

    async def update() -> None:
        async def begin() -> int:
            async with running(end, application, {"embedded": [handle]}) as client:
                return (await client.get("/ready")).status_code

        begins = asyncio.create_task(begin())
        await asyncio.sleep(1.0)
        assert not begins.done()
        handle._made = application._bound_deployment.init_args[0]["embedded"].made
        handle._replicas = {"new": replica}
        assert await begins == 200

    asyncio.run(update())


def test_two_gateways_take_keys_that_have_changed(end: Any, replica: Replica, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(node_files, "LOOK_SECONDS", 0.01)
    file = tmp_path / "keys.txt"
    file.write_text(KEYS[0])
    application = app({"engine": SMALL, "api_key_file": str(file)})
    made = application._bound_deployment.init_args[0]["embedded"].made

    async def accepts(client: httpx.AsyncClient, key: str) -> bool:
        response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        return response.status_code == 200

    async def ask() -> None:
        async with AsyncExitStack() as opened:
            handles = {"embedded": [Handle({"one": replica}, made)]}
            clients = [await opened.enter_async_context(running(end, application, handles)) for _ in range(2)]
            assert [await accepts(one, KEYS[0]) for one in clients] == [True, True]
            file.write_text(f"{KEYS[1]}\n")
            while any([await accepts(one, KEYS[0]) for one in clients]):
                await asyncio.sleep(0.01)
            assert [await accepts(one, KEYS[1]) for one in clients] == [True, True]

    asyncio.run(ask())


@pytest.mark.parametrize("proxy", ["1", None])
def test_a_gateway_behind_a_slow_proxy_says_so(end: Any, monkeypatch: Any, caplog: Any, proxy: str | None) -> None:
    monkeypatch.delenv(HA_PROXY, raising=False)
    if proxy is not None:
        monkeypatch.setenv(HA_PROXY, proxy)
    engines, settings, keys = app({"engine": SMALL})._bound_deployment.init_args
    with caplog.at_level(logging.WARNING):
        gateway = Gateway(engines, settings, keys)
    asyncio.run(end(gateway))
    assert (f"start Ray with {HA_PROXY}=1" in caplog.text) == (proxy is None)
    assert ServeSettings(**settings).drain_seconds == 600
