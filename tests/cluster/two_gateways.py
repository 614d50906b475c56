"""`pytest --gateways`: each engine of a test is two replicas, and each server two gateways before them, which get its
requests in turn. What gateways have to remember is in a directory that both have. How fast a replica was is ignored:
which one gets a request depends on what it has.

An engine without a model (`FakeEngine`) is the one engine of both gateways. A model that is an object is saved first.
Where a test looks into its engine, it sees the first replica. Not changed are engines on a thread or in a process that
the test chooses, and servers of several models.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedModel

from kvcellar.cluster.replica import Replica
from kvcellar.engine.load.settings import settings_of
from kvcellar.frontend.documents import DIRECTORY, Documents
from kvcellar.frontend.engine import Engine
from kvcellar.serve.http import server as server_module
from kvcellar.serve.models.model_manager import ModelManager
from kvcellar.serve.settings import ServeSettings
from kvcellar.serve.shared import Mount, Shared, nothing
from tests.cluster.replicas import Unmeasured, address_of, client_of

REPLICAS = 2
OF_ONE = ("/admin/requests", "/metrics")  # what a gateway tells of its own requests


class InTurn:
    """Each request goes to the next application; what asks for the record of the one before, to the same one."""

    def __init__(self, *apps: ASGIApp) -> None:
        self._turns = cycle(apps)
        self._last = next(self._turns)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(OF_ONE):
            self._last = next(self._turns)
        await self._last(scope, receive, send)


class Twins:
    """The engines of the second gateways, and what is closed with those of the first ones."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, iter(range(10**9))
        self._opened: dict[int, tuple[Engine, Replica, ExitStack]] = {}  # by id of the engine of the first gateway

    def place(self) -> Path:
        return self._folder / str(next(self._numbers))

    def open(self, engine: Engine, model: str | None, settings: Mapping[str, Any]) -> None:
        front = {name: value for name, value in settings.items() if name != "store"}
        front.setdefault("store_remote", f"{DIRECTORY}://{self.place()}")
        with ExitStack() as opened:
            replicas = [
                opened.enter_context(closing(Replica(model, settings, "127.0.0.1", time.monotonic())))
                for _ in range(REPLICAS)
            ]
            addresses = [address_of(f"replica-{number}", one) for number, one in enumerate(replicas)]
            clients = [opened.enter_context(closing(client_of(settings, router=Unmeasured))) for _ in range(2)]
            for client in clients:
                client.found(addresses)
                while {one.state for one in client.replicas} != {"connected"}:
                    client.wait()
            engine._open(clients[0], settings_of(front))
            other = opened.enter_context(closing(Engine.of(clients[1], **front)))
            self._opened[id(engine)] = other, replicas[0], opened.pop_all()

    def of(self, engine: Any) -> Any:
        return self._opened[id(engine)][0] if id(engine) in self._opened else engine

    def close(self, engine: Engine) -> None:
        if (opened := self._opened.pop(id(engine), None)) is not None:
            opened[2].close()

    def inside(self, engine: Engine) -> Replica | None:
        return self._opened[id(engine)][1] if id(engine) in self._opened else None


@contextmanager
def two_gateways() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        twins = Twins(Path(folder))
        _patch_engines(patch, twins)
        _patch_servers(patch, twins)
        yield


def _patch_engines(patch: pytest.MonkeyPatch, twins: Twins) -> None:
    init, close, built = Engine.__init__, Engine.close, Engine._built.fget

    def opened(self: Engine, model: Any = None, **options: Any) -> None:
        own = {name: options.get(name) for name in ("thread", "process")}
        if any(own.values()):
            init(self, model, **options)
            return
        if isinstance(model, PreTrainedModel):
            model.save_pretrained(path := twins.place())
            model = path
        settings = {name: value for name, value in options.items() if name not in ("progress", *own)}
        settings_of(settings)
        twins.open(self, None if model is None else str(model), settings)

    def closed(self: Engine) -> None:
        close(self)
        twins.close(self)

    def inside(self: Engine) -> Any:
        replica = twins.inside(self)
        return built(self) if replica is None else replica._client.built

    patch.setattr(Engine, "__init__", opened)
    patch.setattr(Engine, "_built", property(inside))
    patch.setattr(Engine, "close", closed)


def _patch_servers(patch: pytest.MonkeyPatch, twins: Twins) -> None:
    hosting, shared_by, served = server_module.hosting, server_module.shared_by, server_module.served
    engines: dict[int, Any] = {}  # by the id of their host
    others: dict[int, Shared] = {}  # of the second gateways, by the id of the host of the first

    def hosted(engine: Any) -> ModelManager:
        if not engine.documents.durable:
            engine.documents = Documents(directory=twins.place())
        host = hosting(engine)
        engines[id(host)] = engine
        return host

    def shared(host: ModelManager, settings: ServeSettings, options: Any) -> Shared:
        first = shared_by(host, settings, options)
        if (engine := engines.pop(id(host), None)) is None:
            return first
        twin = twins.of(engine)
        twin.documents = engine.documents
        second = shared_by(hosting(twin), settings, options)
        close = first.threads.close
        first.threads.close = lambda: (close(), second.threads.close())  # type: ignore[method-assign]
        others[id(host)] = replace(second, drain=first.drain, keys=first.keys)
        return first

    def both(one: Shared, mount: Mount = nothing) -> ASGIApp:
        if (other := others.pop(id(one.host), None)) is None:
            return served(one, mount)
        return InTurn(served(one, mount), served(other, mount))

    patch.setattr(server_module, "hosting", hosted)
    patch.setattr(server_module, "shared_by", shared)
    patch.setattr(server_module, "served", both)
