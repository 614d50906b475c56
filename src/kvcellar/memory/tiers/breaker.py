"""breaker: stops the use of a medium that fails, for a while that doubles."""

import threading
import time
from collections.abc import Callable


class Breaker:
    """Counts failures in a row. `down` from the last of `after` on for `wait` seconds, doubled each time it fails again
    without a success in between, up to `longest`."""

    def __init__(
        self, *, after: int, wait: float = 1.0, longest: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after, self._first, self._longest, self._clock = after, wait, longest, clock
        self._lock = threading.Lock()
        self._in_row, self._wait, self._until = 0, wait, -float("inf")

    @property
    def down(self) -> bool:
        return self._clock() < self._until

    def failed(self) -> None:
        with self._lock:
            self._in_row += 1
            if self._in_row >= self._after and not self.down:
                self._until = self._clock() + self._wait
                self._wait = min(2 * self._wait, self._longest)

    def succeeded(self) -> None:
        with self._lock:
            self._in_row, self._wait = 0, self._first
