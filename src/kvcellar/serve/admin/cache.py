"""cache: routes that list, remove, verify, export and import what the prefix cache and the store have.

The work runs on one thread of its own, one request at a time; an archive is sent and received while it is made and
read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Lock
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.engine.control_replies import NamespaceContents, Removed
from kvcellar.frontend.engine import Engine
from kvcellar.memory.tiers.upkeep import check_named
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.messages import StrictModel
from kvcellar.serve.http.api_errors import ApiError, ClientDisconnected
from kvcellar.serve.http.body import next_part
from kvcellar.serve.http.json_text import json_chunks
from kvcellar.serve.http.sending import HeldStream
from kvcellar.serve.models.model_use import read_body, with_loaded
from kvcellar.serve.shared import Shared

LISTED, MOST_LISTED = 200, 100_000  # entries, unless `limit` is sent; and at most
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


class DeviceContents(Answer):
    namespaces: list[NamespaceContents]


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
    image: str | None  # the digest of the image that it has features of; "": it has K/V
    text: str | None


class CacheEntries(Answer):
    entries: list[DeviceEntry | StoredEntry]
    more: bool


class CollectedEntries(Answer):
    removed: int


class CacheHandler:
    """The caches of the model that `model` of the query names, which must be loaded; by default of the default model.
    The disk is that of all models."""

    def __init__(self, server: Shared) -> None:
        self._server, self._threads = server, server.threads

    async def totals(self, request: Request) -> Response:
        return await self._answer(request, self._totals)

    def _totals(self, engine: Engine) -> CacheContents:
        cache = engine.cache
        device = DeviceContents(cache.namespaces())
        if (disk := cache.disk) is None:
            return CacheContents(device, None)
        stored = [StoredNamespace(**one) for one in disk.totals]
        return CacheContents(device, StoreContents(disk.directory, disk.bytes, disk.cap, stored))

    async def tree(self, request: Request) -> Response:
        most, namespace = whole(request, "limit", LISTED, MOST_LISTED), request.query_params.get("namespace")
        name = tier(request)
        return await self._answer(request, lambda engine: _listed(engine, engine.cache.listed(name, namespace), most))

    async def hot(self, request: Request) -> Response:
        most, name = whole(request, "limit", LISTED, MOST_LISTED), tier(request)
        return await self._answer(request, lambda engine: _listed(engine, engine.cache.hot(name, most + 1), most))

    async def remove(self, request: Request) -> Response:
        body = await read_body(self._server, request, RemoveBody)

        def remove(engine: Engine) -> Removed:
            prefix = body.prefix
            check_named(body.namespace, body.entry, prefix)  # the text: a tokenizer may put a token in front of ""
            ids = engine.encode(prefix) if isinstance(prefix, str) else prefix
            return engine.cache.remove(namespace=body.namespace, entry=body.entry, prefix=ids)

        return await self._answer(request, remove)

    async def clear(self, request: Request) -> Response:
        body = await read_body(self._server, request, ClearBody)
        return await self._answer(request, lambda engine: engine.cache.clear(all_models=body.all_models))

    async def collect(self, request: Request) -> Response:
        await read_body(self._server, request, NoFields)
        return await self._answer(request, lambda engine: CollectedEntries(engine.cache.collect()))

    async def verify(self, request: Request) -> Response:
        await read_body(self._server, request, NoFields)
        return await self._answer(request, lambda engine: engine.cache.verify())

    async def export(self, request: Request) -> Response:
        await read_body(self._server, request, NoFields)
        lease = await self._threads.run("admin", partial(self._server.host.loaded, request.query_params.get("model")))
        try:
            parts = await self._threads.run("admin", lease.engine.cache.export)
        except BaseException:
            lease.release()
            raise

        async def content() -> AsyncIterator[bytes]:
            while part := await self._threads.run("admin", partial(next, parts, b"")):
                yield part

        return HeldStream(content(), lease, media_type=ARCHIVE)

    async def import_from(self, request: Request) -> Response:
        if request.headers.get("content-type") != ARCHIVE:
            raise ApiError(415, f"the body must be an archive; send it with Content-Type: {ARCHIVE}")
        arriving = Arriving(request, self._server.settings.body_seconds)
        try:
            return await self._answer(request, lambda engine: engine.cache.import_from(arriving))
        except ApiError as error:
            raise arriving.error or error from None
        finally:
            arriving.close()

    async def _answer(self, request: Request, work: Callable[[Engine], object]) -> Response:
        def answered(engine: Engine) -> bytes:
            return b"".join(json_chunks(work(engine)))

        found = await with_loaded(self._server, "admin", request.query_params.get("model"), answered)
        return Response(found, media_type="application/json")


def _listed(engine: Engine, entries: Iterable[dict[str, Any]], most: int) -> CacheEntries:
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
    """The body of a request as a file that another thread reads: a part is received when it is wanted. An error of
    that ends the file, and is its `error`.

    Always true:
      * one part of the body is in memory at most, and what `read` returns.
    """

    def __init__(self, request: Request, seconds: float) -> None:
        self._parts, self._seconds, self._loop = request.stream(), seconds, asyncio.get_running_loop()
        self._lock = Lock()  # orders `close` and the thread
        self._receiving: Future[bytes | None] | None = None
        self._part, self._closed = b"", False
        self.error: Exception | None = None

    def read(self, n: int, /) -> bytes:
        found = bytearray()
        while len(found) < n and (self._part or self._receive()):
            take = n - len(found)
            found += self._part[:take]
            self._part = self._part[take:]
        return bytes(found)

    def _receive(self) -> bool:
        """The next part, which may be empty. False at the end."""
        with self._lock:
            if self._closed:
                return False
            wanted = next_part(self._parts, self._seconds, "archive")
            self._receiving = asyncio.run_coroutine_threadsafe(wanted, self._loop)
        try:
            part = self._receiving.result()
        except (ApiError, ClientDisconnected) as error:
            self.error, self._closed = error, True
            return False
        except CancelledError:  # by `close`
            return False
        self._part = part or b""
        return part is not None

    def close(self) -> None:
        """On the event loop: reading ends here."""
        with self._lock:
            self._closed = True
            if self._receiving is not None:
                self._receiving.cancel()
