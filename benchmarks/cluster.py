"""cluster: engine replicas and gateways, each in a process of its own, for the rows `cluster-kills` and `cluster-cost`.

They are those of `kvcellar cluster serve` without Ray: here this process starts them, starts others in place of those
that were killed, and tells gateways of all replicas, as Ray Serve does.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from random import Random
from typing import Any, NamedTuple

from kvcellar.cluster.address import Address
from kvcellar.cluster.client import ClusterClient, ReplicaLink
from kvcellar.cluster.routing import Router
from kvcellar.engine.messages import VERSION, FromEngine
from kvcellar.frontend.client import EngineClient
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.fork_process import LOADS
from kvcellar.serve import Server, ServeSettings

PRELOADED = [*LOADS, "kvcellar.cluster.replica", "kvcellar.serve", "benchmarks.cluster"]
OF_NODE = 2  # engines that are killed at once
Settings = Mapping[str, Any]


class Cost(NamedTuple):
    """Of a front end since its start: nanoseconds of CPU time, and messages that it got from engines."""

    cpu: int
    messages: int


class Place:
    """A process, and the other end of its pipe."""

    def __init__(self, run: Callable[..., None], *given: Any, fresh: bool = False) -> None:
        """Returns once it is ready; `ready` is what it says then. `fresh`: a new Python, which imports all it needs."""
        forks, spawns = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        forks.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = forks.Pipe()
        make = spawns.Process if fresh else forks.Process
        self.process: BaseProcess = make(target=run, args=(theirs, *given), daemon=True)
        self.process.start()
        theirs.close()
        self._lock = threading.Lock()
        self.ready: Any = self.pipe.recv()

    def tell(self, addresses: Sequence[Address]) -> None:
        with self._lock, suppress(OSError):  # it was killed
            self.pipe.send(addresses)

    def cost(self) -> Cost:
        with self._lock:
            self.pipe.send(None)
            return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


class _Counting(ClusterClient):
    messages = 0

    def _take(self, engine: ReplicaLink, message: FromEngine) -> None:
        self.messages += 1
        super()._take(engine, message)


def replica(pipe: Connection, model: str | None, settings: Settings) -> None:
    from kvcellar.cluster.replica import Replica

    with closing(Replica(model, settings, "127.0.0.1", time.monotonic())) as found:
        pipe.send((found.address, found.secret, found.weights, found.block))
        with suppress(EOFError):
            pipe.recv()


def gateway(pipe: Connection, settings: Settings, addresses: Sequence[Address]) -> None:
    client = _Counting(partial(Router, most_blocks=1 << 20, clock=time.monotonic))
    client.found(addresses)
    client.wait()
    _serve(pipe, client, settings, client.found)


def server(pipe: Connection, model: str | None, settings: Settings) -> None:
    """A single server, whose engine is in a process of its own."""
    from kvcellar.frontend.process_client import ProcessClient

    class Counting(ProcessClient):
        messages = 0

        def _take(self, engine: Any, message: FromEngine) -> None:
            self.messages += 1
            super()._take(engine, message)

    _serve(pipe, Counting(model, settings), settings, lambda addresses: None)


def _serve(pipe: Connection, client: EngineClient, settings: Settings, found: Callable[[Any], None]) -> None:
    counted: Any = client
    with closing(Engine.of(client, **settings)) as engine, Server(engine, ServeSettings(port=0)) as serving:
        pipe.send((serving.port, engine.model.name))
        with suppress(EOFError):
            while True:
                if (told := pipe.recv()) is None:
                    pipe.send(Cost(time.process_time_ns(), counted.messages))
                else:
                    found(told)


class Fleet:
    """`settings` of the engines; `documents`: where gateways keep what they remember."""

    def __init__(self, model: str | None, settings: Settings, documents: str, *, replicas: int, gateways: int) -> None:
        self._model, self._settings = model, settings
        self._documents = {"store_remote": f"file://{documents}"}
        self._lock, self._draw = threading.Lock(), Random(replicas)
        self._made = 0
        self._starting: list[threading.Thread] = []
        self.replicas: dict[str, tuple[Place, Address]] = {}
        self.gateways: list[Place] = []
        for _ in range(replicas):
            self._add()
        for _ in range(gateways):
            self.gateways.append(self._gateway())

    @property
    def model(self) -> str:
        """Its name."""
        return self.gateways[0].ready[1]

    @property
    def ports(self) -> list[int]:
        return [one.ready[0] for one in self.gateways]

    def add(self, *, fresh: bool = False) -> str:
        """Returns once all gateways were told of it."""
        name = self._add(fresh=fresh)
        self._tell()
        return name

    def kill_engine(self) -> None:
        """As soon as another one runs."""
        self._kill(1)

    def kill_node(self) -> None:
        """Its engines at once, as soon as another one runs."""
        self._kill(OF_NODE)

    def _kill(self, number: int) -> None:
        """Others are started in their place, and this returns before."""
        while len(self.replicas) <= number:
            time.sleep(0.05)
        with self._lock:
            places = [self.replicas.pop(name)[0] for name in self._draw.sample(sorted(self.replicas), number)]
        for place in places:
            assert place.process.pid is not None
            os.kill(place.process.pid, signal.SIGKILL)
        for place in places:
            place.kill() if place.process.is_alive() else place.close()
            self._starting.append(threading.Thread(target=self.add))
            self._starting[-1].start()

    def kill_gateway(self, at: int) -> None:
        """The one at this port. Returns when another one has taken its place."""
        self.gateways.pop(at).kill()
        self.gateways.append(self._gateway())
        self._tell()

    def settle(self) -> None:
        """Until what was killed is replaced."""
        while self._starting:
            self._starting.pop().join()

    def close(self) -> None:
        self.settle()
        for one in [*self.gateways, *(place for place, _ in self.replicas.values())]:
            one.close()

    def _add(self, *, fresh: bool = False) -> str:
        place = Place(replica, self._model, self._settings, fresh=fresh)
        (host, port), secret, weights, block = place.ready
        with self._lock:
            name, self._made = f"replica-{self._made}", self._made + 1
            self.replicas[name] = place, Address(name, host, port, secret, VERSION, weights, block)
        return name

    def _gateway(self) -> Place:
        return Place(gateway, self._documents, self._addresses())

    def _addresses(self) -> list[Address]:
        with self._lock:
            return [address for _, address in self.replicas.values()]

    def _tell(self) -> None:
        for one in self.gateways:
            one.tell(self._addresses())
