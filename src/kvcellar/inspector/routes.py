"""routes: the pages of the server: the chat at `/`, the inspector at `/inspector`, and what the latter shows.

    /                            the chat, for browsers only: it is a client of OpenAI's API
    /inspector                   the inspector; below it the files of both pages
    /inspector/api/snapshot      one JSON object (see `snapshot`)
    /inspector/api/stream        the same as server-sent events, one when something has changed, at most one a second
    /inspector/api/entry         the text of an entry of the tree, by `name`
    /inspector/api/request       the way of a request through the tree, by `number`

The last four take `model`, and on a gateway of a cluster `replica`. Nothing here changes an engine. The pages load
nothing from elsewhere; files of others are as their packages have them (`static/NOTICE` has their versions, licences
and digests).

Always true:
  * an engine is looked at once a second at most for all streams and snapshots together;
  * at most `STREAMS` streams are open; with keys at most `STREAMS_OF_KEY` of each, so that one key leaves some to
    the others.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kvcellar.engine.control_replies import RECENT_SECONDS, Picture
from kvcellar.engine.stats import ClusterStats, EngineStats, ReplicaStats
from kvcellar.errors import BadRequest, Overloaded
from kvcellar.frontend.engine import Engine
from kvcellar.inspector.snapshot import (
    Beginnings,
    EntryText,
    RequestWay,
    SeenModel,
    Snapshot,
    Text,
    Viewer,
    entry_images,
    request_way,
    snapshot,
)
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.namespaces import api_key, owner
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.json_text import to_json
from kvcellar.serve.http.sending import HeldStream
from kvcellar.serve.models.model_use import with_loaded
from kvcellar.serve.operation import SSE, Operation, Parameter
from kvcellar.serve.shared import Mounted, Shared, from_browser

CHAT, PAGE, ICON = "/", "/inspector", "/favicon.ico"  # paths
SCRIPTS = ("app.js", "replicas.js", "requests.js", "tree.js", "memory.js", "steps.js")
PARTS = ("app", "client", "composer", "conversations", "marks", "messages", "settings")
OF_CHAT = ("chat/index.html", "chat/chat.css", *(f"chat/{name}.js" for name in PARTS))
OF_BOTH = ("data.js", "page.css", "icon.svg", "NOTICE", "vendor/preact-htm.js")
OF_PAGE = ("index.html", *SCRIPTS, "vendor/d3-hierarchy.js", "vendor/uplot.js", "vendor/uplot.css")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}  # by suffix
FILES: Mapping[str, str] = {  # media types by name
    name: TYPES.get(name.rpartition(".")[2], "text/plain") for name in (*OF_CHAT, *OF_BOTH, *OF_PAGE)
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
API = f"{PAGE}/api/"
NOT_STORED = {**HEADERS, "cache-control": "no-store"}
EVERY = 1.0  # seconds between two pictures
PING = 15.0  # seconds after which a stream without data sends a comment
STREAMS, STREAMS_OF_KEY = 32, 8
TOKENS = 1024  # of the text of an entry
LOOKED_AT = 32 * TOKENS  # of which images are shown
MODELS = 64  # of which pictures and texts are remembered
OFF = "the inspector of this server is off; start it with --inspector"
MODEL = Parameter(about="The name of a loaded model. Default: the first one.", schema={"type": "string"})
REPLICA = Parameter(
    about="The name of a replica, on a gateway of a cluster. Default: one that is connected.",
    schema={"type": "string"},
)
NAME = Parameter(about="The name of an entry.", schema={"type": "string"})
NUMBER = Parameter(about="The number of a request.", schema={"type": "integer", "minimum": 0, "maximum": 10**18 - 1})
# There may be no such entry or model, or the model is not loaded.
OF_ONE: Mapping[str, Parameter] = {"model": MODEL, "replica": REPLICA}
of_inspector = partial(Operation, "Inspector", query=OF_ONE, errors=(400, 404, 409))
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", f"{API}snapshot"): of_inspector("What there is now.", answer=Snapshot),
    ("GET", f"{API}stream"): of_inspector(
        "The same as events, one when something has changed.", streams=SSE, event=Snapshot
    ),
    ("GET", f"{API}entry"): of_inspector(
        "The text of an entry of the tree.", query={"name": NAME, **OF_ONE}, answer=EntryText
    ),
    ("GET", f"{API}request"): of_inspector(
        "The way of a request through the tree.", query={"number": NUMBER, **OF_ONE}, answer=RequestWay
    ),
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """304 for a browser that has it."""
        headers = {**HEADERS, "etag": self.etag, "cache-control": "no-cache", "vary": "accept"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def read_files() -> Mapping[str, File]:
    """All files of the pages, by name."""
    found: dict[str, File] = {}
    for name, media_type in FILES.items():
        content = files("kvcellar.inspector").joinpath("static", name).read_bytes()
        found[name] = File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


class BrowserRoute(Route):
    """For others, the path is that of another route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if from_browser(scope) else (Match.NONE, {})


