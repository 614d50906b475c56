"""mask_threads: threads that compute masks, so that one which takes long delays no other row.

The library cannot be stopped: for some grammars one mask, or one token, takes seconds, whatever its limits are. So the
engine's thread asks for masks when it knows their tokens, and waits for them when it has the scores; a row whose mask
is late by then skips the step.

Always true:
  * a lane has one thread at most, which takes what it is asked for in order; a request has one lane;
  * an owner has at most `OF_OWNER` threads, all together at most `MOST`;
  * waiting takes at most `PATIENCE` at once, and no longer than what came between.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from kvcellar.worker import lower

MOST, OF_OWNER = 4, 2
PATIENCE = 0.025  # seconds
IDLE = 0.1  # seconds until a thread without work ends


class Lane:
    """Of the masks of one request. All of it is changed with the lock of its threads held."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.asked: deque[Callable[[], None]] = deque()
        self.thread: threading.Thread | None = None  # while it works for this lane
        self.stuck = False  # what the thread works at was waited for in vain


class Patience:
    """How long the engine may wait: up to `PATIENCE` after as much time without waiting."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._at, self.left = clock, clock(), PATIENCE

    def begin(self) -> float:
        """Seconds that may be waited now."""
        now = self._clock()
        self.left, self._at = min(PATIENCE, self.left + now - self._at), now
        return self.left

    def end(self) -> None:
        """The wait that was begun is over."""
        now = self._clock()
        self.left, self._at = max(0.0, self.left - (now - self._at)), now


def _nothing() -> None:
    """What a lane has to do that was cleared meanwhile."""


class MaskThreads:
    """Of one engine. `changed` is held to read or change what a thread writes, and notified of all that is computed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition()
        self.patience = Patience(clock)
        self._ready: list[Lane] = []  # that have work and no thread, in order
        self._working: list[Lane] = []
        self._threads: list[threading.Thread] = []
        self._lowered: set[threading.Thread] = set()

    def ask(self, lane: Lane, work: Callable[[], None]) -> None:
        """Let a thread do this for a lane. Called with `changed` held."""
        lane.asked.append(work)
        if lane.thread is None and lane not in self._ready:
            self._ready.append(lane)
            self._employ()

    def wait(self, lane: Lane, done: Callable[[], bool]) -> bool:
        """Wait until `done`, for as long as there is patience. Called with `changed` held."""
        if done() or lane.stuck:
            return done()
        seconds = self.patience.begin()
        found = self.changed.wait_for(done, seconds)
        self.patience.end()
        if not found and lane.thread is not None:
            lane.stuck = True
            self._lowered.add(lane.thread)
            lower(lane.thread)  # for good: it ends after this
        return found

    def _employ(self) -> None:
        """Have a thread for each lane that is ready, if there may be so many."""
        if len(self._ready) > len(self._threads) - len(self._working) and len(self._threads) < MOST:
            thread = threading.Thread(target=self._serve, name="kvcellar-masks")
            thread.start()
            self._threads.append(thread)
        self.changed.notify_all()

    def _next(self) -> Lane | None:
        """The lane that may have a thread next."""
        owners = [lane.owner for lane in self._working]
        return next((lane for lane in self._ready if owners.count(lane.owner) < OF_OWNER), None)

    def _serve(self) -> None:
        me = threading.current_thread()
        while (taken := self._taken(me)) is not None:
            lane, work = taken
            work()
            self._ended(lane, me)

    def _taken(self, me: threading.Thread) -> tuple[Lane, Callable[[], None]] | None:
        """What to do next; None: nothing, and the thread ends."""
        with self.changed:
            if me in self._lowered or not self.changed.wait_for(lambda: self._next() is not None, IDLE):
                self._threads.remove(me)
                self._lowered.discard(me)
                self._employ()
                return None
            lane = self._next()
            assert lane is not None
            self._ready.remove(lane)
            self._working.append(lane)
            lane.thread = me
            return lane, lane.asked.popleft() if lane.asked else _nothing

    def _ended(self, lane: Lane, me: threading.Thread) -> None:
        with self.changed:
            self._working.remove(lane)
            lane.thread, lane.stuck = None, False
            if lane.asked:
                self._ready.append(lane)
            self.changed.notify_all()

    def check(self) -> None:
        """Assert what is always true."""
        with self.changed:
            assert len(self._working) <= len(self._threads) <= MOST
            owners = [lane.owner for lane in self._working]
            assert all(owners.count(owner) <= OF_OWNER for owner in owners)
            assert not set(self._ready) & set(self._working)
