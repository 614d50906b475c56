"""A replica in an actor of Ray, which a process of its own starts."""

import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvcellar.cluster.address import Address


class Actor:
    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        from kvcellar.cluster.replica import Replica

        self.replica = Replica(model, settings, "127.0.0.1", time.monotonic())

    def address(self) -> Address:
        from tests.cluster.replicas import address_of

        return address_of("actor", self.replica)


def run(pipe: Connection, model: str, settings: Mapping[str, Any]) -> None:
    """Until the other end of the pipe is closed."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
    import ray  # which reads the environment

    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        actor = ray.remote(Actor).remote(model, settings)
        pipe.send(ray.get(actor.address.remote()))
        with suppress(EOFError):
            pipe.recv()
    finally:
        ray.shutdown()


@contextmanager
def actor_of(model: Path, settings: Mapping[str, Any]) -> Iterator[Address]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, str(model), dict(settings)), daemon=True)
    process.start()
    theirs.close()
    with closing(ours):
        yield ours.recv()
    process.join()
