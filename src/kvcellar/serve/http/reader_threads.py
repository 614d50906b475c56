"""reader_threads: thread pools for work that would block the event loop: bodies are parsed and tokenized, files are
read, engines are asked.

Always true:
  * work waits only for work of its kind: short bodies neither for long ones nor for files, engines or operators;
  * a kind with one thread is done one after another, in the order in which it was submitted;
  * at most two long bodies of requests to models are parsed or tokenized at the same time.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from kvcellar.serve.http.body import RequestBody

Kind = Literal["short", "long", "files", "models", "library", "create", "admin", "inspector", "upload"]
THREADS: Mapping[Kind, int] = {
    "short": 4,  # bodies
    "long": 2,  # bodies
    "files": 5,  # conversations, responses that are kept, and /metrics: waits for seconds at most
    "models": 2,  # shows models, and may compare their files
    "library": 1,  # changes the library, or finds a model for a request
    "create": 1,  # creates or downloads a model: takes hours
    "admin": 1,  # of operators: may read the whole store
    "inspector": 1,  # looks at an engine between its steps
    "upload": 1,  # writes parts of files
}
# A field may be `conversation` or `previous_response_id` only where this matches: JSON has no other escapes of these
# characters. Such a body is short, but what it continues may be long.
_CONTINUES = re.compile(rb'"conversation"|"previous_response_id"|\\u00[567]')

T = TypeVar("T")


class ReaderThreads:
    """Close it after the last request."""

    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(count, f"kvcellar-{kind}") for kind, count in THREADS.items()}

    async def read(self, body: RequestBody, work: Callable[[], T]) -> T:
        """The result of `work`, which reads `body`."""
        if body.long:
            return await self.run("long", work, body)
        return await self.run("files" if _CONTINUES.search(body.data) else "short", work, body)

    async def run(self, kind: Kind, work: Callable[[], T], body: RequestBody | None = None) -> T:
        """The result of `work`. If the request is cancelled meanwhile, it is done all the same, and `body`, which it
        reads, is released when it ends."""
        future = self._pools[kind].submit(work)
        if body is not None:
            body.enter_thread()
            future.add_done_callback(lambda _: body.leave_thread())
        return await asyncio.wrap_future(future)

    def begin(self, work: Callable[[], None]) -> None:
        """Create or download a model. `work` raises nothing."""
        self._pools["create"].submit(work)

    def end_upload(self, work: Callable[[], object]) -> None:
        """Run `work` after what was submitted for uploads so far, also if this is closed before or meanwhile."""
        try:
            self._pools["upload"].submit(work)
        except RuntimeError:  # it is closed: nothing follows in its thread
            self._pools["upload"].shutdown()
            work()

    def close(self) -> None:
        for kind, pool in self._pools.items():
            pool.shutdown(wait=False, cancel_futures=kind != "upload")
