"""Replicas of an engine in this process, and an engine of all of them as a gateway has it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvcellar import Engine
from kvcellar.cluster.address import Address
from kvcellar.cluster.client import ClusterClient
from kvcellar.cluster.replica import Replica
from kvcellar.cluster.routing import Router
from kvcellar.engine.messages import VERSION


def address_of(name: str, replica: Replica, *, version: str = VERSION, weights: str = "same") -> Address:
    return Address(name, *replica.address, replica.secret, version, weights, replica.block)


def client_of(settings: Mapping[str, Any] | None = None) -> ClusterClient:
    adapter = (settings or {}).get("adapter")
    return ClusterClient(partial(Router, most_blocks=1 << 16, clock=time.monotonic), adapter=adapter)


@contextmanager
def of_replicas(model: Path | str | None, settings: Mapping[str, Any], count: int = 1) -> Iterator[Engine]:
    """It is closed before its replicas."""
    plain = {name: value for name, value in settings.items() if name != "store"}
    with ExitStack() as opened:
        replicas = [
            opened.enter_context(closing(Replica(None if model is None else str(model), settings, "127.0.0.1")))
            for _ in range(count)
        ]
        client = client_of(settings)
        client.found([address_of(f"replica-{number}", one) for number, one in enumerate(replicas)])
        client.wait()
        yield opened.enter_context(closing(Engine.of(client, **plain)))
