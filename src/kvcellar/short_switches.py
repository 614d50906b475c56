"""short_switches: threads take turns with the interpreter lock more often while a model is loaded.

A busy thread keeps the lock for up to `sys.getswitchinterval()`, 5 ms by default. A step of an engine takes the lock
again in each of its hundreds of operations, so beside a load it could take a second.

Reading a weight keeps the lock for as long as it takes, whatever the interval. `Rests` gives the same time to others
afterwards.

Always true:
  * the interval is `SHORT` while there is a block, and what it was before the first one afterwards.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

SHORT = 2e-4  # seconds
MOST_REST = 0.02  # seconds


class ShortSwitches:
    """A context manager that several threads may be in. The interval is one of the process."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SHORT, self._before))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.setswitchinterval(self._before)


class Rests:
    """Called between the parts of a load: sleeps as long as the last part took, at most `MOST_REST`, while `busy`
    returns True."""

    def __init__(
        self,
        busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy, self._clock, self._sleep = busy, clock, sleep
        self._since = clock()

    def __call__(self) -> None:
        if self._busy():
            self._sleep(min(MOST_REST, max(0.0, self._clock() - self._since)))
        self._since = self._clock()
