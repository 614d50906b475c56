"""A stream is written at once while its client reads, and waits for the client otherwise; the bytes are the same."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import h11
import pytest

from kvcellar.serve.http.connection import Connection
from kvcellar.serve.http.sending import WRITE, Stream

PARTS = [b"one", b"", b"two" * 5000, b"0"]


class Client:
    """Reads while it is `reading`; `sent` has what was sent, in order, and which of it was waited for."""

    def __init__(self) -> None:
        self.reading = True
        self.waiting = False
        self.sent: list[tuple[str, bytes]] = []

    def write(self, data: bytes) -> bool:
        if self.reading:
            self.sent.append(("written", data))
        return self.reading

    async def send(self, message: Any) -> None:
        assert self.waiting, "the events that come meanwhile are limited"
        await asyncio.sleep(0)
        self.sent.append((message["type"].rpartition(".")[2], message.get("body", b"")))

    @contextmanager
    def wait(self) -> Iterator[None]:
        self.waiting = True
        yield
        self.waiting = False


def test_parts_are_written_in_order_and_wait_only_for_a_client_that_does_not_read():
    client = Client()

    async def play() -> None:
        stream = Stream({"extensions": {WRITE: client.write}}, client.send, client.wait)
        await stream.start([])
        await stream.part(b"1")
        client.reading = False
        await stream.part(b"2")
        await stream.part(b"3")
        client.reading = True
        await stream.part(b"4")
        await stream.end(b"5")

    asyncio.run(play())
    assert client.sent == [
        ("start", b""),
        ("written", b"1"),
        ("body", b"2"),
        ("body", b"3"),
        ("written", b"4"),
        ("body", b"5"),
    ]


def test_a_server_that_cannot_write_at_once_is_sent_every_part():
    client = Client()

    async def play() -> None:
        stream = Stream({}, client.send, client.wait)
        await stream.start([])
        for part in PARTS:
            await stream.part(part)
        await stream.end(b"")

    asyncio.run(play())
    assert client.sent == [("start", b""), *(("body", part) for part in PARTS), ("body", b"")]


class Server:
    """What a connection knows when it writes a part: a response that h11 has begun."""

    def __init__(self, version: bytes = b"1.1") -> None:
        self.conn = h11.Connection(h11.SERVER)
        self.conn.receive_data(b"POST / HTTP/%b\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % version)
        while not isinstance(self.conn.next_event(), h11.EndOfMessage):
            pass
        self.flow = SimpleNamespace(write_paused=False)
        self.cycle = SimpleNamespace(disconnected=False, response_complete=False)
        self.wire = bytearray()
        self.transport = SimpleNamespace(write=self.wire.extend)

    def begin(self) -> None:
        self.conn.send(h11.Response(status_code=200, headers=[]))

    def write(self, data: bytes) -> bool:
        return Connection._write_part(self, self.cycle, data)  # type: ignore[arg-type]


def test_parts_that_are_written_at_once_have_the_bytes_of_h11():
    ours, theirs = Server(), Server()
    ours.begin()
    theirs.begin()
    for part in PARTS:
        assert ours.write(part)
        theirs.wire += theirs.conn.send(h11.Data(data=part)) or b""
    assert ours.wire == theirs.wire
    assert ours.conn.send(h11.EndOfMessage()) == theirs.conn.send(h11.EndOfMessage())


@pytest.mark.parametrize("why", ["not begun", "paused", "disconnected", "complete", "ended", "HTTP/1.0", "HTTP/0.9"])
def test_nothing_is_written_where_a_part_would_have_to_wait_or_has_no_place(why: str):
    server = Server(why.removeprefix("HTTP/").encode() if why.startswith("HTTP/") else b"1.1")
    if why != "not begun":
        server.begin()
    if why == "ended":
        server.conn.send(h11.EndOfMessage())
    server.flow.write_paused = why == "paused"
    server.cycle.disconnected, server.cycle.response_complete = why == "disconnected", why == "complete"
    assert not server.write(b"part")
    assert not server.wire
