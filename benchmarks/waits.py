"""waits: how long a short request waits beside long answers and requests for many outputs, of its own key and another.

The server is a process of its own with default settings and two keys. Of the clients, `heavy` ask for one of `OUTPUTS`
outputs and of `ANSWERS` tokens, the others for one token behind a short prompt; each asks again when it was answered.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gaps import LARGE_VOCABULARY
from benchmarks.row import Given, Lines
from benchmarks.serve_load import write_tokenizer
from kvcellar.bench.network import TINY, Size, write
from kvcellar.errors import KvcellarError

KEYS = ("sk-of-one", "sk-of-another")
OUTPUTS = (1, 2, 8, 32, 64)
ANSWERS = (250, 1000, 4000)
PROMPTS = (8, 64, 400)  # tokens of the prompts of heavy requests
SHORT = 8
PAUSE = 0.5  # seconds between two short requests of a client, at most
START = 120.0  # seconds that the server may take to be ready
PATIENCE = 600.0  # seconds for an answer


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured."""

    size: Size = LARGE_VOCABULARY
    clients: int = 64
    heavy: int = 8
    seconds: float = 180.0


SMALLEST = Extent(TINY, clients=4, heavy=2, seconds=2.0)  # to test the bench


class Found(NamedTuple):
    """How many `short` requests of one key were answered, the longest of their waits and the one that half of them do
    not exceed, in seconds; how many `heavy` ones were, and how many of both were refused or cut off."""

    short: int
    longest: float
    half: float
    heavy: int
    failed: int


class _Key:
    def __init__(self) -> None:
        self.waits: list[float] = []
        self.heavy = self.failed = 0


def measure(extent: Extent, directory: Path) -> list[Found]:
    """For each of the two keys."""
    write(extent.size, directory)
    write_tokenizer(extent.size.vocabulary, directory)
    (directory / "keys").write_text("\n".join(KEYS))
    keys, over = {key: _Key() for key in KEYS}, threading.Event()
    with _server(directory) as port:
        clients = [
            threading.Thread(target=_client, args=(number, extent, port, keys, over), daemon=True)
            for number in range(extent.clients)
        ]
        for client in clients:
            client.start()
        over.wait(extent.seconds)
        over.set()
        for client in clients[extent.heavy :]:  # a short request that still waits has waited as long
            client.join(PATIENCE)
    return [
        Found(len(one.waits), max(one.waits), median(one.waits), one.heavy, one.failed)
        for one in keys.values()
        if one.waits
    ]


def _client(number: int, extent: Extent, port: int, keys: dict[str, _Key], over: threading.Event) -> None:
    draw, key = random.Random(number), KEYS[number % len(KEYS)]
    heavy, most = number < extent.heavy, extent.size.context - max(PROMPTS)
    while not over.is_set():
        body: dict[str, Any] = {"n": 1, "max_tokens": 1}
        if heavy:
            body = {"n": draw.choice(OUTPUTS), "max_tokens": min(most, draw.choice(ANSWERS))}
        prompt = [draw.randrange(3, extent.size.vocabulary) for _ in range(draw.choice(PROMPTS) if heavy else SHORT)]
        began = time.monotonic()
        status = _ask(port, key, body | {"prompt": prompt, "ignore_eos": True})
        if heavy:
            keys[key].heavy += status == 200
        else:
            keys[key].waits.append(time.monotonic() - began)
            over.wait(PAUSE * draw.random())
        keys[key].failed += status != 200 and not over.is_set()


def _ask(port: int, key: str, body: dict[str, Any]) -> int:
    """The status of the answer, all of which was read; 0 if the connection was closed."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


@contextmanager
def _server(directory: Path) -> Iterator[int]:
    """A server of the model in a directory. Yields its port when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvcellar", "serve", str(directory), "--port", str(port)]
    command += ["--api-key-file", str(directory / "keys")]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + START
        while not _ready(port):
            if server.poll() is not None or time.monotonic() > until:
                raise KvcellarError(f"the server did not start: {(directory / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield port
    finally:
        if server.poll() is None:
            os.kill(server.pid, signal.SIGKILL)
        server.wait()


def _ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def row(given: Given) -> Lines:
    found = measure(SMALLEST if given.quick else Extent(), given.directory)
    for one in found:
        yield (
            f"{one.longest:8.2f} s  the longest wait of {one.short} short requests of one key, half within "
            f"{one.half:.3f} s, beside {one.heavy} long ones; {one.failed} failed"
        )
    return [one._asdict() for one in found]
