"""drain: refuses requests that have not started when the server shuts down.

From `start` on, requests that arrive, are still being received, or wait in the engine's queue are refused with 503, so
that their clients can use another server. Requests that the engine has begun continue until the server cancels them.

Always true, on the event loop:
  * once the drain has started, no request is submitted to the engine.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kvcellar.serve.api_errors import shutting_down

T = TypeVar("T")


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
        worker, start = asyncio.ensure_future(work), asyncio.ensure_future(self._start.wait())
        try:
            await asyncio.wait((worker, start), return_when=asyncio.FIRST_COMPLETED)
            if self.started or not worker.done():
                raise shutting_down()
            return worker.result()
        finally:
            worker.cancel()
            start.cancel()
            await asyncio.gather(worker, start, return_exceptions=True)
