"""parse_queue: limits the CPU time that the event loop spends on parsing HTTP.

A body in chunks of one byte takes some hundred times the CPU time of the same body in one chunk, all of it on the
event loop. Data of a connection that has used up its CPU budget is parsed from a queue.

Always true, on the event loop:
  * the queue runs one job at a time, and its jobs take a third of the time, however many connections are waiting;
  * a connection has at most one job in the queue, and the queue runs until it is empty.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

FREE = 0.02  # seconds of CPU time of a new connection
REST = 0.004  # seconds between two jobs, at least
SHARE = 1 / 3  # of the time that passes


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
