"""routes: the page at `/inspector`, and what it shows.

    /inspector                   the page, and its files below it
    /inspector/api/snapshot      one JSON object (see `snapshot`)
    /inspector/api/stream        the same as server-sent events, one when something has changed, at most one a second
    /inspector/api/entry         the text of an entry of the tree, by `name`
    /inspector/api/request       the way of a request through the tree, by `number`

All take `model`. Nothing here changes an engine.

Always true:
  * an engine is looked at once a second at most for all streams and snapshots together;
  * at most `STREAMS` streams are open; with keys at most `STREAMS_OF_KEY` of each, so that one key leaves some to
    the others.
"""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvcellar.engine.control_replies import RECENT_SECONDS, Picture
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import BadRequest, EngineClosed, KvcellarError, ModelNotFound, Overloaded
from kvcellar.frontend.served_engine import ServedEngine
from kvcellar.inspector.answers import EntryText, RequestWay, Snapshot
from kvcellar.inspector.page import HEADERS, ICON, PAGE, File, read_files
from kvcellar.inspector.snapshot import Beginnings, Json, Viewer, snapshot, way_fields
from kvcellar.serve.generation.namespaces import api_key, owner
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.operation import SSE, Operation, Parameter
from kvcellar.serve.shared import Mounted, Shared

T = TypeVar("T")
API = f"{PAGE}/api/"
EVERY = 1.0  # seconds between two pictures
PING = 15.0  # seconds after which a stream without data sends a comment
STREAMS, STREAMS_OF_KEY = 32, 8
TOKENS = 1024  # of the text of an entry
MODELS = 64  # of which pictures and texts are remembered
OFF = "the inspector of this server is off; start it with --inspector"
MODEL = Parameter(about="The name of a loaded model. Default: the first one.", schema={"type": "string"})
NAME = Parameter(about="The name of an entry.", schema={"type": "string"})
NUMBER = Parameter(about="The number of a request.", schema={"type": "integer", "minimum": 0, "maximum": 10**18 - 1})
MAY_FAIL = (400, 404, 409)  # there is no such entry or model, or the model is not loaded
OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("GET", f"{API}snapshot"): Operation(
            api="Inspector", about="What there is now.", query={"model": MODEL}, answer=Snapshot, errors=MAY_FAIL
        ),
        ("GET", f"{API}stream"): Operation(
            api="Inspector",
            about="The same as events, one when something has changed.",
            query={"model": MODEL},
            streams=SSE,
            event=Snapshot,
            errors=MAY_FAIL,
        ),
        ("GET", f"{API}entry"): Operation(
            api="Inspector",
            about="The text of an entry of the tree.",
            query={"name": NAME, "model": MODEL},
            answer=EntryText,
            errors=MAY_FAIL,
        ),
        ("GET", f"{API}request"): Operation(
            api="Inspector",
            about="The way of a request through the tree.",
            query={"number": NUMBER, "model": MODEL},
            answer=RequestWay,
            errors=MAY_FAIL,
        ),
    }
)


def inspector(shared: Shared) -> Mounted:
    """The page and its data. Without the page, only admin keys read the data; without these, there is nothing."""
    page = shared.settings.inspects
    if not page and not shared.keys.now.admin:
        return Mounted(())
    data, files = DataHandler(shared), _paths(read_files()) if page else {}
    routes = [
        Route(f"{API}snapshot", data.snapshot, methods=["GET"]),
        Route(f"{API}stream", data.stream, methods=["GET"]),
        Route(f"{API}entry", data.entry, methods=["GET"]),
        Route(f"{API}request", data.request, methods=["GET"]),
        *(Route(path, file.response, methods=["GET"]) for path, file in files.items()),
    ]
    return Mounted(routes, frozenset(files), (API,), OPERATIONS)


def _paths(files: Mapping[str, File]) -> dict[str, File]:
    found = {f"{PAGE}/{name}": file for name, file in files.items() if name != "index.html"}
    return {PAGE: files["index.html"], ICON: files["icon.svg"], **found}


