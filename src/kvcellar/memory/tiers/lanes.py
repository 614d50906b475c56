"""lanes: what waits to be done in each tier, and when it counts as one that hangs.

Always true, while the condition that is shared with the transfers is held:
  * `started` has the threads that have a job, and when each began it;
  * what is read, which a request waits for, comes before other jobs, but not always: these are done, too;
  * notes (entries that were used, or are kept longer) of one entry are done at most once each, however many there are.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from kvcellar.memory.retention import Retention, stronger
from kvcellar.memory.tiers.tier import Breaker, Tier

TOGETHER = 64  # notes that are done before jobs
IN_A_ROW = 8  # readings that are done before another job that waits

Job = Callable[[], object]


class Lane:
    """The jobs of one tier, or of the events, which have no tier; `threads` do them. The caller holds `changed` in all
    methods but `work`."""

    def __init__(
        self, threads: int, lock: threading.RLock, clock: Callable[[], float], tier: Tier | None = None
    ) -> None:
        self.tier, self.threads = tier, threads
        self._changed, self._clock = threading.Condition(lock), clock
        self._readings: deque[Job] = deque()
        self._jobs: deque[Job] = deque()  # all others
        self._row = 0  # readings that were begun since another job was
        self._used: list[bytes] = []  # keys of entries that were fetched, to be counted
        self._renewed: dict[bytes, Retention] = {}  # entries that are kept longer
        self._started: dict[int, float] = {}  # when each thread that has a job began it
        self.moved = clock()  # when the last job was begun
        self.breaker = Breaker(clock=clock)  # of reads that took too long
        self._stopping = False

    def push(self, job: Job, *, reads: bool = False) -> None:
        (self._readings if reads else self._jobs).append(job)
        self._changed.notify()

    def stop(self) -> None:
        """No job will follow."""
        self._stopping = True
        self._changed.notify_all()

    def use(self, key: bytes) -> None:
        """An entry was fetched."""
        self._used.append(key)
        self._changed.notify()

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """Entries are kept at least as long as `retention` says."""
        for key in keys:
            before = self._renewed.get(key)
            self._renewed[key] = retention if before is None else stronger(before, retention)
        self._changed.notify()

    def usable(self, patience: float) -> bool:
        """Whether the tier is not down, and not all threads have been at their jobs for longer than `patience`."""
        hangs = len(self._started) == self.threads and max(self._started.values()) < self._clock() - patience
        return not hangs and not self.breaker.down and (self.tier is None or not self.tier.down)

    def work(self) -> Iterable[Job]:
        """The jobs, each when there is one, for a thread that does them. Ends after `stop` when none is left."""
        thread = threading.get_ident()
        while True:
            with self._changed:
                self._started.pop(thread, None)
                self._changed.wait_for(lambda: self._waiting or self._to_note or self._stopping)
                if not (self._waiting or self._notes):
                    return
                notes = self._to_note or not self._waiting
                self._started[thread] = self.moved = self._clock()
                job = self._take_notes() if notes else self._take_job()
            yield job

    @property
    def _waiting(self) -> bool:
        return bool(self._readings or self._jobs)

    def _take_job(self) -> Job:
        other = not self._readings or (self._jobs and self._row >= IN_A_ROW)
        self._row = 0 if other else self._row + 1
        return (self._jobs if other else self._readings).popleft()

    @property
    def _to_note(self) -> bool:
        """Whether it is time to do the notes: while nothing else is done, unless they are many. A transaction of a tier
        delays what is read from it."""
        return self._notes >= TOGETHER or bool(self._notes and not self._waiting and not self._started)

    @property
    def _notes(self) -> int:
        return len(self._used) + len(self._renewed)

    def _take_notes(self) -> Job:
        used, self._used = self._used, []
        renewed, self._renewed = self._renewed, {}
        return partial(self._note, used, renewed)

    def _note(self, used: list[bytes], renewed: dict[bytes, Retention]) -> None:
        """On a thread of the lane."""
        assert self.tier is not None
        if used:
            self.tier.used(used)
        alike: dict[Retention, list[bytes]] = {}
        for key, retention in renewed.items():
            alike.setdefault(retention, []).append(key)
        for retention, keys in alike.items():
            self.tier.renew(keys, retention)
