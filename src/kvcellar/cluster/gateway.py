"""gateway: the front end of a cluster, as a deployment of Ray Serve: every API, templates, tokenizers, checks and
metrics. No torch.

Each gateway has a connection to each replica of each engine, and a router of its own for each engine.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RunningReplica
from starlette.types import ASGIApp

from kvcellar.cluster.address import Address
from kvcellar.cluster.client import ClusterClient
from kvcellar.cluster.routing import Router
from kvcellar.engine.load.settings import EngineOptions, settings_of
from kvcellar.errors import KvcellarError
from kvcellar.frontend.documents import documents_of
from kvcellar.frontend.engine import Engine
from kvcellar.inspector.routes import inspector
from kvcellar.serve.http.lifecycle import LoadThread, Startup
from kvcellar.serve.http.server import ServerOptions, served, shared_by
from kvcellar.serve.models.model_manager import Limits, ModelManager
from kvcellar.serve.models.model_spec import ModelSpec
from kvcellar.serve.settings import ServeSettings

log = logging.getLogger("kvcellar.cluster")

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


class Gateway:
    """One front end of all engines."""

    def __init__(
        self,
        engines: Mapping[str, tuple[Sequence[DeploymentHandle[Any]], EngineOptions]],
        settings: Mapping[str, Any],
        *,
        to_zero: bool = False,
    ) -> None:
        """`engines`: the replicas of each model, by its name, and what of their settings a front end has to know.
        `to_zero`: there may be none."""
        self._handles = {name: handles for name, (handles, _) in engines.items()}
        self._clients = {name: _client(options, to_zero=to_zero) for name, (_, options) in engines.items()}
        self._options = {name: options for name, (_, options) in engines.items()}
        self._startup, self._failed = Startup(tuple(engines)), False
        limits = Limits(max_bytes=0, max_models=len(engines))
        documents = documents_of(settings_of(next(iter(self._options.values()))))
        self._host = ModelManager(
            None, limits, unload=lambda engine: engine.close(), startup=self._startup, documents=documents
        )
        self._shared = shared_by(self._host, ServeSettings(**settings), ServerOptions())
        self._loading = LoadThread(self._startup, self._load, self._load_failed)
        self._meetings: set[asyncio.Task[None]] = set()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        self._startup.begin()
        for name, handles in self._handles.items():
            found = dict[Listener, list[Address]]()
            for handle in handles:
                self._meetings.add(asyncio.create_task(_meet(handle, Listener(self._clients[name], found))))
        self._loading.start(lambda: None)
        return served(self._shared, inspector)

    def _load(self) -> None:
        """On a thread of its own: until each engine has a replica."""
        for at, (name, client) in enumerate(self._clients.items()):
            self._startup.loads(at)
            self._host.open(ModelSpec(name, name, 0, 0, 0, partial(self._engine, name, client)))
            for adapter in self._options[name].get("adapters") or ():
                self._host.name_adapter(adapter)

    def _engine(self, name: str, client: ClusterClient, cache: int, going_on: Any) -> Engine:
        client.wait(self._startup.going_on)
        return Engine.of(client, **self._options[name])

    def _load_failed(self) -> None:
        self._failed = True

    def check_health(self) -> None:
        """Raises where this gateway cannot serve any more: Serve starts another one."""
        if self._failed or (not self._startup.loading and not self._host.healthy):
            raise RuntimeError("the engines of this gateway cannot be used; see its log")

    async def __del__(self) -> None:
        """Serve awaits it after the last request."""
        self._shared.drain.start()
        for meeting in self._meetings:
            meeting.cancel()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        try:
            self._loading.join()
        except KvcellarError as error:
            log.error("the engines could not be used: %s", error)
        self._host.close()
        for client in self._clients.values():
            client.close()
        self._shared.threads.close()


def _client(options: EngineOptions, *, to_zero: bool) -> ClusterClient:
    router = partial(Router, most_blocks=MOST_BLOCKS, clock=time.monotonic)
    return ClusterClient(router, adapter=options.get("adapter"), to_zero=to_zero)


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
