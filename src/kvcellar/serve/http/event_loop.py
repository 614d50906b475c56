"""event_loop: what keeps the turns of the event loop short, however many connections have sent something.

asyncio calls what is ready on all sockets in one turn, and what another thread has asked for in the next one: tokens of
an engine would wait for a part of the body of every other client, several times until they are sent. And a body in
chunks of one byte takes some hundred times the CPU time of the same body in one chunk, all of it on the event loop: so
data of a connection that has used up its CPU budget is parsed from a queue.

Always true:
  * a turn handles at most `SOCKETS` sockets; all that are ready are handled before any is asked for again;
  * the queue runs one job at a time, and its jobs take a third of the time, however many connections are waiting;
  * a connection has at most one job in the queue, and the queue runs until it is empty.
"""

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Any

SOCKETS = 8
FREE = 0.02  # seconds of CPU time of a new connection
REST = 0.004  # seconds between two jobs, at least
SHARE = 1 / 3  # of the time that passes


class ShortTurns(selectors.DefaultSelector):
    """Returns some of the sockets that are ready, and the others from the next calls, unless they were unregistered
    meanwhile, or are not registered for that any more."""

    def __init__(self) -> None:
        super().__init__()
        self._rest: deque[tuple[selectors.SelectorKey, int]] = deque()

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Its descriptor may be that of another socket next."""
        key = super().unregister(fileobj)
        self._rest = deque(one for one in self._rest if one[0].fd != key.fd)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = list[tuple[selectors.SelectorKey, int]]()
        while self._rest and len(found) < SOCKETS:
            key, events = self._rest.popleft()
            now = self.get_map()[key.fd]
            if wanted := events & now.events:
                found.append((now, wanted))
        if not found:
            self._rest.extend(super().select(timeout))
            found = [self._rest.popleft() for _ in range(min(SOCKETS, len(self._rest)))]
        return found


def new_event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(ShortTurns())


class CpuBudget:
    """CPU time of one connection: `FREE` seconds at first, refilled with `SHARE` of the time that passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._since = FREE, clock()

    def spend(self, seconds: float) -> None:
        now = self._clock()
        self._left = min(FREE, self._left + SHARE * (now - self._since)) - seconds
        self._since = now

    @property
    def used_up(self) -> bool:
        return self._left + SHARE * (self._clock() - self._since) <= 0


class ParseQueue:
    """The queue of one server. All methods are called on its event loop."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = False

    def add(self, job: Callable[[], None]) -> None:
        """Call `job` when those before it have run."""
        self._jobs.append(job)
        if not self._running:
            self._schedule(0.0)

    def _schedule(self, worked: float) -> None:
        self._running = True
        asyncio.get_running_loop().call_later(max(REST, worked * (1 / SHARE - 1)), self._next)

    def _next(self) -> None:
        if not self._jobs:
            self._running = False
            return
        began = self._clock()
        try:
            self._jobs.popleft()()
        finally:
            self._schedule(self._clock() - began)
