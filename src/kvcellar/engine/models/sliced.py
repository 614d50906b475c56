"""sliced: a call that is made in slices.

It runs on a thread of its own, which runs only while another one waits for it: one of the two at any time, as with a
coroutine, but the call can stop inside code that knows nothing of this, as the forward of a network. What belongs to a
thread (context variables, modes of torch) each of them has for itself.

Always true between two slices: the thread waits where the work has stopped; or there is none, before the first slice
and after the work has returned, has raised, or was ended. One thread calls `run` and `end`.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class _Ended(BaseException):
    """The work is not to go on. A `BaseException`, so that no `except Exception` in the work catches it."""


class Sliced(Generic[T]):
    def __init__(
        self,
        work: Callable[[], T],
        around: Callable[[Callable[[], None]], AbstractContextManager[None]],
        clock: Callable[[], float],
    ) -> None:
        """`around` is entered for each slice. It gets what `work` has to call where it may stop."""
        self._work, self._around, self._clock = work, around, clock
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._until = self._before = 0.0  # the end of the slice, and when the part that runs began
        self._ended = self._over = False  # it is not to go on; its work is done
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self, seconds: float) -> T | None:
        """Run for about so many seconds: at least up to the next place where the work may stop, and not beyond a place
        from which a part as long as the last would exceed them. Returns its result, which is not None; None: it is not
        done. Raises what it raises."""
        assert not self._over, "it has returned or raised"
        with self._around(self._pause):
            if self._thread is None:
                thread = threading.Thread(target=self._main, name="kvcellar-slices", daemon=True)
                thread.start()
                self._thread = thread
            self._before = self._clock()
            self._until = self._before + seconds
            self._go.release()
            self._stopped.acquire()
            if self._over:
                self._thread.join()
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # it refers to this frame

    def end(self) -> None:
        """Raise where it has stopped, and wait for its end. No effect where it is over."""
        if self._thread is not None:
            self._ended = True
            self._go.release()
            self._thread.join()

    def _pause(self) -> None:
        """On its thread: the work may stop here."""
        now = self._clock()
        if now + (now - self._before) >= self._until:
            self._stopped.release()
            self._go.acquire()
            if self._ended:
                raise _Ended
        else:
            self._before = now

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._ended:
                self._result = self._work()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._error = error
        self._over = True
        self._stopped.release()
