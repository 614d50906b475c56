"""reader_threads: thread pools in which request bodies are parsed and tokenized, and the work of operators is done, so
that the event loop is not blocked.

Always true:
  * short bodies wait neither for long ones nor for the files of conversations and models: each kind has its own pool;
  * at most `LONG` long bodies are parsed or tokenized, and at most `CONVERSATIONS` requests read or write a named
    conversation, or continue a stored response, at the same time. A long body that continues one is a long one.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcellar.serve.body import RequestBody

SHORT, LONG, CONVERSATIONS, LISTING = 4, 2, 4, 2  # threads
# A field may be `conversation` or `previous_response_id` only where this matches: JSON has no other escapes of these
# characters. Such a body is short, but what it continues may be long.
_CONTINUES = re.compile(rb'"conversation"|"previous_response_id"|\\u00[567]')

T = TypeVar("T")


class ReaderThreads:
    """Close it after the last request."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT, "kvcellar-read")
        self._long = ThreadPoolExecutor(LONG, "kvcellar-read-long")
        self._conversations = ThreadPoolExecutor(CONVERSATIONS, "kvcellar-conversation")
        self._library = ThreadPoolExecutor(1, "kvcellar-library")
        self._listing = ThreadPoolExecutor(LISTING, "kvcellar-listing")
        self._long_work = ThreadPoolExecutor(1, "kvcellar-create")
        self._admin = ThreadPoolExecutor(1, "kvcellar-admin")
        self._metrics = ThreadPoolExecutor(1, "kvcellar-metrics")
        self._upload = ThreadPoolExecutor(1, "kvcellar-upload")
        self._inspecting = ThreadPoolExecutor(1, "kvcellar-inspect")

    async def run(self, body: RequestBody, work: Callable[[], T]) -> T:
        """The result of `work`, which reads `body`. If the request is cancelled meanwhile, the body is released when
        `work` ends."""
        if body.long:
            return await self._run(self._long, body, work)
        return await self._run(self._conversations if _CONTINUES.search(body.data) else self._short, body, work)

    async def for_conversation(self, body: RequestBody, work: Callable[[], T]) -> T:
        """As `run`, for work that reads or writes a named conversation: it may wait for a file."""
        return await self._run(self._conversations, body, work)

    async def _run(self, pool: ThreadPoolExecutor, body: RequestBody, work: Callable[[], T]) -> T:
        future = pool.submit(work)
        body.enter_thread()
        future.add_done_callback(lambda _: body.leave_thread())
        return await asyncio.wrap_future(future)

    async def for_listing(self, work: Callable[[], T]) -> T:
        """The result of `work`, which shows models, and may read files of all of them."""
        return await asyncio.wrap_future(self._listing.submit(work))

    async def for_library(self, work: Callable[[], T]) -> T:
        """The result of `work`, which changes the library or compares its files; one after another."""
        return await asyncio.wrap_future(self._library.submit(work))

    def begin_long(self, work: Callable[[], None]) -> None:
        """Run `work`, which may take hours and raises nothing; one after another."""
        self._long_work.submit(work)

    async def for_admin(self, work: Callable[[], T]) -> T:
        """The result of `work`, which may take long; one after another."""
        return await asyncio.wrap_future(self._admin.submit(work))

    async def for_metrics(self, work: Callable[[], T]) -> T:
        """The result of `work`, which waits for engines; one after another."""
        return await asyncio.wrap_future(self._metrics.submit(work))

    async def for_inspector(self, work: Callable[[], T]) -> T:
        """The result of `work`, which looks at an engine between its steps; one after another."""
        return await asyncio.wrap_future(self._inspecting.submit(work))

    async def for_upload(self, work: Callable[[], T]) -> T:
        """The result of `work`, which writes a part of a file; one after another."""
        return await asyncio.wrap_future(self._upload.submit(work))

    def end_upload(self, work: Callable[[], object]) -> None:
        """Run `work` after what was submitted for uploads so far, also if this is closed before or meanwhile."""
        try:
            self._upload.submit(work)
        except RuntimeError:  # it is closed: nothing follows in its thread
            self._upload.shutdown()
            work()

    def close(self) -> None:
        library = self._library, self._listing, self._long_work
        looking = self._metrics, self._inspecting
        for pool in (self._short, self._long, self._conversations, *library, self._admin, *looking):
            pool.shutdown(wait=False, cancel_futures=True)
        self._upload.shutdown(wait=False)
