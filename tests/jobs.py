"""A module of a worker for tests: each job names what it does. `python -m tests.jobs SOCKET`."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Raw, Struct

from kvcellar.errors import BadRequest
from kvcellar.wire import decode
from kvcellar.worker import serve


class Setup(Struct):
    prefix: str


def opened(setup: Setup) -> Callable[[Raw], object]:
    if setup.prefix == "cannot start":
        sys.exit(3)
    kept: list[bytearray] = []

    def allocate(size: int) -> int:
        kept.append(bytearray(size))
        return len(kept)

    work: Mapping[str, Callable[..., object]] = {
        "echo": lambda value: setup.prefix + value,
        "refuse": refuse,
        "signal": die,
        "recurse": recurse,
        "allocate": allocate,
        "stall": stall,
        "wait": wait,
        "sleep": time.sleep,
        "ids": lambda: [os.getpid(), os.getppid()],
    }

    def run(what: Raw) -> object:
        name, *arguments = decode(what, list)
        return work[name](*arguments)

    return run


def refuse(why: str) -> None:
    raise BadRequest(why, "field", hint="a hint")


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def recurse() -> str:
    """In C, without a look at the stack."""
    sys.setrecursionlimit(10**9)
    nested: list[Any] = []
    for _ in range(10**6):
        nested = [nested]
    return repr(nested)


def stall() -> None:
    while True:
        pass


def wait(file: str) -> int:
    while not os.path.exists(file):
        time.sleep(0.001)
    return os.getpid()


if __name__ == "__main__":
    serve(Setup, opened, stack=1 << 22, memory=1 << 29)
