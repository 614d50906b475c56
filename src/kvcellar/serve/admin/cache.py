"""cache: routes that list, remove, verify, export and import what the prefix cache and the store have.

The work runs on one thread of its own, one request at a time; an archive is sent and received while it is made and
read.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from threading import Condition
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvcellar.errors import EngineClosed, KvcellarError, ModelNotFound
from kvcellar.frontend.served_engine import ServedEngine
from kvcellar.memory.tiers.upkeep import check_named
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.messages import StrictModel
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.body import RequestBody, next_part, receive_json
from kvcellar.serve.http.json_text import json_chunks, printable
from kvcellar.serve.http.parsing import Limits, parse_object, validated
from kvcellar.serve.models.model_manager import Lease
from kvcellar.serve.shared import Shared

LISTED, MOST_LISTED = 200, 100_000  # entries, unless `limit` is sent; and at most
BUFFERED = 4 * 2**20  # bytes of an archive that were received and not read yet
ARCHIVE = "application/x-tar"
TIERS = ("device", "disk")


class NoFields(StrictModel):
    """Of routes that need nothing but that the body is JSON."""


class ClearBody(StrictModel):
    all_models: bool = False  # also what other models have stored in the same directory


class RemoveBody(StrictModel):
    """At least one is needed; those that are sent must all hold."""

    namespace: str | None = None  # what it has
    entry: str | None = None  # the name of an entry, with all that continue it
    prefix: str | list[int] | None = None  # a text, or token ids


class DeviceNamespace(Answer):
    namespace: str
    entries: int
    tokens: int
    checkpoints: int
    bytes: int
    in_use: int  # tokens that running requests use


class DeviceContents(Answer):
    namespaces: list[DeviceNamespace]


class StoredNamespace(Answer):
    identity: str
    namespace: str | None  # `null`: sealed with another key
    entries: int
    tokens: int
    bytes: int


class StoreContents(Answer):
    directory: str
    bytes: int
    limit_bytes: int
    namespaces: list[StoredNamespace]


class CacheContents(Answer):
    device: DeviceContents
    store: StoreContents | None


class DeviceEntry(Answer, kw_only=True):
    tier: Literal["device"]
    namespace: str
    name: str
    parent: str  # empty at the beginning of a text
    start: int
    end: int
    tokens: list[int]  # the first ones
    checkpoints: list[int]
    users: int  # running sequences
    reused: bool
    value: float  # to eviction
    leaf: bool
    pinned: bool
    expires: float | None  # seconds of the wall clock
    owner: str
    adapter: str
    text: str | None


class StoredEntry(Answer, kw_only=True):
    """Of one that was sealed with another key, neither namespace, span nor tokens are known."""

    tier: Literal["disk"]
    name: str
    parent: str
    identity: str
    bytes: int
    uses: int
    value: float
    pinned: bool
    expires: float | None
    namespace: str | None
    start: int | None
    end: int | None
    tokens: list[int] | None
    adapter: str | None
    text: str | None


class CacheEntries(Answer):
    entries: list[DeviceEntry | StoredEntry]
    more: bool


class RemovedEntries(Answer):
    tokens: int  # in memory, as far as no running request uses them
    stored: int  # entries of the store


class CollectedEntries(Answer):
    removed: int


class VerifiedEntries(Answer):
    read: int
    bytes: int
    damaged: int
    unreadable: int  # sealed with another key, or gone


class ImportedEntries(Answer):
    stored: int
    refused: dict[str, int]  # entries that were not stored, by reason


class CacheHandler:
    """The caches of the model that `model` of the query names, which must be loaded; by default of the default model.
    The disk is that of all models."""

    def __init__(self, server: Shared) -> None:
        self._host, self._settings, self._threads = server.host, server.settings, server.threads
        self._bodies = server.bodies

    async def totals(self, request: Request) -> Response:
        return await self._answer(request, self._totals)

    def _totals(self, engine: ServedEngine) -> CacheContents:
        cache = engine.cache
        device = DeviceContents(list(map(DeviceNamespace.of, cache.namespaces())))
        if (disk := cache.disk) is None:
            return CacheContents(device, None)
        stored = [StoredNamespace(**one) for one in cache.stored_totals()]
        return CacheContents(device, StoreContents(disk.directory, disk.bytes, disk.cap, stored))

    async def tree(self, request: Request) -> Response:
        most, namespace = whole(request, "limit", LISTED, MOST_LISTED), request.query_params.get("namespace")
        name = tier(request)
        return await self._answer(request, lambda engine: _listed(engine, engine.cache.listed(name, namespace), most))

    async def hot(self, request: Request) -> Response:
        most, name = whole(request, "limit", LISTED, MOST_LISTED), tier(request)
        return await self._answer(request, lambda engine: _listed(engine, iter(engine.cache.hot(name, most)), most))

    async def remove(self, request: Request) -> Response:
        body = validated(RemoveBody, await self._body(request))

        def remove(engine: ServedEngine) -> Answer:
            prefix = body.prefix
            check_named(body.namespace, body.entry, prefix)  # the text: a tokenizer may put a token in front of ""
            ids = engine.encode(prefix) if isinstance(prefix, str) else prefix
            return RemovedEntries.of(engine.cache.remove(namespace=body.namespace, entry=body.entry, prefix=ids))

        return await self._answer(request, remove)

    async def clear(self, request: Request) -> Response:
        body = validated(ClearBody, await self._body(request))
        return await self._answer(
            request, lambda engine: RemovedEntries.of(engine.cache.clear(all_models=body.all_models))
        )

    async def collect(self, request: Request) -> Response:
        await self._no_fields(request)
        return await self._answer(request, lambda engine: CollectedEntries(engine.cache.collect()))

    async def verify(self, request: Request) -> Response:
        await self._no_fields(request)
        return await self._answer(request, lambda engine: VerifiedEntries.of(engine.cache.verify()))

    async def export(self, request: Request) -> Response:
        await self._no_fields(request)
        lease = await self._threads.run("admin", partial(self._host.loaded, request.query_params.get("model")))
        try:
            parts = await self._threads.run("admin", lease.engine.cache.export)
        except BaseException:
            lease.release()
            raise

        async def content() -> AsyncIterator[bytes]:
            while part := await self._threads.run("admin", partial(next, parts, b"")):
                yield part

        return Exported(content(), lease)

    async def import_from(self, request: Request) -> Response:
        if request.headers.get("content-type") != ARCHIVE:
            raise ApiError(415, f"the body must be an archive; send it with Content-Type: {ARCHIVE}")
        arriving = Arriving(asyncio.get_running_loop())
        reading = asyncio.ensure_future(
            self._answer(request, lambda engine: ImportedEntries.of(engine.cache.import_from(arriving)))
        )
        reading.add_done_callback(lambda _: arriving.close())  # what still arrives is discarded
        parts = request.stream()
        try:
            while (part := await next_part(parts, self._settings.body_seconds, "archive")) is not None:
                await arriving.add(part)
            arriving.end()
            return await reading
        finally:
            arriving.close()
            await asyncio.gather(reading, return_exceptions=True)  # then its thread is free for other requests

    async def _no_fields(self, request: Request) -> None:
        validated(NoFields, await self._body(request))

    async def _body(self, request: Request) -> dict[str, object]:
        """The body, which must be JSON: a web page of another origin cannot send that."""
        body = RequestBody(self._bodies)
        try:
            await receive_json(request.scope, request.receive, self._settings, body)
            return parse_object(body.data, Limits(self._host.longest))
        finally:
            body.release()

    async def _answer(self, request: Request, work: Callable[[ServedEngine], Answer]) -> Response:
        def answered() -> bytes:
            with self._host.loaded(request.query_params.get("model")) as lease:
                return b"".join(json_chunks(work(lease.engine)))

        try:
            found = await self._threads.run("admin", answered)
        except (EngineClosed, ModelNotFound):
            raise
        except KvcellarError as error:
            raise ApiError(400, printable(str(error), 2000), code="not_possible") from error
        return Response(found, media_type="application/json")


class Exported(StreamingResponse):
    """An archive; the model stays loaded while it is sent."""

    def __init__(self, content: AsyncIterator[bytes], lease: Lease) -> None:
        super().__init__(content, media_type=ARCHIVE)
        self._lease = lease

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._lease:
            await super().__call__(scope, receive, send)


def _listed(engine: ServedEngine, entries: Iterator[dict[str, Any]], most: int) -> CacheEntries:
    """With the texts of the entries; `more` if there are more than `most`."""
    found: list[DeviceEntry | StoredEntry] = []
    for one in entries:
        if len(found) == most:
            return CacheEntries(found, more=True)
        tokens = one["tokens"]
        text = None if tokens is None or not engine.model.has_text else engine.decode(tokens, special=True)
        kind = DeviceEntry if one["tier"] == "device" else StoredEntry
        found.append(kind(**one, text=text))
    return CacheEntries(found, more=False)


def tier(request: Request) -> str:
    name = request.query_params.get("tier", TIERS[0])
    if name not in TIERS:
        raise ApiError(400, f"tier must be {' or '.join(TIERS)}", "tier")
    return name


def whole(request: Request, name: str, default: int, most: int) -> int:
    """A parameter of the query: a number from 1 to `most`. Raises `ApiError` 400."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise ApiError(400, f"{name} must be a whole number from 1 to {most}", name)
    return int(text)


class Arriving:
    """A body as a file: parts are added on the event loop, and read on another thread.

    Always true:
      * at most `BUFFERED` bytes and one part more are in memory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._changed = loop, Condition()
        self._parts: deque[bytes] = deque()
        self._size, self._ended, self._closed = 0, False, False
        self._free = asyncio.Event()

    async def add(self, part: bytes) -> None:
        """Waits while too much has not been read."""
        with self._changed:
            if self._closed:
                return
            self._parts.append(part)
            self._size += len(part)
            full = self._size > BUFFERED
            if full:
                self._free.clear()
            self._changed.notify_all()
        if full:
            await self._free.wait()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """On the event loop: reading ends here, and what is added is discarded."""
        with self._changed:
            self._closed = True
            self._parts.clear()
            self._changed.notify_all()
        self._free.set()

    def read(self, n: int, /) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._size >= n or self._ended or self._closed)
            found = bytearray()
            while self._parts and len(found) < n:
                part = self._parts.popleft()
                take = part[: n - len(found)]
                found += take
                if len(take) < len(part):
                    self._parts.appendleft(part[len(take) :])
            self._size -= len(found)
            if self._size <= BUFFERED:
                with suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(self._free.set)
        return bytes(found)
