"""reader_threads: thread pools in which request bodies are parsed and tokenized, and the work of operators is done, so
that the event loop is not blocked.

Always true:
  * short bodies do not wait for long ones: each kind has its own pool;
  * at most `LONG` long bodies are parsed or tokenized at the same time.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcellar.serve.body import SHORT_BODY, RequestBody

SHORT, LONG = 4, 2  # threads

T = TypeVar("T")


class ReaderThreads:
    """Close it after the last request."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT, "kvcellar-read")
        self._long = ThreadPoolExecutor(LONG, "kvcellar-read-long")
        self._admin = ThreadPoolExecutor(1, "kvcellar-admin")

    async def run(self, body: RequestBody, work: Callable[[], T]) -> T:
        """The result of `work`, which reads `body`. The body is freed when `work` ends, even if the request was
        cancelled meanwhile."""
        pool = self._short if len(body.data) <= SHORT_BODY else self._long
        future = pool.submit(work)
        body.in_thread = True
        future.add_done_callback(lambda _: body.free())
        return await asyncio.wrap_future(future)

    async def for_admin(self, work: Callable[[], T]) -> T:
        """The result of `work`, which may take long; one after another."""
        return await asyncio.wrap_future(self._admin.submit(work))

    def close(self) -> None:
        for pool in (self._short, self._long, self._admin):
            pool.shutdown(wait=False, cancel_futures=True)
