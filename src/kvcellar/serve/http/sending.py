"""sending: sends responses in pieces, so that the event loop is not blocked, and stops work whose client has left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvcellar.serve.http.api_errors import ClientDisconnected
from kvcellar.serve.http.json_text import CHUNK_ITEMS, json_chunks, to_json

T = TypeVar("T")
SEND_BYTES = 2**18  # of a response that are sent at once
# An extension of the scope: writes a part of the body of a response that has begun and has no content-length. False: it
# cannot be written at once, and nothing was; `send` waits for the client.
WRITE = "kvcellar.write"
ADMIT = "kvcellar.admit"  # an extension of the scope, called when a request has the key that its path needs


@asynccontextmanager
async def raced(work: Coroutine[Any, Any, T], event: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[T]]:
    """The task of `work`, when it or `event` has ended. What has not is cancelled at the end of the block."""
    worker, watcher = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        yield worker
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def until_disconnected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`. Cancels it and raises `ClientDisconnected` if the client disconnects."""
    async with raced(work, _disconnect(receive)) as worker:
        if not worker.done():
            raise ClientDisconnected
        worker.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: object, status: int = 200) -> Response:
    """A short one: it is encoded at once."""
    return Response(to_json(value), status, media_type="application/json")


async def send_json(send: Send, value: object) -> None:
    """Encode and send in chunks; other tasks of the event loop run between them."""
    body, paused_at = bytearray(), 0
    for number, chunk in enumerate(json_chunks(value)):
        body += chunk
        if len(body) > paused_at + 1000 or number % CHUNK_ITEMS == 0:
            paused_at = len(body)
            await asyncio.sleep(0)
    await send_encoded(send, body)


async def send_encoded(send: Send, body: bytes | bytearray) -> None:
    """Send JSON in pieces. The next one is copied when the client has read most of those before it."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, len(body), SEND_BYTES):
        await send_part(send, bytes(body[at : at + SEND_BYTES]), more=at + SEND_BYTES < len(body))


async def send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


class Stream:
    """Sends a response whose length is not known. Each wait for the client is within a block of `waiting`."""

    def __init__(self, scope: Scope, send: Send, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._send, self._waiting = send, waiting
        self._write: Callable[[bytes], bool] = scope.get("extensions", {}).get(WRITE, _not_written)

    async def start(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self._wait_for({"type": "http.response.start", "status": 200, "headers": headers})

    async def part(self, data: bytes) -> None:
        """Without a wait while the client reads: then a part costs little more than the system's `send`."""
        if not self._write(data):
            await self._wait_for({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """The last part."""
        await self._wait_for({"type": "http.response.body", "body": data, "more_body": False})

    async def _wait_for(self, message: Message) -> None:
        with self._waiting():
            await self._send(message)


class HeldStream(StreamingResponse):
    """A response whose `parts` are sent within the block of `held`."""

    def __init__(self, parts: AsyncIterator[bytes], held: AbstractContextManager[object], **how: Any) -> None:
        super().__init__(parts, **how)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


def _not_written(data: bytes) -> bool:
    return False
