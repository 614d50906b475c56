"""lifecycle: when a server refuses requests: until its models are loaded, and from when it shuts down.

A server listens before its models are loaded. One thread loads them; until it has ended, `/ready` is 503 and says how
far it is, and other requests are refused. When the server shuts down, requests that arrive, are still being received,
or wait in the engine's queue are refused with 503, so that their clients can use another server. Requests that the
engine has begun continue until the server cancels them.

Always true:
  * a server whose models are loaded when it starts, or that has none to load, never refuses a request at its start;
  * once a startup has ended it does not begin again;
  * on the event loop: once the drain has started, no request is submitted to the engine.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvcellar.errors import EngineClosed
from kvcellar.progress import Progress
from kvcellar.serve.http.api_errors import ApiError, shutting_down
from kvcellar.serve.http.sending import raced

T = TypeVar("T")

LOADING = "loading_model"  # the code of errors meanwhile
RETRY_SECONDS = "5"
SIGNAL_SECONDS = 0.1  # until a signal is heard while a load is waited for


class Startup:
    """Thread-safe: the thread that loads writes, the event loop reads and stops it."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """`names`: of the models that are loaded, in order."""
        self.names, self.loading, self.stopped = names, False, False
        self._at = 0  # index of the model that is being loaded
        self._progress: Progress | None = None

    def begin(self) -> None:
        """Refuse requests from now on. Call it before the server listens."""
        self.loading = True

    def loads(self, at: int) -> None:
        """The model with this index is loaded from now on."""
        self._at, self._progress = at, None
        self.going_on()

    def heard(self, progress: Progress) -> None:
        """What is being done for it. Raises `EngineClosed` if the server has ended."""
        self._progress = progress
        self.going_on()

    def going_on(self) -> None:
        """Raises `EngineClosed` if the server has ended."""
        if self.stopped:
            raise EngineClosed("the server was stopped while its models were loaded")

    def ended(self) -> None:
        self.loading = False

    def stop(self) -> None:
        """Ends the load soon: the next report of its progress raises."""
        self.stopped = True

    def refuse(self, *, named: bool) -> None:
        """Raises `ApiError` 503 while models are loaded. `named`: with the name of the model."""
        if self.loading:
            raise loading(self._told(named))

    def _told(self, named: bool) -> str:
        at, progress = self._at, self._progress
        name = f" {self.names[at]}" if named and at < len(self.names) else ""
        done = f", {at} of {len(self.names)} are loaded" if len(self.names) > 1 else ""
        stage = "" if progress is None else f": {progress.stage}"
        if progress is not None and progress.total:
            stage += f", {progress.done} of {progress.total}"
        return f"the server is loading the model{name}{done}{stage}; try again later"


def loading(message: str) -> ApiError:
    return ApiError(503, message, code=LOADING, headers={"retry-after": RETRY_SECONDS})


class LoadThread:
    """Runs `load` on a thread of its own beside a server, which `stop` ends if `load` raises."""

    def __init__(self, startup: Startup, load: Callable[[], None], stop: Callable[[], None]) -> None:
        self._startup, self._load, self._stop = startup, load, stop
        self._error: BaseException | None = None
        self._then: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="kvcellar-startup")

    def start(self, then: Callable[[], None]) -> None:
        """`then` is called on the thread once requests are served."""
        self._then = then
        self._thread.start()

    def join(self) -> None:
        """After the server has ended: stops a load that is running, and raises what `load` raised by itself."""
        self._startup.stop()
        # The system may hand a signal to another thread, which does not wake this one: it looks for them by itself.
        while self._thread.is_alive():
            self._thread.join(SIGNAL_SECONDS)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._load()
            self._startup.going_on()
            self._startup.ended()
            self._then()
        except BaseException as error:  # noqa: BLE001 - raised again where the server was started
            if self._startup.stopped and isinstance(error, EngineClosed):
                return
            self._error = error
            self._stop()


class Drain:
    """The drain of one server. All methods are called on its event loop."""

    def __init__(self) -> None:
        self._start = asyncio.Event()
        self._callbacks: set[Callable[[], None]] = set()

    @property
    def started(self) -> bool:
        return self._start.is_set()

    def start(self) -> None:
        """May be called again."""
        self._start.set()
        for callback in list(self._callbacks):
            callback()

    @contextmanager
    def on_start(self, callback: Callable[[], None]) -> Iterator[None]:
        """Within the block, `callback` is called when the drain starts."""
        self._callbacks.add(callback)
        try:
            yield
        finally:
            self._callbacks.discard(callback)

    async def run_before(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the drain starts first, cancels `work` and raises `ApiError` 503."""
        async with raced(work, self._start.wait()) as worker:
            if self.started or not worker.done():
                raise shutting_down()
            return worker.result()