def inspector(shared: Shared) -> Mounted:
    """The pages and the data of the inspector. Where its page is off, only admin keys read the data."""
    page = shared.settings.inspects
    found = _paths(read_files(), page, shared.settings.chat_page)
    routes = [BrowserRoute(path, file.response, methods=["GET"]) for path, file in found.items() if path == CHAT]
    routes += [Route(path, file.response, methods=["GET"]) for path, file in found.items() if path != CHAT]
    if not page and not shared.keys.now.admin:
        return Mounted(routes, frozenset(found))
    data = DataHandler(shared)
    routes += [Route(path, getattr(data, path.removeprefix(API)), methods=[method]) for method, path in OPERATIONS]
    return Mounted(routes, frozenset(found), (API,), OPERATIONS)


def _paths(files: Mapping[str, File], page: bool, chat: bool) -> dict[str, File]:
    """Of the inspector's `page` and of the chat, where they are on."""
    if not page and not chat:
        return {}
    names = (*OF_BOTH, *(OF_CHAT if chat else ()), *(OF_PAGE if page else ()))
    found = {f"{PAGE}/{name}": files[name] for name in names if not name.endswith(".html")}
    found |= {PAGE: files["index.html"]} if page else {}
    found |= {CHAT: files["chat/index.html"]} if chat else {}
    return {ICON: files["icon.svg"], **found}


def _connected(cluster: ClusterStats | None) -> Sequence[ReplicaStats]:
    """Without their numbers."""
    replicas = () if cluster is None else cluster.replicas
    return [ReplicaStats(one.name, "", one.state, "") for one in replicas if one.state == "connected"]


class Place(NamedTuple):
    """What is looked at. None: the first one."""

    model: str | None
    replica: str | None

    @classmethod
    def of(cls, request: Request) -> "Place":
        return cls(request.query_params.get("model"), request.query_params.get("replica"))

    def replica_of(self, engine: Engine) -> str:
        """Its name; "" where the engine is one. Raises `BadRequest` for one that is not connected."""
        names = [one.name for one in _connected(engine.last_stats.cluster)]
        if self.replica is not None and self.replica not in names:
            raise BadRequest(f"no replica {self.replica[:100]!r} of this model is connected", "replica")
        return self.replica or next(iter(names), "")


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

    def text(self, engine: Engine) -> Text | None:
        return partial(self.beginnings.decoded, partial(engine.decode, special=True)) if engine.model.has_text else None


