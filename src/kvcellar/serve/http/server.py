"""server: the application, made of the routes and the middleware; runs uvicorn with it, in the calling thread or in a
thread of its own.

The first SIGINT or SIGTERM stops listening, closes idle connections, refuses requests that have not started, and waits
up to `drain_seconds` for running ones; those that remain get the error `shutting_down`. A second signal aborts all
connections. Shutdown takes at most `SHUTDOWN_SECONDS` beyond `drain_seconds`, even if clients do not read. The caller
closes the engine afterwards.
"""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, TypedDict, Unpack, cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import HANDLED_SIGNALS

from kvcellar.errors import BadRequest
from kvcellar.frontend.engine import Engine
from kvcellar.library.library import Library
from kvcellar.library.tools import Tools
from kvcellar.serve.generation.records import Records
from kvcellar.serve.http.api_errors import api_error
from kvcellar.serve.http.body import BodyBudget
from kvcellar.serve.http.connection import ServeConfig
from kvcellar.serve.http.event_loop import new_event_loop
from kvcellar.serve.http.key_ring import KeyRing, Keys
from kvcellar.serve.http.lifecycle import Drain, LoadThread
from kvcellar.serve.http.middleware import RequestMiddleware
from kvcellar.serve.http.reader_threads import ReaderThreads
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.http.traces import Traces
from kvcellar.serve.metrics.engines import EngineCounts
from kvcellar.serve.metrics.requests import RequestCounts
from kvcellar.serve.models.model_manager import Limits, ModelManager
from kvcellar.serve.models.model_spec import ModelSpec
from kvcellar.serve.routes import TABLE, Handlers, routes
from kvcellar.serve.settings import ServeSettings
from kvcellar.serve.shared import Mount, Shared, nothing


def hosting(engine: Engine) -> ModelManager:
    """A host of one engine, which the caller closes."""
    limits = Limits(max_bytes=0, max_models=1)
    host = ModelManager(None, limits, unload=lambda engine: None, documents=engine.documents)
    name, path = engine.model.name, engine.model.path
    host.open(ModelSpec(name, name, 0, 0, 0, lambda cache, going_on: engine, directory=path))
    return host


def shared_by(host: ModelManager, settings: ServeSettings, options: "ServerOptions") -> Shared:
    """What the handlers of a server of this host share. The caller closes its threads."""
    return Shared(
        host,
        settings,
        threads=ReaderThreads(),
        bodies=BodyBudget(settings.bodies_bytes),
        drain=Drain(),
        engines=EngineCounts(host),
        keys=KeyRing(settings, options.get("read_keys")),
        library=options.get("library"),
        traces=options.get("traces"),
        tools=options.get("tools"),
    )


def build_app(shared: Shared, mount: Mount = nothing) -> Starlette:
    """The application for the models of a host, with what is mounted on it. The caller closes what is shared."""
    settings, mounted = shared.settings, mount(shared)
    records, requests = Records(), RequestCounts()
    handlers = Handlers(shared, requests, records, {**TABLE, **mounted.operations})

    def ended(request: RequestLog) -> None:
        requests.ended(request)
        if shared.traces is not None:
            shared.traces.ended(request)

    app = Starlette(
        routes=[*mounted.routes, *routes(handlers, operated=bool(settings.admin_digests))],
        middleware=[
            Middleware(
                RequestMiddleware,
                server=shared,
                records=records if settings.admin_digests else None,
                ended=ended,
                mounted=mounted,
            )
        ],
        exception_handlers={HTTPException: cast(Any, _no_such_route)},
    )
    app.router.redirect_slashes = False  # a redirect would be a response without the API's error format
    return app


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    """Starlette names the methods of the first route with the path; others may have it, too."""
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
        error.headers = {"Allow": ", ".join(sorted({method for one in routes for method in one.methods}))}
    return api_error(error).response(request.url.path)


def served(shared: Shared, mount: Mount = nothing) -> ASGIApp:
    """The application of a server."""
    return _SuppressCancelled(build_app(shared, mount))


BACKLOG = 512  # connections that wait to be accepted
NOTIFY_SECONDS = 1.0  # to send the error to clients whose requests were cancelled
SHUTDOWN_SECONDS = 1.5  # NOTIFY_SECONDS, and the time until uvicorn notices a signal


class ServerOptions(TypedDict, total=False):
    library: Library | None  # of the host's models
    tools: Callable[[], Tools] | None  # that create models there
    mount: Mount  # returns the routes of other packages
    listener: socket.socket | None  # returned by `bind` for the settings; None: one is made
    read_keys: (
        Callable[[], Keys] | None
    )  # now, and when they are to be read again; None: they are those of the settings
    traces: Traces | None  # makes spans of requests
    signalled: Callable[[int], None]  # called in the handler of each signal, with its number


