"""Costly parsing takes a third of the time of the event loop, for any number of connections."""

import asyncio
import heapq
import json
from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.serve.http import event_loop
from kvcellar.serve.http.connection import Connection
from kvcellar.serve.http.event_loop import FREE, REST, SHARE, CpuBudget, ParseQueue
from tests.serve.wire import COMPLETIONS, completion, connected, read_response, request


class FakeLoop:
    """An event loop with timers and simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + delay, next(self._order), call))

    def run(self) -> None:
        while self._timers:
            moment, _, call = heapq.heappop(self._timers)
            self.now = max(self.now, moment)
            call()


@given(st.lists(st.lists(st.floats(1e-4, 0.01), min_size=1, max_size=30), min_size=1, max_size=8))
def test_costly_connections_get_their_budgets_and_a_third_of_the_time(costs) -> None:
    loop, direct, queued = FakeLoop(), [0.0] * len(costs), 0.0

    def parse(number: int) -> None:
        loop.now += costs[number][0]
        budgets[number].spend(costs[number].pop(0))
        if costs[number]:
            loop.call_later(0.0, partial(arrive, number))

    def arrive(number: int) -> None:
        if budgets[number].used_up:
            queue.add(partial(wait, number))
        else:
            direct[number] += costs[number][0]
            parse(number)

    def wait(number: int) -> None:
        nonlocal queued
        queued += costs[number][0]
        parse(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_loop, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
        queue, budgets = ParseQueue(clock=loop.time), [CpuBudget(clock=loop.time) for _ in costs]
        for number in range(len(costs)):
            loop.call_later(0.0, partial(arrive, number))
        loop.run()
    assert not any(costs), "a piece was never parsed"
    assert queued <= SHARE * loop.now + 0.01
    assert max(direct) <= FREE + SHARE * loop.now + 0.01


def test_a_budget_is_refilled_over_time() -> None:
    loop = FakeLoop()
    budget = CpuBudget(clock=loop.time)
    budget.spend(FREE + 0.01)
    assert budget.used_up
    loop.now += 0.01 / SHARE + 1e-6
    assert not budget.used_up
    loop.now += 1000.0
    budget.spend(FREE)
    assert budget.used_up, "more than the budget was saved up"


def test_an_empty_queue_stops_and_starts_again() -> None:
    async def play() -> list[str]:
        queue, done = ParseQueue(), asyncio.Event()
        seen: list[str] = []
        queue.add(lambda: seen.append("first"))
        await asyncio.sleep(3 * REST)
        queue.add(lambda: (seen.append("second"), done.set()))
        await done.wait()
        return seen

    assert asyncio.run(play()) == ["first", "second"]


def test_the_queue_continues_after_a_job_that_raises() -> None:
    async def play() -> bool:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        queue, done = ParseQueue(), asyncio.Event()
        queue.add(lambda: 1 // 0)
        queue.add(done.set)
        return await done.wait()

    assert asyncio.run(play())


def test_a_body_parsed_from_the_queue_is_complete(server, engine, monkeypatch) -> None:
    held = 0
    queued = Connection._parse_queued

    def counted(self: Connection, data: bytes) -> None:
        nonlocal held
        held += 1
        queued(self, data)

    monkeypatch.setattr(Connection, "_parse_queued", counted)
    monkeypatch.setattr(CpuBudget, "used_up", property(lambda self: True))
    body = json.dumps(completion("a" * 5_000, max_tokens=1)).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = request(COMPLETIONS, None, "Content-Type: application/json", "Transfer-Encoding: chunked", method="POST")
    with connected(server) as wire:
        for _ in range(2):
            wire.sendall(head + chunks + b"0\r\n\r\n")
            assert read_response(wire)[0] == 200
    assert [len(prompt) for prompt, _ in engine.seen] == [5_000, 5_000]
    assert held >= 2 * len(chunks) // 2048


def test_queued_data_of_a_disconnected_client_is_dropped(server, engine, monkeypatch) -> None:
    monkeypatch.setattr(CpuBudget, "used_up", property(lambda self: True))
    for _ in range(20):
        with connected(server) as wire:
            wire.sendall(request(COMPLETIONS, completion("a", max_tokens=1)))
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, completion("a", max_tokens=1)))
        assert read_response(wire)[0] == 200
