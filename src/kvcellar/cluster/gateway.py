"""gateway: the front end of a cluster, as a deployment of Ray Serve: every API, templates, tokenizers, checks and
metrics. No torch.

Each gateway has a connection to each replica of each engine, and a router of its own for each engine.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RunningReplica
from starlette.types import ASGIApp

from kvcellar.cluster.address import Address
from kvcellar.cluster.client import ClusterClient
from kvcellar.cluster.node_files import KeyFiles, follow, settings_here
from kvcellar.cluster.routing import Router
from kvcellar.engine.load.settings import settings_of
from kvcellar.frontend.documents import documents_of
from kvcellar.frontend.engine import Engine
from kvcellar.inspector.routes import inspector
from kvcellar.serve.http.lifecycle import Startup
from kvcellar.serve.http.server import ServerOptions, served, shared_by
from kvcellar.serve.models.model_manager import Limits, ModelManager
from kvcellar.serve.models.model_spec import ModelSpec
from kvcellar.serve.settings import ServeSettings

log = logging.getLogger("kvcellar.cluster")

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
MOST_BLOCKS = 1 << 20  # that a router remembers: about 100 bytes each
MEET_SECONDS, AGAIN_SECONDS = 0.5, 5.0  # between calls that meet replicas: until one has got through, and afterwards


class Listener:
    """Is told of all replicas of an engine by the router of a handle. It stays in this process: what is sent of it to a
    replica is nothing."""

    def __init__(self, client: ClusterClient, found: dict["Listener", list[Address]]) -> None:
        """`found`: what all listeners of an engine have been told, which has a handle for each kind of replicas."""
        self._client, self._found, self.heard = client, found, False

    @property
    def asks(self) -> bool:
        """Whether a call for a replica is to be made: one starts a replica where there is none."""
        return self._client.asked

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return str, ()

    def seen(self, replicas: Sequence[RunningReplica]) -> None:
        self.heard = True
        told = [one.replica_metadata for one in replicas if one.replica_metadata]
        self._found[self] = [msgspec.convert(one, Address) for one in told]
        self._client.found([one for some in self._found.values() for one in some])


@dataclass(frozen=True)
class Deployed:
    """The replicas of a model, as gateways are told of them."""

    handles: Sequence[DeploymentHandle[Any]]  # of each kind
    settings: Mapping[str, Any]  # of its engines, without those that are in files
    made: str  # digest of what its engines are made of
    to_zero: bool  # whether there may be none


class Gateway:
    """One front end of all engines."""

    def __init__(self, engines: Mapping[str, Deployed], settings: Mapping[str, Any], keys: KeyFiles) -> None:
        """`engines`: by the names of their models, the default first."""
        if os.environ.get(HA_PROXY) != "1":
            log.warning("streams pass Serve's own proxy, which is slow: start Ray with %s=1 for HAProxy", HA_PROXY)
        self._engines = engines
        self._options = {name: settings_here(one.settings) for name, one in engines.items()}
        self._clients = {name: _client(one, self._options[name].get("adapter")) for name, one in engines.items()}
        self._startup, self._keys = Startup(tuple(engines)), keys
        limits = Limits(max_bytes=0, max_models=len(engines))
        documents = documents_of(settings_of(next(iter(self._options.values()))))
        self._host = ModelManager(
            None, limits, unload=lambda engine: engine.close(), startup=self._startup, documents=documents
        )
        checked = ServeSettings(**settings, **keys.read().fields())
        self._shared = shared_by(self._host, checked, ServerOptions(read_keys=keys.read))
        self._tasks: set[asyncio.Task[None]] = set()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve sends it requests, and ends gateways that it replaces, once this has returned."""
        for name, one in self._engines.items():
            found = dict[Listener, list[Address]]()
            for handle in one.handles:
                self._tasks.add(asyncio.create_task(_meet(handle, Listener(self._clients[name], found))))
        await asyncio.to_thread(self._load)
        self._tasks.add(asyncio.create_task(follow(self._keys, self._shared.keys)))
        return served(self._shared, inspector)

    def _load(self) -> None:
        """On a thread of its own: until each engine has a replica."""
        for at, (name, client) in enumerate(self._clients.items()):
            self._startup.loads(at)
            self._host.open(ModelSpec(name, name, 0, 0, 0, partial(self._engine, name, client)))
            for adapter in self._options[name].get("adapters") or ():
                self._host.name_adapter(adapter, name)

    def _engine(self, name: str, client: ClusterClient, cache: int, going_on: Any) -> Engine:
        client.wait(self._startup.going_on)
        return Engine.of(client, **self._options[name])

    def check_health(self) -> None:
        """Raises where this gateway cannot serve any more: Serve starts another one."""
        if not self._host.healthy or any(one.refuses_all for one in self._clients.values()):
            raise RuntimeError("the engines of this gateway cannot be used; see its log")

    async def __del__(self) -> None:
        """Serve awaits it after the last request."""
        self._shared.drain.start()
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._startup.stop()
        self._host.close()
        for client in self._clients.values():
            client.close()
        self._shared.threads.close()


def _client(engine: Deployed, adapter: str | None) -> ClusterClient:
    router = partial(Router, most_blocks=MOST_BLOCKS, clock=time.monotonic)
    return ClusterClient(router, adapter=adapter, to_zero=engine.to_zero, made=engine.made)


async def _meet(handle: DeploymentHandle[Any], listener: Listener) -> None:
    """Let the router of a handle have the listener, again and again: Serve makes another router when it has got the
    configuration of the deployment, or another one."""
    while True:
        seconds = MEET_SECONDS
        if listener.asks:
            try:
                await handle.meet.remote(listener)
            except Exception as error:  # noqa: BLE001 - the replica that was called has died, or there is none
                log.info("no replica was met: %s", error)
            seconds = AGAIN_SECONDS if listener.heard else MEET_SECONDS
        await asyncio.sleep(seconds)
