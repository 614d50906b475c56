"""compiling: whose turn it is to compile a grammar, and a thread with a stack of a known size to do it on.

The library recurses as deep as a source does, on the stack of its thread. The stacks of other threads are as large as
the system says: 2 MiB in some places, 8 in most.

Always true:
  * at most `AT_ONCE` have a turn, of each owner one;
  * at most `WAITING` wait for theirs, `WAITING // 2` of one owner.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from kvcellar.errors import Overloaded
from kvcellar.worker import LONG, lower

T = TypeVar("T")

STACK = 2**26  # bytes of addresses; memory is taken as it is used
AT_ONCE, WAITING = 2, 64
SECONDS = 20.0  # until one that waits for its turn gives up
_starting = threading.Lock()  # the size of a stack is set for the process


class Turns:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Turn] = []  # in order of arrival
        self._running: list[_Turn] = []

    @contextmanager
    def turn(self, owner: str) -> Iterator[None]:
        """A turn of this owner, within the block. Raises `Overloaded` where none is free for `SECONDS`."""
        turn = _Turn(owner)
        self._enter(turn)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(turn)
                self._changed.notify_all()

    def _enter(self, turn: "_Turn") -> None:
        with self._changed:
            own = sum(other.owner == turn.owner for other in self._waiting)
            if own >= WAITING // 2 or len(self._waiting) >= WAITING:
                raise Overloaded("too many requests wait for their grammars to be compiled; try again later")
            self._waiting.append(turn)
            try:
                if not self._changed.wait_for(lambda: self._next() is turn, SECONDS):
                    raise Overloaded(f"other grammars have been compiled for {SECONDS:.0f} s; try again later")
                self._running.append(turn)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _next(self) -> "_Turn | None":
        """The one whose turn it is, if a place is free."""
        busy = {turn.owner for turn in self._running}
        if len(self._running) >= AT_ONCE:
            return None
        return next((turn for turn in self._waiting if turn.owner not in busy), None)

    def check(self) -> None:
        """Assert what is always true."""
        with self._changed:
            owners = [turn.owner for turn in self._running]
            assert len(owners) == len(set(owners)) <= AT_ONCE
            assert len(self._waiting) <= WAITING


class _Turn:
    def __init__(self, owner: str) -> None:
        self.owner = owner


def on_a_stack(size: int, work: Callable[[], T]) -> T:
    """What `work` returns or raises, called by a thread with so many bytes of stack. One that starts elsewhere at the
    same moment has as large a stack, which does no harm. Raises `Overloaded` where no thread can start."""
    future = Future[T]()

    def act() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `result` below
            future.set_exception(error)

    thread = threading.Thread(target=act, name="kvcellar-compile")
    with _starting:
        before = threading.stack_size(size)
        try:
            thread.start()
        except RuntimeError:
            raise Overloaded("there is no memory for a thread that compiles a grammar; try again later") from None
        finally:
            threading.stack_size(before)
    thread.join(LONG)
    lower(thread)
    return future.result()
