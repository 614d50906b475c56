"""compiling: threads that compile grammars, few at once, with a stack of a known size.

The library recurses as deep as a source does, on the stack of its thread, and cannot be stopped. The stacks of other
threads are as large as the system says: 2 MiB in some places, 8 in most.

Always true:
  * at most `AT_ONCE` threads compile within their time, and each owner has one thread, late or not;
  * at most `WAITING` calls wait, `WAITING // 2` of one owner;
  * a thread that is late has given up its place: at most `LATE` of them are left to end.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from kvcellar.errors import BadRequest, Overloaded, panics_of

T = TypeVar("T")

STACK = 2**26  # bytes of addresses; memory is taken as it is used
AT_ONCE, WAITING, LATE = 2, 64, 4
SECONDS = 20.0  # until a call is late; and until one that waits for its turn gives up
LONG = 2.0  # seconds after which a thread gives way to others
_starting = threading.Lock()  # the size of a stack is set for the process


class _Call:
    """A call that waits for its turn, or is run by a thread of its own."""

    def __init__(self, owner: str) -> None:
        self.owner, self.late, self.ended = owner, False, threading.Event()


class Compiling:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Call] = []  # in order of arrival
        self._running: list[_Call] = []  # late ones too

    def run(self, owner: str, param: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises, called by another thread. Raises `Overloaded` where no place is free for
        `SECONDS`, and `BadRequest` where `work` takes longer: it goes on then, and its owner has to wait."""
        call, future = _Call(owner), Future[T]()

        def act() -> None:
            try:
                with panics_of("the compiler of grammars"):
                    found = work()
                future.set_result(found)
            except BaseException as error:  # noqa: BLE001 - raised by `result` below
                future.set_exception(error)
            self._leave(call)

        self._enter(call)
        try:
            thread = _started(act)
        except BaseException:
            self._leave(call)
            raise
        if not call.ended.wait(LONG):
            lower(thread)
            if not call.ended.wait(SECONDS - LONG):
                self._give_up(call, param)
        return future.result()

    def _enter(self, call: _Call) -> None:
        with self._changed:
            own = sum(other.owner == call.owner for other in self._waiting)
            if own >= WAITING // 2 or len(self._waiting) >= WAITING:
                raise Overloaded("too many requests wait for their grammars to be compiled; try again later")
            self._waiting.append(call)
            try:
                if not self._changed.wait_for(lambda: self._next() is call, SECONDS):
                    raise Overloaded(f"other grammars have been compiled for {SECONDS:.0f} s; try again later")
                self._running.append(call)
            finally:
                self._waiting.remove(call)
                self._changed.notify_all()

    def _next(self) -> _Call | None:
        """The call whose turn it is, if a place is free."""
        busy = {call.owner for call in self._running}
        late = sum(call.late for call in self._running)
        if len(self._running) - late >= AT_ONCE or late >= LATE:
            return None
        return next((call for call in self._waiting if call.owner not in busy), None)

    def _leave(self, call: _Call) -> None:
        with self._changed:
            self._running.remove(call)
            self._changed.notify_all()
        call.ended.set()

    def _give_up(self, call: _Call, param: str) -> None:
        """Raise `BadRequest`, unless the call has just ended."""
        with self._changed:
            if call not in self._running:
                return
            call.late = True
            self._changed.notify_all()
        raise BadRequest(f"{param}: it takes more than {SECONDS:.0f} s to compile this; make it simpler", param)

    def check(self) -> None:
        """Assert what is always true."""
        with self._changed:
            owners = [call.owner for call in self._running]
            assert len(owners) == len(set(owners)), "an owner has two threads"
            late = sum(call.late for call in self._running)
            assert len(owners) - late <= AT_ONCE
            assert late <= LATE + AT_ONCE
            assert len(self._waiting) <= WAITING


def _started(run: Callable[[], None]) -> threading.Thread:
    """A thread with a large stack. One that starts elsewhere at the same moment has as large a stack, which does no
    harm."""
    thread = threading.Thread(target=run, name="kvcellar-compile")
    with _starting:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError:
            raise Overloaded("there is no memory for a thread that compiles a grammar; try again later") from None
        finally:
            threading.stack_size(before)
    return thread


def lower(thread: threading.Thread) -> None:
    """Let a thread that works for long have what others leave of the CPUs. Only Linux has priorities of threads."""
    if sys.platform == "linux" and (number := thread.native_id) is not None:
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, number, 5)  # a third of the share of others