class DataHandler:
    """Its methods have the names of the routes."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._instance = secrets.token_hex(8)  # a page that finds another one forgets what it has
        self._models: dict[tuple[str, str], _Model] = {}  # by name and replica; changed in the thread of inspectors
        self._streams = Counter[str | None]()  # that are open, by tenant

    async def snapshot(self, request: Request) -> Response:
        viewer, place = self._viewer(request), Place.of(request)
        return _json((await self._content(place, viewer, -1))[1])

    async def stream(self, request: Request) -> Response:
        viewer, place = self._viewer(request), Place.of(request)
        if self._streams.total() >= STREAMS:
            raise Overloaded(f"{STREAMS} streams are open already; close a page")
        if viewer.tenant is not None and self._streams[viewer.tenant] >= STREAMS_OF_KEY:
            raise Overloaded(f"{STREAMS_OF_KEY} streams of this API key are open already; close a page")
        first = await self._content(place, viewer, -1)  # an error of this one is the response
        events, counted = self._events(place, viewer, first), self._counted(viewer.tenant)
        return HeldStream(events, counted, media_type=SSE, headers=NOT_STORED)

    @contextmanager
    def _counted(self, tenant: str | None) -> Iterator[None]:
        self._streams[tenant] += 1
        try:
            yield
        finally:
            self._streams[tenant] -= 1
            if not self._streams[tenant]:
                del self._streams[tenant]

    async def _events(self, place: "Place", viewer: Viewer, first: tuple[int, bytes]) -> AsyncIterator[bytes]:
        (number, content), sent = first, time.monotonic()
        yield _event(content)
        while await self._pause(EVERY):
            number, content = await self._content(place, viewer, number)
            if content or time.monotonic() - sent >= PING:
                yield _event(content) if content else b": \n\n"
                sent = time.monotonic()

    async def _content(self, place: "Place", viewer: Viewer, known: int) -> tuple[int, bytes]:
        """The number of a picture and its JSON; no bytes if it is the one that is known."""

        def look(engine: Engine) -> tuple[int, bytes]:
            replica = place.replica_of(engine)
            found = self._model(engine, replica)
            seen = self._seen(engine, found, replica)
            if seen.number == known:
                return known, b""
            about = SeenModel(engine.model.name, engine.model.context, self._shared.host.names)
            cluster = seen.told.cluster
            replicas = cluster.replicas if cluster is not None and viewer.tenant is None else _connected(cluster)
            shown = snapshot(seen.picture, viewer, found.text(engine), self._instance, about, replica, replicas)
            return seen.number, to_json(shown)

        return await with_loaded(self._shared, "inspector", place.model, look)

    def _model(self, engine: Engine, replica: str) -> _Model:
        name = engine.model.name, replica
        found = self._models.get(name)
        if found is None:
            while len(self._models) >= MODELS:
                del self._models[next(iter(self._models))]
            found = self._models[name] = _Model()
        return found

    def _seen(self, engine: Engine, of: _Model, replica: str) -> Seen:
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
            of.seen = Seen(number, now, told, engine.cache.picture(replica))
        return of.seen

    async def entry(self, request: Request) -> Response:
        viewer, name = self._viewer(request), request.query_params.get("name", "")

        def look(engine: Engine, replica: str) -> EntryText:
            entry, tokens = engine.cache.entry(name, LOOKED_AT, replica)
            if not viewer.sees(entry.owner):
                raise BadRequest("there is no such entry in memory; it may have been evicted", "name")
            reads, has_text = viewer.reads(entry.owner), engine.model.has_text
            shown = tokens[:TOKENS] if reads else ()
            text = engine.decode(shown, special=True) if reads and has_text else None
            ids = None if has_text else list(shown)
            images = entry_images(entry.start, engine.images_in(tokens)) if reads else []
            return EntryText.of(entry, reads=reads, text=text, tokens=ids, shown=len(shown), images=images)

        return await self._answer(request, look)

    async def request(self, request: Request) -> Response:
        viewer, text = self._viewer(request), request.query_params.get("number", "")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise BadRequest("number must be the number of a request", "number")

        def look(engine: Engine, replica: str) -> RequestWay:
            way = engine.cache.way(int(text), replica)
            if not viewer.sees(way.owner):
                raise BadRequest("the text of this request is not kept any more", "number")
            return request_way(int(text), way, viewer, self._model(engine, replica).text(engine))

        return await self._answer(request, look)

    async def _answer(self, request: Request, look: Callable[[Engine, str], Answer]) -> Response:
        place = Place.of(request)

        def looked(engine: Engine) -> bytes:
            return to_json(look(engine, place.replica_of(engine)))

        return _json(await with_loaded(self._shared, "inspector", place.model, looked))

    def _viewer(self, request: Request) -> Viewer:
        """An API key sees what its own requests have computed, an admin key sees all, without texts. A server with one
        API key, or none, has one tenant. Raises `ApiError` 403 for an API key where the page is off."""
        settings, keys, key = self._shared.settings, self._shared.keys.now, api_key(request.scope)
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

    async def _pause(self, seconds: float) -> bool:
        """Wait so long. False, at once, when the server begins to shut down."""
        ending, drain = asyncio.Event(), self._shared.drain
        with drain.on_start(ending.set), suppress(TimeoutError):
            if not drain.started:
                await asyncio.wait_for(ending.wait(), seconds)
        return not drain.started


def _event(content: bytes) -> bytes:
    """JSON has no line breaks, so it is one line of data."""
    return b"data: " + content + b"\n\n"


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers=NOT_STORED)
