"""shutdown: limits the time from the first signal to the end of the process.

At shutdown the server drains and the engine finishes its current step. A step cannot be interrupted, and on a slow
device it can take longer than a supervisor waits. After a time limit the process exits without waiting for it.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger("kvcellar.serve")

BY_SIGNAL = 128  # plus the number of the signal, as in shells: the exit code after the second signal
TIMED_OUT = 1  # the exit code after the time limit


class ShutdownTimer:
    """A context manager around everything that has to be closed, on the main thread. `signalled` may be called in a
    signal handler.

    The server handles signals while it runs, and tells them to `signalled`. Before and after that they come here: the
    first one does what it did outside the block, the second one ends the process, also while engines are closed.
    """

    def __init__(self, seconds: float, *, flush: Callable[[], None], leave: Callable[[int], None] = os._exit) -> None:
        """`flush` is called before the process exits because of the time limit; it writes the rest of the log."""
        self._seconds, self._flush, self._leave = seconds, flush, leave
        self._events: SimpleQueue[bool] = SimpleQueue()  # True: signal; False: closed. `put` is safe in a handler
        self._signals = 0
        self._before: dict[int, Any] = {}  # handlers, by number of the signal
        self._thread = threading.Thread(target=self._watch, name="kvcellar-shutdown", daemon=True)

    def signalled(self, number: int) -> None:
        """The first signal starts the timer, the second ends the process at once."""
        self._signals += 1
        if self._signals > 1:
            self._leave(BY_SIGNAL + number)
        self._events.put(True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signals:
            self.signalled(number)
        elif callable(before := self._before[number]):
            before(number, frame)
        elif before is signal.SIG_DFL:
            signal.signal(number, before)
            signal.raise_signal(number)

    def __enter__(self) -> "ShutdownTimer":
        self._thread.start()
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._events.put(False)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        if not self._events.get():
            return
        try:
            while self._events.get(timeout=self._seconds):
                pass
        except Empty:
            log.error(
                "the engine did not end its step within %g seconds of the signal, or its load; exiting", self._seconds
            )
            self._flush()
            self._leave(TIMED_OUT)
