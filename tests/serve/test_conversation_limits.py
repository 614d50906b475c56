"""Work on named conversations does not stop other requests, and holds a bounded number of copies of them."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.types import Message, Scope

from kvcellar.frontend.transcript import Transcript
from kvcellar.memory.tiers import archive
from kvcellar.serve import ServeSettings
from kvcellar.serve.admin.conversations import WHOLE, WholeHandler
from kvcellar.serve.http.body import BodyBudget
from kvcellar.serve.http.key_ring import KeyRing
from kvcellar.serve.http.lifecycle import Drain
from kvcellar.serve.http.reader_threads import ReaderThreads
from kvcellar.serve.http.sending import SEND_BYTES
from kvcellar.serve.http.server import hosting
from kvcellar.serve.metrics.engines import EngineCounts
from kvcellar.serve.shared import Shared
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import CHAT, error_of

PATH = "/kvcellar/conversations"
WORDS = [{"role": "user", "content": "x"}]


@pytest.fixture
def name(http: httpx.Client, engine: FakeEngine) -> Iterator[str]:
    engine.conversations.create("limited", Transcript(chat=True))
    yield "limited"
    engine.conversations.delete("limited")


@pytest.mark.parametrize("key", ['"conversation"', '"\\u0063onversation"', '"conversatio\\u006E"'])
def test_short_requests_do_not_wait_for_conversations(http, engine, name, monkeypatch, key) -> None:
    free, reading = threading.Event(), threading.Semaphore(0)
    get = engine.conversations._archive.get

    def slow(owner: str, name: str) -> archive.Document | None:
        reading.release()
        assert free.wait(PATIENCE)
        return get(owner, name)

    monkeypatch.setattr(engine.conversations._archive, "get", slow)
    body = f'{{{key}: "limited", "messages": {json.dumps(WORDS)}}}'
    headers = {"content-type": "application/json"}
    with ThreadPoolExecutor(8) as clients:
        try:
            turn = clients.submit(http.post, CHAT, content=body, headers=headers)
            assert reading.acquire(timeout=PATIENCE)
            others = [clients.submit(http.get, f"{PATH}/{name}") for _ in range(7)]
            for _ in range(3):
                assert reading.acquire(timeout=PATIENCE)
            assert http.post(CHAT, json={"messages": WORDS}).status_code == 200
            assert not turn.done()
        finally:
            free.set()
        assert {one.result().status_code for one in (turn, *others)} == {200}


def test_a_turn_over_the_limit_of_a_conversation_is_not_added(http, engine, name, monkeypatch) -> None:
    monkeypatch.setattr(archive, "BODY_LIMIT", 1000)
    messages = [{"role": "user", "content": "x" * 500}]
    response = http.post(CHAT, json={"messages": messages, "conversation": name})
    assert response.status_code == 400
    assert "at most 1000 are allowed" in error_of(response)["message"]
    assert http.get(f"{PATH}/{name}").json()["messages"] == []


def test_a_client_that_does_not_read_holds_one_of_few_copies(engine, name) -> None:
    messages = [{"role": "user", "content": "é" * 300_000}, {"role": "assistant", "content": "y"}]
    given = Transcript(chat=True, messages=messages)
    engine.conversations.save(name, given)
    settings, threads = ServeSettings(), ReaderThreads()
    host, bodies = hosting(engine), BodyBudget(settings.bodies_bytes)
    handler = WholeHandler(
        Shared(host, settings, threads, bodies, Drain(), EngineCounts(host), KeyRing(ServeSettings()))
    )
    scope: Scope = {"type": "http", "path_params": {"name": name}, "state": {}}

    async def clients() -> list[list[Message]]:
        reads, begun = asyncio.Event(), asyncio.Semaphore(0)
        sent: list[list[Message]] = [[] for _ in range(WHOLE + 3)]

        async def client(found: list[Message]) -> None:
            async def send(message: Message) -> None:
                found.append(message)
                begun.release()
                await reads.wait()

            await handler(scope, asyncio.Event().wait, send)  # nothing is received

        running = [asyncio.create_task(client(found)) for found in sent]
        for _ in range(WHOLE):
            await asyncio.wait_for(begun.acquire(), PATIENCE)
        await threads.run("admin", lambda: None)
        assert sum(map(len, sent)) == WHOLE
        reads.set()
        await asyncio.gather(*running)
        return sent

    try:
        sent = asyncio.run(clients())
    finally:
        threads.close()
    for _, *pieces in sent:
        assert all(len(piece["body"]) <= SEND_BYTES for piece in pieces)
        assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        assert json.loads(b"".join(piece["body"] for piece in pieces))["messages"] == messages
