"""turns: the event loop's CPU time among the connections that need much of it to be parsed.

A body in chunks of one byte takes some hundred times the CPU time of the same body in one piece, all of it with the
interpreter locked (see `kvcellar.pace`). A connection that has used its allowance is parsed in turns.

Always true, on the event loop:
  * one piece is parsed in a turn, and turns take a third of the time, however many connections wait for one;
  * each connection that waits has one place in the queue, and the queue moves until it is empty.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from kvcellar.pace import FREE, REST

SHARE = 1 / 3  # of the time that passes


class Allowance:
    """CPU time of one connection: `FREE` seconds at once, and then `SHARE` of the time that passes."""

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


class Turns:
    """Of one server. Everything here is called on its event loop."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._moving = False

    def wait(self, work: Callable[[], None]) -> None:
        """`work` is called when its turn comes."""
        self._waiting.append(work)
        if not self._moving:
            self._rest(0.0)

    def _rest(self, worked: float) -> None:
        self._moving = True
        asyncio.get_running_loop().call_later(max(REST, worked * (1 / SHARE - 1)), self._next)

    def _next(self) -> None:
        if not self._waiting:
            self._moving = False
            return
        began = self._clock()
        try:
            self._waiting.popleft()()
        finally:
            self._rest(self._clock() - began)
