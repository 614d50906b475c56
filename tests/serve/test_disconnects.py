"""Random requests of every API whose clients leave at random moments: nothing is left over."""

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcellar.serve import Server, ServeSettings
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import MODEL, Wire, connected, read_response, request

ASKED = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 60},
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 60},
    "/v1/responses": {"input": "hello", "max_output_tokens": 60},
    "/v1/messages": {"messages": ASKED, "max_tokens": 60},
    "/api/chat": {"messages": ASKED, "options": {"num_predict": 60}},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 60}},
    "/tokenize": {"prompt": "hello"},
}


def leave(wire: Wire, chance: random.Random) -> None:
    """Send a request or a part of it, read some of what comes, and go."""
    path = chance.choice(list(BODIES))
    stream = {} if path == "/tokenize" else {"stream": chance.random() < 0.5}
    sent = request(path, {"model": MODEL, **stream, **BODIES[path]}, "Connection: close")
    part = chance.random() < 0.3
    wire.sendall(sent[: chance.randrange(len(sent))] if part else sent)
    if not part:
        for _ in range(chance.randrange(4)):
            if not wire.recv():
                break
    wire.close(reset=chance.random() < 0.5)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_clients_that_leave_at_any_moment_leave_nothing_behind(request: pytest.FixtureRequest) -> None:
    """After 300 of them (`--long`: 10 000), the server answers, no request runs, and when it has ended none of
    its threads is left, and as many files are open as after a server with ten of them."""
    chance = random.Random(14)
    others = set(threading.enumerate())  # of the server that tests share
    left_by(chance, 10)
    join_threads(others)
    files = open_files()
    left_by(chance, 10_000 if request.config.getoption("--long") else 300)
    join_threads(others)
    assert open_files() == files


def join_threads(others: set[threading.Thread]) -> None:
    """Wait until all threads but these have ended: a server that stops does not wait for those that read bodies."""
    for thread in set(threading.enumerate()) - others:
        thread.join(PATIENCE)
    assert set(threading.enumerate()) <= others


def left_by(chance: random.Random, count: int) -> None:
    """Start a server, which so many clients leave, and end it."""
    with FakeEngine() as engine, Server(engine, ServeSettings(port=0)) as server:
        with engine.scripted(delay=0.0005, output=b"x" * 60):
            for _ in range(count):
                leave(Wire(server.port), chance)
        assert engine.rest(), "a request was left running"
        with connected(server) as wire:
            wire.sendall(ask_once())
            status, body = read_response(wire)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")


def ask_once() -> bytes:
    return request("/v1/completions", {"model": MODEL, "prompt": "hello"})
