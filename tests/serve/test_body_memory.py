"""The memory of bodies: the budget is held for as long as the bytes are, and both are given back when a request was
submitted; only what a response needs stays, and counts."""

import asyncio
import json
import threading
import time
import tracemalloc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.body import SHORT_BODY, BodyBudget, RequestBody
from kvcellar.serve.http.key_ring import KeyRing
from kvcellar.serve.http.lifecycle import Drain, Startup
from kvcellar.serve.http.middleware import RequestMiddleware
from kvcellar.serve.shared import Mounted
from tests.serve.fake_engine import FakeEngine, FakeModel
from tests.serve.wire import connected, read_until

SPACE, TEXT = 800_000, 200_000  # bytes of a body
MESSAGES = [{"role": "user", "content": "x" * TEXT}]
PARSED = "*/serve/body.py", "*/serve/parsing.py"  # where the objects of a body are made


@pytest.fixture(scope="module")
def long_server():
    budgets = list[BodyBudget]()

    def made(limit: int) -> BodyBudget:
        budgets.append(BodyBudget(limit))
        return budgets[-1]

    with pytest.MonkeyPatch.context() as patch, FakeEngine(FakeModel(context=2 * TEXT)) as engine:
        patch.setattr("kvcellar.serve.http.server.BodyBudget", made)
        with Server(engine, ServeSettings(port=0)) as server:
            yield SimpleNamespace(server=server, engine=engine, port=server.port, budget=budgets[0])


ROUTES = {
    "/v1/completions": {"prompt": "x" * TEXT, "max_tokens": 1, "stream": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1, "stream": True},
    "/v1/responses": {"input": "x" * TEXT, "max_output_tokens": 1, "store": False, "stream": True},
    "/api/generate": {"model": FakeModel().name, "prompt": "x" * TEXT, "options": {"num_predict": 1}},
    "/api/chat": {"model": FakeModel().name, "messages": MESSAGES, "options": {"num_predict": 1}},
}
KEEPING = {
    "echo": ("/v1/completions", {"prompt": "x" * TEXT, "max_tokens": 1, "echo": True}),
    "stored": ("/v1/responses", {"input": "x" * TEXT, "max_output_tokens": 1, "stream": True}),
    "tools": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "x" * TEXT}}],
            "tool_choice": "none",
            "max_tokens": 1,
        },
    ),
}


def sent(path: str, fields: dict[str, object]) -> bytes:
    body = json.dumps(fields).encode()
    body = body[:-1] + b" " * SPACE + b"}"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


def held(path: str, fields: dict[str, object], world: SimpleNamespace) -> tuple[int, int]:
    """The bytes of the body that are in memory, and those of the budget, while the answer is generated."""
    gate = threading.Event()
    with world.engine.scripted(gate=gate), connected(world.server) as wire:
        tracemalloc.start()
        try:
            wire.sendall(sent(path, fields))
            while world.engine.running < 1 or world.budget.used > SPACE:  # until the event loop has heard of it
                time.sleep(0.005)
            kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, one) for one in PARSED])
        finally:
            tracemalloc.stop()
        used = world.budget.used
        gate.set()
        read_until(wire, b"HTTP/1.1 200")
    assert world.engine.rest()
    return sum(trace.size for trace in kept.traces), used


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_is_not_in_memory_while_its_answer_is_generated(long_server, path):
    in_memory, used = held(path, ROUTES[path], long_server)
    assert in_memory < SHORT_BODY
    assert used < SHORT_BODY


@pytest.mark.parametrize("name", KEEPING)
def test_what_a_response_needs_of_its_body_counts_until_it_has_ended(long_server, name):
    in_memory, used = held(*KEEPING[name], long_server)
    assert in_memory < TEXT + SHORT_BODY
    assert in_memory - SHORT_BODY <= used + SHORT_BODY
    assert TEXT - SHORT_BODY <= used <= SPACE
    while long_server.budget.used:  # until the end of the response
        time.sleep(0.005)


def test_the_budget_is_held_for_as_long_as_the_bytes_are():
    budget = BodyBudget(10 * SHORT_BODY)
    body = RequestBody(budget)
    body.add(b" " * (5 * SHORT_BODY))
    assert budget.used == 4 * SHORT_BODY
    body.enter_thread()
    body.release()
    assert (len(body.data), budget.used) == (5 * SHORT_BODY, 4 * SHORT_BODY)
    body.leave_thread()
    assert (len(body.data), budget.used) == (0, 0)


@pytest.mark.parametrize(("kept", "counted"), [(0, 0), (SHORT_BODY, 0), (2 * SHORT_BODY, 1), (50 * SHORT_BODY, 4)])
def test_what_is_kept_counts_up_to_what_was_reserved(kept, counted):
    budget = BodyBudget(10 * SHORT_BODY)
    body = RequestBody(budget)
    body.add(b" " * (5 * SHORT_BODY))
    body.keep(kept)
    assert (len(body.data), budget.used) == (0, counted * SHORT_BODY)
    body.release()
    assert budget.used == 0


@pytest.mark.parametrize("error", [ApiError(400, "no"), RuntimeError("no")])
def test_an_error_is_sent_without_what_its_functions_had_in_memory(error):
    """The client may read it slowly."""
    refs = list[weakref.ref[RequestBody]]()

    async def app(scope: object, receive: object, send: object) -> None:
        body = RequestBody(BodyBudget(1))
        refs.append(weakref.ref(body))
        raise error

    async def send(message: object) -> None:
        assert refs[0]() is None

    settings = ServeSettings()
    host = SimpleNamespace(startup=Startup())
    server: Any = SimpleNamespace(settings=settings, keys=KeyRing(settings), drain=Drain(), host=host)
    middleware = RequestMiddleware(app, server, None, lambda request: None, Mounted(()))
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", b"localhost")]}
    asyncio.run(middleware(scope, send, send))
    assert refs
