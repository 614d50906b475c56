"""bounded: calls to stores that end in time for their caller, and are not made for a while after one has not.

Always true:
  * at most `most` calls are under way; each has a thread of its own, which ends with the process if it hangs;
  * a caller waits for its `seconds` in all; where all calls under way are those of callers that have given up, the
    store does not answer.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvcellar.memory.tiers.tier import Breaker

T = TypeVar("T")
LONGEST = 8.0  # seconds for which a store is left alone


class RemoteFailed(OSError):
    """A call to a store elsewhere has failed; why, the cause says. `answers`: it has refused this call alone, or others
    may end yet; else it may be left alone for a while."""

    def __init__(self, why: str, *, answers: bool = False) -> None:
        super().__init__(why)
        self.answers = answers


class Bounded:
    """Makes calls."""

    def __init__(self, seconds: float, *, most: int = 4) -> None:
        self._seconds, self._most, self._free = seconds, most, threading.Semaphore(most)
        self._given_up, self._lock = 0, threading.Lock()  # calls that run still

    def __call__(self, act: Callable[[], T]) -> T:
        """Raises `RemoteFailed`, and what the call raises."""
        until = time.monotonic() + self._seconds
        if not self._free.acquire(timeout=self._seconds):
            raise RemoteFailed("too many calls are under way", answers=self._given_up < self._most)
        result: Future[T] = Future()
        threading.Thread(target=self._run, args=(act, result), name="kvcellar-bounded", daemon=True).start()
        try:
            return result.result(max(0.0, until - time.monotonic()))
        except TimeoutError as error:
            with self._lock:
                if not result.cancel():  # it has ended, with this error or in this moment
                    return result.result()
                self._given_up += 1
            raise RemoteFailed(f"no result within {self._seconds:g} s") from error
        finally:
            del result  # else what a call raises refers to itself, by its traceback

    def _run(self, act: Callable[[], T], result: "Future[T]") -> None:
        try:
            found = act()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
            self._end(result, partial(result.set_exception, error))
        else:
            self._end(result, partial(result.set_result, found))
        del result

    def _end(self, result: "Future[Any]", told: Callable[[], None]) -> None:
        with self._lock:
            self._free.release()
            if result.set_running_or_notify_cancel():
                told()
            else:
                self._given_up -= 1


class Guard:
    """Makes calls, but for a time after one has found that the store does not answer."""

    def __init__(self, seconds: float) -> None:
        self._bounded, self._breaker = Bounded(seconds), Breaker(longest=LONGEST)

    @property
    def down(self) -> bool:
        return self._breaker.down

    def __call__(self, act: Callable[[], T]) -> T:
        """Raises what `Bounded` raises."""
        if self.down:
            raise RemoteFailed("the store elsewhere has failed, and is left alone for a while", answers=True)
        try:
            found = self._bounded(act)
        except RemoteFailed as error:
            if not error.answers:
                self._breaker.failed()
            raise
        self._breaker.succeeded()
        return found
