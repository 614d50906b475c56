"""progress_lines: long work on a thread, whose progress is sent as lines of JSON, as Ollama does.

Always true:
  * one such work runs at a time on a server; others wait;
  * if the client leaves, the next report of progress ends the work.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from kvcellar.errors import KvcellarError
from kvcellar.progress import Listener, Progress, listening
from kvcellar.serve.api_errors import ApiError, ClientDisconnected, api_error
from kvcellar.serve.json_text import to_json

SECONDS = 0.1  # between two lines of one stage
Json = dict[str, object]
Work = Callable[[Listener], None]  # calls the listener, or `progress.report`


class ProgressLines:
    """The work of one server."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def lines(self, work: Work) -> AsyncIterator[bytes]:
        """A line for each report of `work`, then one with success or the error."""
        async with self._one:
            run = Run(asyncio.get_running_loop(), work)
            try:
                while (line := await run.next()) is not None:
                    yield to_json(line) + b"\n"
                yield to_json({"status": "success"} if run.error is None else {"error": run.error.message}) + b"\n"
            finally:
                run.abandon()
                await run.ended.wait()

    async def result(self, work: Work) -> None:
        """The same without lines. Raises `ApiError`."""
        async with self._one:
            run = Run(asyncio.get_running_loop(), work)
            try:
                while await run.next() is not None:
                    pass
            finally:
                run.abandon()
                await run.ended.wait()
            if run.error is not None:
                raise run.error


class Run:
    """One work, on a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Work) -> None:
        self._loop, self._work = loop, work
        self._lines: asyncio.Queue[Json | None] = asyncio.Queue()
        self._abandoned, self._last, self._stage = False, 0.0, ""
        self.error: ApiError | None = None
        self.ended = asyncio.Event()
        threading.Thread(target=self._run, name="kvcellar-library").start()

    async def next(self) -> Json | None:
        """The next line; None after the last."""
        return await self._lines.get()

    def abandon(self) -> None:
        """The next report raises."""
        self._abandoned = True

    def _run(self) -> None:
        try:
            with listening(self.report):
                self._work(self.report)
        except ClientDisconnected:
            pass
        except Exception as error:  # noqa: BLE001 - returned to the client
            self.error = failure(error)
        self._post(lambda: (self.ended.set(), self._lines.put_nowait(None)))

    def report(self, progress: Progress) -> None:
        """May be called from any thread."""
        if self._abandoned:
            raise ClientDisconnected
        now = time.monotonic()
        if progress.stage == self._stage and progress.done < progress.total and now < self._last + SECONDS:
            return
        self._last, self._stage = now, progress.stage
        line: Json = {"status": progress.stage}
        if progress.total:
            line |= {"total": progress.total, "completed": progress.done}
        self._post(lambda: self._lines.put_nowait(line))

    def _post(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(call)


def failure(error: Exception) -> ApiError:
    """The error of such work. What kvcellar raises on purpose is for the client."""
    found = api_error(error)
    if found.status == 500 and isinstance(error, KvcellarError):
        return ApiError(400, str(error), code="not_possible")
    return found
