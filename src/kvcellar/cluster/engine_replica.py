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
from kvcellar.cluster.node_files import settings_here
from kvcellar.engine.messages import VERSION

log = logging.getLogger("kvcellar.cluster")

WRITE_SECONDS = 25.0  # for what is to be stored


class EngineReplica:
    """One engine, on one device. Raises what the load of its model raises: then Serve starts another one."""

    def __init__(
        self, model: str | None, settings: Mapping[str, Any], made: str, drain: float, *, prefill: bool
    ) -> None:
        """`made`: a digest of these two. `drain`: for how many seconds gateways may need it once it is to end.
        `prefill`: it computes prompts, and others go on with their requests."""
        began = time.monotonic()
        from kvcellar.cluster.replica import Replica  # imports torch, which neither gateways nor commands need

        self._replica = Replica(model, settings_here(settings), get_node_ip_address(), began)
        self._made, self._drain, self._prefill = made, drain, prefill
        self._name = serve.get_replica_context().replica_id.unique_id

    def record_replica_metadata(self) -> dict[str, Any]:
        """Its `Address`, as Serve tells it to the routers of gateways."""
        found = self._replica
        about = VERSION, found.weights, found.block, self._prefill, self._made
        return msgspec.to_builtins(Address(self._name, *found.address, found.secret, *about))

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
            await asyncio.to_thread(self._replica.leave, self._drain, WRITE_SECONDS)