class Seen(NamedTuple):
    """A picture, and the statistics that the engine had told before it was taken. Another one is taken only when they
    differ, while requests run, or when a step is too old to count for the rates."""

    number: int
    taken: float  # seconds of the monotonic clock
    told: EngineStats
    picture: Picture

    def holds(self, told: EngineStats) -> bool:
        steps, since = self.picture.steps, time.time() - RECENT_SECONDS
        fades = any(self.picture.at - RECENT_SECONDS <= one.at < since for one in steps)
        return not self.picture.live and not fades and replace(told, at=0.0) == replace(self.told, at=0.0)


@dataclass(slots=True)
class _Model:
    """What is remembered of a model, but not its engine, which may be closed."""

    beginnings: Beginnings = field(default_factory=Beginnings)
    seen: Seen | None = None

    def text(self, engine: ServedEngine) -> Callable[[tuple[int, ...]], str] | None:
        return partial(self.beginnings.decoded, partial(engine.decode, special=True)) if engine.model.has_text else None


class Stream(StreamingResponse):
    """Server-sent events; `count` is called with 1 when it begins, and with -1 when it ends."""

    def __init__(self, events: AsyncIterator[bytes], count: Callable[[int], None]) -> None:
        headers = {**HEADERS, "cache-control": "no-store"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._count(1)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._count(-1)


class DataHandler:
    def __init__(self, shared: Shared) -> None:
        self._host, self._settings, self._threads = shared.host, shared.settings, shared.threads
        self._drain, self._keys = shared.drain, shared.keys
        self._instance = secrets.token_hex(8)  # a page that finds another one forgets what it has
        self._models: dict[str, _Model] = {}  # changed in the one thread of `_look` only
        self._streams = Counter[str | None]()  # that are open, by tenant

    async def snapshot(self, request: Request) -> Response:
        viewer, model = self._viewer(request), request.query_params.get("model")
        return _json((await self._content(model, viewer, -1))[1])

    async def stream(self, request: Request) -> Response:
        viewer, model = self._viewer(request), request.query_params.get("model")
        if self._streams.total() >= STREAMS:
            raise Overloaded(f"{STREAMS} streams are open already; close a page")
        if viewer.tenant is not None and self._streams[viewer.tenant] >= STREAMS_OF_KEY:
            raise Overloaded(f"{STREAMS_OF_KEY} streams of this API key are open already; close a page")
        first = await self._content(model, viewer, -1)  # an error of this one is the response
        return Stream(self._events(model, viewer, first), partial(self._opened, viewer.tenant))

    def _opened(self, tenant: str | None, streams: int) -> None:
        self._streams[tenant] += streams
        if not self._streams[tenant]:
            del self._streams[tenant]

    async def _events(self, model: str | None, viewer: Viewer, first: tuple[int, bytes]) -> AsyncIterator[bytes]:
        (number, content), sent = first, time.monotonic()
        yield _event(content)
        while await self._pause(EVERY):
            number, content = await self._content(model, viewer, number)
            if content or time.monotonic() - sent >= PING:
                yield _event(content) if content else b": \n\n"
                sent = time.monotonic()

    async def _content(self, model: str | None, viewer: Viewer, known: int) -> tuple[int, bytes]:
        """The number of a picture and its JSON; no bytes if it is the one that is known."""

        def look(engine: ServedEngine) -> tuple[int, bytes]:
            found = self._model(engine)
            seen = self._seen(engine, found)
            if seen.number == known:
                return known, b""
            shown = snapshot(seen.picture, viewer, found.text(engine))
            about = {"name": engine.model.name, "context": engine.model.context, "all": list(self._host.names)}
            return seen.number, _encoded(shown | {"instance": self._instance, "model": about})

        return await self._look(model, look)

    def _model(self, engine: ServedEngine) -> _Model:
        name = engine.model.name
        found = self._models.get(name)
        if found is None:
            while len(self._models) >= MODELS:
                del self._models[next(iter(self._models))]
            found = self._models[name] = _Model()
        return found

    def _seen(self, engine: ServedEngine, of: _Model) -> Seen:
        """The last picture, unless it is old and something has changed since."""
        now, before, told = time.monotonic(), of.seen, engine.last_stats
        if before is not None and now - before.taken < EVERY * 0.9:
            return before
        if before is not None and before.told.started != told.started:  # the model was loaded again
            of.beginnings = Beginnings()
        if before is not None and before.holds(told):
            of.seen = before._replace(taken=now)
        else:
            number = before.number + 1 if before is not None else 0
            of.seen = Seen(number, now, told, engine.cache.survey.picture())
        return of.seen

    async def entry(self, request: Request) -> Response:
        viewer, name = self._viewer(request), request.query_params.get("name", "")

        def look(engine: ServedEngine) -> Json:
            entry, tokens = engine.cache.survey.entry(name, TOKENS)
            if not viewer.sees(entry.owner):
                raise BadRequest("there is no such entry in memory; it may have been evicted", "name")
            reads = viewer.reads(entry.owner)
            found: Json = {"name": entry.name, "start": entry.start, "end": entry.end, "reads": reads}
            shown = tokens if reads else ()
            found["text"] = engine.decode(shown, special=True) if reads and engine.model.has_text else None
            return found | {"tokens": list(shown) if not engine.model.has_text else None, "shown": len(shown)}

        return await self._answer(request, look)

    async def request(self, request: Request) -> Response:
        viewer, text = self._viewer(request), request.query_params.get("number", "")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise BadRequest("number must be the number of a request", "number")

        def look(engine: ServedEngine) -> Json:
            way = engine.cache.survey.way(int(text))
            if not viewer.sees(way.owner):
                raise BadRequest("the text of this request is not kept any more", "number")
            return {"number": int(text)} | way_fields(way, viewer, self._model(engine).text(engine))

        return await self._answer(request, look)

    async def _answer(self, request: Request, look: Callable[[ServedEngine], Json]) -> Response:
        model = request.query_params.get("model")
        return _json(await self._look(model, lambda engine: _encoded(look(engine))))

    def _viewer(self, request: Request) -> Viewer:
        """An API key sees what its own requests have computed, an admin key sees all, without texts. A server with one
        API key, or none, has one tenant. Raises `ApiError` 403 for an API key where the page is off."""
        settings, keys, key = self._settings, self._keys.now, api_key(request.scope)
        if not keys.api:
            if not settings.inspects:
                raise ApiError(403, OFF, code="not_allowed")
            return Viewer(None, True, None)
        if key in keys.admin:
            return Viewer(None, False, None)
        if not settings.inspects:
            raise ApiError(403, OFF, code="not_allowed")
        own = owner(request.scope)
        return Viewer(own if len(keys.api) > 1 else None, not settings.share_prefixes, own)

    async def _look(self, model: str | None, work: Callable[[ServedEngine], T]) -> T:
        """The result of `work`, in a thread, with the engine of a loaded model; None: the default."""

        def looked() -> T:
            with self._host.loaded(model) as lease:
                return work(lease.engine)

        try:
            return await self._threads.run("inspector", looked)
        except (EngineClosed, ModelNotFound):
            raise
        except KvcellarError as error:
            raise ApiError(400, printable(str(error), 500), code="not_possible") from error

    async def _pause(self, seconds: float) -> bool:
        """Wait so long. False, at once, when the server begins to shut down."""
        ending = asyncio.Event()
        with self._drain.on_start(ending.set), suppress(TimeoutError):
            if not self._drain.started:
                await asyncio.wait_for(ending.wait(), seconds)
        return not self._drain.started


def _encoded(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def _event(content: bytes) -> bytes:
    """JSON has no line breaks, so it is one line of data."""
    return b"data: " + content + b"\n\n"


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={**HEADERS, "cache-control": "no-store"})
