"""engine_replica: an engine as a deployment of Ray Serve.

Requests do not go through Serve's handles, which take milliseconds for each message: a gateway connects to each replica
(`replica.py`). What Serve knows of a replica, and tells to gateways, is its address.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from ray import serve
from ray.util import get_node_ip_address

from kvcellar.cluster.address import Address
from kvcellar.engine.messages import VERSION

log = logging.getLogger("kvcellar.cluster")

LEAVE_SECONDS = 10.0  # for gateways to move requests to other replicas
WRITE_SECONDS = 25.0  # for what is to be stored


class EngineReplica:
    """One engine, on one device. Raises what the load of its model raises: then Serve starts another one."""

    def __init__(self, model: str | None, settings: Mapping[str, Any], prefill: bool) -> None:
        """`prefill`: it computes prompts, and others go on with their requests."""
        began = time.monotonic()
        from kvcellar.cluster.replica import Replica  # imports torch, which neither gateways nor commands need

        self._replica = Replica(model, settings, get_node_ip_address(), began)
        self._prefill = prefill
        self._name = serve.get_replica_context().replica_id.unique_id

    def record_replica_metadata(self) -> dict[str, Any]:
        """Its `Address`, as Serve tells it to the routers of gateways."""
        found = self._replica
        address = Address(self._name, *found.address, found.secret, VERSION, found.weights, found.block, self._prefill)
        return msgspec.to_builtins(address)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.meter.read()

    async def meet(self, gateway: object) -> str:
        """A gateway lets its router know it (`gateway.py`)."""
        return self._name

    def check_health(self) -> None:
        """Raises for an engine that has ended."""
        if not self._replica.alive:
            raise RuntimeError("the engine of this replica has ended")

    async def __del__(self) -> None:
        """Serve awaits it before it ends the process."""
        with suppress(AttributeError):  # the model could not be loaded
            await asyncio.to_thread(self._replica.leave, LEAVE_SECONDS, WRITE_SECONDS)
