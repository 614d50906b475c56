"""progress_lines: long work on a thread, whose progress is sent as lines of JSON, as Ollama does.

Always true:
  * one such work runs at a time on a server; others wait;
  * if the client leaves, the next report of progress ends the work.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from kvcellar.errors import KvcellarError
from kvcellar.progress import Listener, Progress, listening
from kvcellar.serve.api_errors import ApiError, ClientDisconnected, api_error
from kvcellar.serve.json_text import to_json
from kvcellar.serve.own_paths import without_paths
from kvcellar.serve.reader_threads import ReaderThreads

SECONDS = 0.1  # between two lines of one stage
Json = dict[str, object]
Work = Callable[[Listener], None]  # calls the listener, or `progress.report`


async def lines(threads: ReaderThreads, work: Work) -> AsyncIterator[bytes]:
    """A line for each report of `work`, then one with success or the error."""
    with Run(threads, work) as run:
        while (line := await run.next()) is not None:
            yield to_json(line) + b"\n"
        yield to_json({"status": "success"} if run.error is None else {"error": run.error.message}) + b"\n"


async def result(threads: ReaderThreads, work: Work) -> None:
    """The same without lines. Raises `ApiError`."""
    with Run(threads, work) as run:
        while await run.next() is not None:
            pass
    if run.error is not None:
        raise run.error


class Run:
    """One work, on the thread for long ones. Leaving the block ends it, at its next report."""

    def __init__(self, threads: ReaderThreads, work: Work) -> None:
        self._loop, self._work = asyncio.get_running_loop(), work
        self._lines: asyncio.Queue[Json | None] = asyncio.Queue()
        self._abandoned, self._last, self._stage = False, 0.0, ""
        self.error: ApiError | None = None
        threads.begin(self._run)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._abandoned = True

    async def next(self) -> Json | None:
        """The next line; None after the last."""
        return await self._lines.get()

    def _run(self) -> None:
        try:
            with listening(self.report):
                self.report(Progress("starting"))
                self._work(self.report)
        except ClientDisconnected:
            pass
        except BaseException as error:  # noqa: BLE001 - returned to the client; a panic of compiled code, too
            self.error = failure(error)
        self._post(None)

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
        self._post(line)

    def _post(self, line: Json | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)


def failure(error: BaseException) -> ApiError:
    """The error of such work. What kvcellar raises on purpose is for the client."""
    found = api_error(error)
    if found.status == 500 and isinstance(error, KvcellarError):
        return ApiError(400, without_paths(str(error)), code="not_possible")
    return replace(found, message=without_paths(found.message))
