"""Replicas of an engine in this process, and an engine of all of them as a gateway has it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from kvcellar import BadRequest, Engine
from kvcellar.cluster.address import Address
from kvcellar.cluster.client import ClusterClient
from kvcellar.cluster.replica import Replica
from kvcellar.cluster.routing import Load, Router
from kvcellar.engine.messages import VERSION, Admitted, CheckInvariants, EngineEvent, Leaving, ReadStats, Submission
from kvcellar.frontend.front_end import FrontEnd
from kvcellar.frontend.thread_client import ThreadClient
from kvcellar.memory.prefix.kv_events import KvEvent
from tests.engine.places import eventually

PREFILL = "prefill"  # name of a replica for prompts


def address_of(
    name: str,
    replica: Replica,
    *,
    version: str = VERSION,
    weights: str = "same",
    prefill: bool = False,
    made: str = "",
) -> Address:
    return Address(name, *replica.address, replica.secret, version, weights, replica.block, prefill, made)


class Unmeasured(Router):
    """Takes all replicas for equally fast. One whose first prompt was slow, as on a busy machine, would lose the next
    prompts to others, which have to compute what it has."""

    def load(self, replica: str, load: Load) -> None:
        super().load(replica, replace(load, prefill_speed=None, read_speed=None))


def client_of(
    settings: Mapping[str, Any] | None = None,
    *,
    to_zero: bool = False,
    made: str = "",
    router: type[Router] = Router,
) -> ClusterClient:
    adapter = (settings or {}).get("adapter")
    made_router = partial(router, most_blocks=1 << 16, clock=time.monotonic)
    return ClusterClient(made_router, adapter=adapter, to_zero=to_zero, made=made)


def states(client: ClusterClient) -> dict[str, str]:
    """By replica; of one that is refused, why."""
    return {one.name: one.why if one.state == "refused" else one.state for one in client.replicas}


@contextmanager
def of_replicas(model: Path | str | None, settings: Mapping[str, Any], count: int = 1) -> Iterator[Engine]:
    """It is closed before its replicas."""
    plain = without_store(settings)
    with ExitStack() as opened:
        path, began = None if model is None else str(model), time.monotonic()
        replicas = [opened.enter_context(closing(Replica(path, settings, "127.0.0.1", began))) for _ in range(count)]
        addresses = [address_of(f"replica-{number}", one) for number, one in enumerate(replicas)]
        yield opened.enter_context(of_addresses(addresses, plain))


def without_store(settings: Mapping[str, Any]) -> dict[str, Any]:
    """For front ends: engines have it."""
    return {name: value for name, value in settings.items() if name != "store"}


@contextmanager
def of_addresses(addresses: Sequence[Address], settings: Mapping[str, Any]) -> Iterator[Engine]:
    client = client_of(settings)
    client.found(addresses)
    client.wait()
    with closing(Engine.of(client, **settings)) as engine:
        yield engine


class _Watched:
    """The engine of a replica, as its front ends have it."""

    def __init__(self, replica: "FaultyReplica", client: ThreadClient) -> None:
        self._replica, self._client = replica, client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> None:
        self._replica.gate.wait()
        self._replica.taken.append(submission)
        self._client.submit(submission, partial(self._replica.told, submission, deliver))

    def ask(self, control: Any, source: Any = None) -> Any:
        if isinstance(control, self._replica.refuses):
            raise BadRequest("this replica does not do that")
        return self._client.ask(control, source)

    def cancel(self, number: int) -> None:
        self._replica.cancelled.append(number)
        self._client.cancel(number)


def busy(front: FrontEnd) -> bool:
    """Whether it has requests that are not done."""
    return bool(front._numbers or front._submitting)


class FaultyReplica(Replica):
    """Does what it is told to: to gateways that is a death, though its engine lives."""

    def __init__(self, model: Path | str, settings: Mapping[str, Any]) -> None:
        self.gate = threading.Event()  # requests are taken in once it is set
        self.mend()
        super().__init__(str(model), settings, "127.0.0.1", time.monotonic())

    def mend(self) -> None:
        """It is one without faults, which nothing was asked of."""
        self.gate.set()
        self.down = False  # it accepts no connections
        self.deaf = False  # it publishes no KV events
        self.refuses: type | tuple[()] = ()  # controls
        self.steps = 0  # until `at_step` is called, of those that tell something
        self.at_step: Callable[[], None] | None = None
        self.fatal: Callable[[Submission], bool] = lambda submission: False  # it dies when it begins with such a one
        self.deaths = 0
        self.taken: list[Submission] = []
        self.cancelled: list[int] = []
        self._leaving = False

    def die(self) -> None:
        """At once, and start again unless it stays down."""
        self.deaths += 1
        for front in self._fronts:
            front._link.close()

    def die_for_good(self) -> None:
        self.down = True
        self.die()

    def _failed(self) -> None:
        """In place of the end of this process."""
        self.die_for_good()

    def says_that_it_leaves(self) -> None:
        self._leaving = True
        for front in self._fronts:
            front.outbox.put(Leaving())

    def told(self, submission: Submission, deliver: Callable[[EngineEvent], None], event: EngineEvent) -> None:
        deliver(event)
        if isinstance(event, Admitted) and self.fatal(submission):
            self.die()

    def _turned(self) -> None:
        if self.at_step is not None and any(front._step for front in self._fronts):
            self.steps -= 1
            if self.steps <= 0:
                at_step, self.at_step = self.at_step, None
                at_step()
        super()._turned()

    def _knows_secret(self, connection: socket.socket) -> bool:
        return super()._knows_secret(connection) and not self.down

    def _use(self, front: FrontEnd) -> None:
        front.client = cast("ThreadClient", _Watched(self, self._client))
        super()._use(front)

    def _told(self, front: FrontEnd, events: Sequence[KvEvent]) -> None:
        if not self.deaf:
            super()._told(front, events)

    def rests(self) -> None:
        """Wait until it has no request, and then assert that none holds anything."""
        eventually(lambda: not any(map(busy, self._fronts)), "its requests end")
        eventually(lambda: not (now := self._client.ask(ReadStats())).running + now.waiting, "all requests end")
        stats = self._client.ask(ReadStats())
        assert (stats.sequences, stats.cells_used, stats.rows_used) == (0, 0, 0)
        self._client.ask(CheckInvariants())


@contextmanager
def gateway(replicas: Mapping[str, Replica], **how: Any) -> Iterator[tuple[Engine, ClusterClient]]:
    """An engine of replicas, all of which are used. At the end, nothing is left of requests."""
    client = client_of()
    client.found([address_of(name, one, prefill=name == PREFILL, **how) for name, one in replicas.items()])
    with closing(client):
        eventually(lambda: set(states(client).values()) == {"connected"}, "all are used")
        client.wait()
        with closing(Engine.of(client)) as engine:
            yield engine, client
            eventually(lambda: not client._running, "all requests end")
            client.check()
            with client._changed:
                assert not client._held
                assert not any(client._counts.values())
                assert client._router is not None
                client._router.check()
                assert sorted(client._counts) == sorted(one.name for one in client._engines)
