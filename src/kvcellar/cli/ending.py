"""ending: bounds the time from the first signal to the end of the process.

A server that was told to stop drains, and its engine ends the step that it is in. Nothing can end a step from outside,
and on a slow device one can take longer than a supervisor waits: then the process ends without it.
"""

import logging
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType

log = logging.getLogger("kvcellar.serve")

BY_SIGNAL = 128  # plus the number of the signal, as shells have it: the exit code after the second signal
TOO_LATE = 1  # exit code where the time was over


class Ending:
    """A context manager, around everything that has to end. `signalled` is for a signal handler."""

    def __init__(self, seconds: float, *, last: Callable[[], None], leave: Callable[[int], None] = os._exit) -> None:
        """`last` is called before the process ends too late: it writes the log to its end."""
        self._seconds, self._last, self._leave = seconds, last, leave
        self._words: SimpleQueue[bool] = SimpleQueue()  # True: signalled; False: ended. Its put is safe in a handler
        self._signals = 0
        self._thread = threading.Thread(target=self._watch, name="kvcellar-ending", daemon=True)

    def signalled(self, number: int) -> None:
        """The first begins the time that there is. The second ends the process at once."""
        self._signals += 1
        if self._signals > 1:
            self._leave(BY_SIGNAL + number)
        self._words.put(True)

    def __enter__(self) -> "Ending":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._words.put(False)

    def _watch(self) -> None:
        if not self._words.get():
            return
        try:
            while self._words.get(timeout=self._seconds):
                pass
        except Empty:
            log.error("the engine did not end its step within %g seconds of the signal; exiting", self._seconds)
            self._last()
            self._leave(TOO_LATE)
