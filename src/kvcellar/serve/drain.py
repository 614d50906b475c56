"""drain: what the end of a server means for its requests.

From its beginning on, requests that come, or have not arrived, or wait in the engine's queue, are refused at once: with
503, so that their clients turn to another server. Requests that the engine works on may go on until the server cuts
them off.

Always true, on the event loop:
  * once the drain has begun, no request is submitted to the engine any more.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kvcellar.serve.failures import shutting_down

T = TypeVar("T")


class Drain:
    """Of one server. Everything here is called on its event loop."""

    def __init__(self) -> None:
        self._bell = asyncio.Event()
        self._queued: set[Callable[[], None]] = set()

    @property
    def begun(self) -> bool:
        return self._bell.is_set()

    def begin(self) -> None:
        """May be called again."""
        self._bell.set()
        for refuse in list(self._queued):
            refuse()

    @contextmanager
    def refusing(self, refuse: Callable[[], None]) -> Iterator[None]:
        """Within the block `refuse` is called when the drain begins."""
        self._queued.add(refuse)
        try:
            yield
        finally:
            self._queued.discard(refuse)

    async def before(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, if it ends before the drain begins; else it is cancelled. Raises `ApiError` 503 then."""
        worker, bell = asyncio.ensure_future(work), asyncio.ensure_future(self._bell.wait())
        try:
            await asyncio.wait((worker, bell), return_when=asyncio.FIRST_COMPLETED)
            if self.begun or not worker.done():
                raise shutting_down()
            return worker.result()
        finally:
            worker.cancel()
            bell.cancel()
            await asyncio.gather(worker, bell, return_exceptions=True)