def run(
    models: Engine | ModelManager,
    settings: ServeSettings,
    *,
    load: Callable[[], None] | None = None,
    ready: Callable[[str], None] | None = None,
    **options: Unpack[ServerOptions],
) -> None:
    """Serve until a signal arrives. `ready` is called with the address once requests are served. With `read_keys`,
    SIGHUP reads the keys again.

    `load` opens the models of the host, on a thread of its own while the server listens; `startup` of the host says
    what it loads. What it raises ends the server, and is raised here. Raises `BadRequest` if the server cannot listen
    on the address.
    """
    server = Server(models, settings, **options)
    if load is None:
        server.serve(ready)
        return
    assert isinstance(models, ModelManager), "an engine is loaded already"
    models.startup.begin()
    loading = LoadThread(models.startup, load, server.stop)
    with server.signals():  # until the load has ended, too
        try:
            server.serve(lambda url: loading.start(lambda: ready(url) if ready else None))
        finally:
            loading.join()


class Server:
    """One server. Either call `serve()` in the main thread, or use it as a context manager that runs it in a thread.

    `models` is an engine, or a manager of several. The caller closes models and traces after the server. It listens
    from the constructor on: `url` has the actual port. Raises `BadRequest` if it cannot listen.
    """

    def __init__(
        self, models: Engine | ModelManager, settings: ServeSettings, **options: Unpack[ServerOptions]
    ) -> None:
        host = models if isinstance(models, ModelManager) else hosting(models)
        self._socket = options.get("listener") or bind(settings)
        _listen(self._socket, settings)
        address = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{address}:{self.port}"
        shared = shared_by(host, settings, options)
        self._threads, self.keys = shared.threads, shared.keys
        self._uvicorn = _Uvicorn(
            ServeConfig(served(shared, options.get("mount", nothing)), settings),
            shared.drain,
            lambda: self._ready(self.url),
            options.get("signalled", lambda number: None),
            self._reload_keys if self.keys.reloads else None,
        )
        self._ready: Callable[[str], None] = lambda url: None
        self._counting = partial(host.on_unload, shared.engines.unload)
        self._thread: threading.Thread | None = None

    def serve(self, ready: Callable[[str], None] | None = None) -> None:
        """Runs until `stop()`, or in the main thread until a signal."""
        self._ready = ready or self._ready
        with self._socket, contextlib.closing(self._threads), self._counting():
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._uvicorn.serve([self._socket]))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Signals end the server, and not the process, before `serve()` and after it."""
        with self._uvicorn.capture_signals():
            yield

    def _reload_keys(self) -> None:
        """On a thread of its own, as it reads files. The ring logs why it fails."""
        with contextlib.suppress(BadRequest):
            self.keys.reload()

    def stop(self, *, now: bool = False) -> None:
        """May be called from any thread. `now`: without waiting for running requests."""
        self._uvicorn.stop(now=now)

    def __enter__(self) -> "Server":
        started = threading.Event()
        self._thread = threading.Thread(target=self.serve, args=(lambda url: started.set(),), name="kvcellar-serve")
        self._thread.start()
        while not started.wait(0.05):
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start; its thread has ended")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self.stop()
        self._thread.join()


class _Uvicorn(uvicorn.Server):
    """uvicorn, except that a signal ends the server and not the process: the engine still has to be closed."""

    def __init__(
        self,
        config: ServeConfig,
        drain: Drain,
        ready: Callable[[], None],
        signalled: Callable[[int], None],
        hung_up: Callable[[], None] | None,
    ) -> None:
        """`hung_up` is what SIGHUP begins; None: it ends the process."""
        super().__init__(config)
        self._drain, self._ready, self._signalled, self._hang_up = drain, ready, signalled, hung_up
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain.start()
        await super().shutdown(sockets)
        if self.server_state.tasks:  # just cancelled, at the end of the drain: they send an error to their clients
            await asyncio.wait(set(self.server_state.tasks), timeout=NOTIFY_SECONDS)
        self._abort_connections()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        if self._hang_up is not None:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signalled(sig)
        self.stop(now=self.should_exit)

    def _hung_up(self, sig: int, frame: FrameType | None) -> None:
        threading.Thread(target=self._hang_up, name="kvcellar-keys").start()

    def stop(self, *, now: bool) -> None:
        self.should_exit = True
        if now and self._loop is not None and not self._loop.is_closed():
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _SuppressCancelled:
    """Requests are cancelled only at the end of the drain, after a response was sent; uvicorn would log a crash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)


def bind(settings: ServeSettings) -> socket.socket:
    """A socket bound to the address of `settings`, not listening yet. Raises `BadRequest` with the field's name."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadRequest(f"cannot listen on {settings.host!r}: {error.strerror}", "host") from error
    except ValueError as error:  # not the form of a host name
        raise BadRequest(f"cannot listen on {settings.host!r}: it is not a host name", "host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(listener, settings, error) from error
    return listener


def _listen(listener: socket.socket, settings: ServeSettings) -> None:
    """If two servers are bound to one port and neither listens yet, the second one fails only here."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(listener, settings, error) from error


def _cannot_listen(listener: socket.socket, settings: ServeSettings, error: OSError) -> BadRequest:
    listener.close()
    where = f"cannot listen on {settings.host}, port {settings.port}: {error.strerror}."
    if error.errno == errno.EADDRNOTAVAIL:
        return BadRequest(f"{where} Choose an address of this machine.", "host")
    return BadRequest(f"{where} Choose another port.", "port")
