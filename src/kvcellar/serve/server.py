"""server: uvicorn around the application, in this thread or in one of its own.

The first SIGINT or SIGTERM ends listening, closes idle connections, refuses requests that have not begun, and lets
running ones end, for at most `drain_seconds`; then their clients get an error that says that the server stops. The
second signal cuts them off. All of it takes at most `ENDING` seconds beside `drain_seconds`, whether clients read or
not. The engine stays the caller's, to be closed afterwards.
"""

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import HANDLED_SIGNALS

from kvcellar.errors import BadRequest
from kvcellar.serve.app import build_app
from kvcellar.serve.connection import ServeConfig
from kvcellar.serve.drain import Drain
from kvcellar.serve.lanes import Lanes
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.settings import ServeSettings

BACKLOG = 512  # connections that wait to be accepted
LAST_WORDS = 1.0  # seconds for telling clients that the server stops
ENDING = 1.5  # seconds: those, and what uvicorn takes to notice a signal


def run(
    engine: ServedEngine,
    settings: ServeSettings,
    *,
    listener: socket.socket | None = None,
    ready: Callable[[str], None] | None = None,
    signalled: Callable[[int], None] = lambda number: None,
) -> None:
    """Serve until a signal says stop. `ready` is called with the address once requests are served, `signalled` in the
    handler of each signal, with its number.

    `listener` is what `bound` returned for these settings; None: it is made now. Raises `BadRequest` where the address
    cannot be listened on.
    """
    Server(engine, settings, listener=listener).serve(ready, signalled)


class Server:
    """One server. Either `serve()` in the main thread, or a `with` block, around which it runs in a thread of its own.

    It listens at once: `url` holds the real port before any request is answered. Raises `BadRequest` where it cannot.
    """

    def __init__(self, engine: ServedEngine, settings: ServeSettings, *, listener: socket.socket | None = None) -> None:
        self._socket = listener or bound(settings)
        _listen(self._socket, settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        drain, self._lanes = Drain(), Lanes()
        app = _LastWord(build_app(engine, settings=settings, lanes=self._lanes, drain=drain))
        self._uvicorn = _Uvicorn(ServeConfig(app, settings), drain)
        self._thread: threading.Thread | None = None

    def serve(
        self, ready: Callable[[str], None] | None = None, signalled: Callable[[int], None] = lambda number: None
    ) -> None:
        """Until `stop()`, or a signal where this is the main thread."""
        self._uvicorn.when_ready = lambda: ready(self.url) if ready else None
        self._uvicorn.when_signalled = signalled
        with self._socket, contextlib.closing(self._lanes):
            asyncio.run(self._uvicorn.serve([self._socket]))

    def stop(self, *, now: bool = False) -> None:
        """From any thread. `now`: without waiting for running requests."""
        self._uvicorn.stop(now=now)

    def __enter__(self) -> "Server":
        started = threading.Event()
        self._thread = threading.Thread(target=self.serve, args=(lambda url: started.set(),), name="kvcellar-serve")
        self._thread.start()
        while not started.wait(0.05):
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start; its thread has ended")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._thread is not None
        self.stop()
        self._thread.join()


class _Uvicorn(uvicorn.Server):
    """uvicorn, with signals that end the server and not the process: the engine is still to be closed."""

    def __init__(self, config: ServeConfig, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain
        self.when_ready: Callable[[], None] = lambda: None
        self.when_signalled: Callable[[int], None] = lambda number: None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain.begin()
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled just now, at the end of the drain: they tell their clients
            await asyncio.wait(set(self.server_state.tasks), timeout=LAST_WORDS)
        self._cut_all()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.when_signalled(sig)
        self.stop(now=self.should_exit)

    def stop(self, *, now: bool) -> None:
        self.should_exit = True
        if now and self._loop is not None and not self._loop.is_closed():
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._cut_all)

    def _cut_all(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _LastWord:
    """Only the end of the drain cancels a request. It was answered by then, and uvicorn would report it as a crash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)


def bound(settings: ServeSettings) -> socket.socket:
    """A socket with the address of `settings`, which does not listen yet. Raises `BadRequest`, naming the field."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadRequest(f"cannot listen on {settings.host!r}: {error.strerror}", "host") from error
    except ValueError as error:  # a name that is no host name at all
        raise BadRequest(f"cannot listen on {settings.host!r}: it is not a host name", "host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _unbindable(listener, settings, error) from error
    return listener


def _listen(listener: socket.socket, settings: ServeSettings) -> None:
    """Where two servers have the same port and neither listens yet, only here the second one is refused."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _unbindable(listener, settings, error) from error


def _unbindable(listener: socket.socket, settings: ServeSettings, error: OSError) -> BadRequest:
    listener.close()
    where = f"cannot listen on {settings.host}, port {settings.port}: {error.strerror}."
    if error.errno == errno.EADDRNOTAVAIL:
        return BadRequest(f"{where} Choose an address of this machine with host.", "host")
    return BadRequest(f"{where} Choose another with port.", "port")
