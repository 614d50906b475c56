"""transfers: snapshots on their way to and from the tiers, off the engine's thread.

    transfer = transfers.put(snapshot, chunks, retention)    # chunks are read in another thread
    transfer = transfers.fetch(snapshot)                     # from the first tier that has it
    transfers.cancel(transfer); transfers.release(transfer)

A transfer ends once, with an outcome, and `completed` is then called with it, one after another, in a thread of the
transfers, which holds no lock. What is stored is written through to all tiers, so that evicting an entry from one costs
no transfer; what is fetched from a lower tier is put into those above it.

Always true:
  * the bytes of the chunks of all transfers are at most `staging`, and those of puts at most half of it: they are
    reserved before any is read, and freed when the transfer has ended and, of a fetch, its chunks were released;
  * at most `waiting` transfers wait for that; more are refused;
  * a tier that is slow or hangs delays no transfer that does not need it: each has threads of its own, and is skipped
    while it is down or all its threads have hung for `patience` seconds.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from kvcellar.retention import DEFAULT, Retention
from kvcellar.snapshot import Snapshot
from kvcellar.tiers.admission import Rate
from kvcellar.tiers.tier import Loaded, Tier, checked

log = logging.getLogger("kvcellar.tiers")

TOGETHER = 64  # uses of entries that are counted in a tier with one call


class Outcome(Enum):
    STORED = "in at least one tier"
    FETCHED = "its chunks are in memory until they are released"
    MISSED = "not in any tier that can be read now"
    REFUSED = "too large, too many are waiting, closed, or no tier has stored it"
    CANCELLED = "by the caller, or when the time for closing was over"
    FAILED = "its chunks could not be read"


class Transfer:
    """One snapshot on its way. The results are valid when `outcome` is set.

    `tiers` are the names of those that it was stored in, or of the one that it came from; `seconds` were spent there.
    """

    def __init__(self, snapshot: Snapshot, need: int, *, stores: bool) -> None:
        self.snapshot, self.need, self.stores = snapshot, need, stores  # `need`: bytes of memory on its way
        self.outcome: Outcome | None = None
        self.loaded: Loaded | None = None
        self.tiers: tuple[str, ...] = ()
        self.seconds = 0.0
        self.ended = threading.Event()
        self.cancelled = self.running = False
        self.promotions = 0  # into the tiers above the one that it came from
        self.holders = 0  # of its bytes: the transfer, then the owner of what was fetched; and each promotion


class _Lane:
    """The jobs of one tier, those that read chunks, or the events; and the threads that do them."""

    def __init__(self, threads: int, count: Callable[[list[bytes]], None]) -> None:
        self.threads, self.count = threads, count
        self.jobs: deque[Job] = deque()
        self.used: list[bytes] = []  # keys of entries that were fetched, to be counted
        self.started: dict[int, float] = {}  # when each thread that has a job began it

    def hangs(self, before: float) -> bool:
        """Whether all threads have been at their jobs since before a time."""
        return len(self.started) == self.threads and max(self.started.values()) < before


Job = Callable[[], None]
Step = tuple[_Lane, Callable[[], "Step | None"]]  # what to do next, and where


class Transfers:
    """The transfers of one engine. All methods may be called from any thread. The tiers stay the caller's."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        staging: int,
        waiting: int = 256,
        threads: int = 2,
        patience: float = 5.0,
        completed: Callable[[Transfer], None] = lambda transfer: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tiers`: the fastest first; `staging` in bytes; `threads` for each tier."""
        self.staging = staging
        self.reads = {tier.name: Rate() for tier in tiers}  # of what was fetched
        self.counts: Counter[Outcome] = Counter()
        self._tiers, self._copies = tiers, 1 + max((tier.copies for tier in tiers), default=0)
        self._most, self._patience, self._completed, self._clock = waiting, patience, completed, clock
        self._changed = threading.Condition(threading.RLock())  # held for all that follows
        self._waiting: dict[bool, deque[tuple[Transfer, Step | None]]] = {False: deque(), True: deque()}  # by `stores`
        self._staged = {False: 0, True: 0}  # bytes, by `stores`
        self._live: set[Transfer] = set()  # that have not ended, or are being promoted
        self._open, self._stopping, self._admitting = True, False, False
        self._reading, self._events = _Lane(1, lambda keys: None), _Lane(1, lambda keys: None)
        self._lanes = [_Lane(threads, tier.used) for tier in tiers]
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name="kvcellar-transfers", daemon=True)
            for lane in (self._reading, self._events, *self._lanes)
            for _ in range(lane.threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- for the engine -----------------------------------------------------------------------------------------

    def put(self, snapshot: Snapshot, chunks: Iterable[bytes], retention: Retention = DEFAULT) -> Transfer:
        """Store a snapshot in all tiers. `chunks` are read once, in a thread of the transfers."""
        transfer = Transfer(snapshot, snapshot.size * self._copies, stores=True)
        return self._submit(transfer, (self._reading, lambda: self._read(transfer, chunks, retention)))

    def fetch(self, snapshot: Snapshot) -> Transfer:
        """Read a snapshot from the first tier that has it. Release what was fetched."""
        transfer = Transfer(snapshot, snapshot.size * self._copies, stores=False)
        return self._submit(transfer, None)

    def cancel(self, transfer: Transfer) -> None:
        """End it: at once where it waits, else when its present job is done. Chunks that were fetched are released."""
        with self._changed:
            transfer.cancelled = True
            waits = transfer.outcome is None and not transfer.running
        if waits:
            self._end(transfer, Outcome.CANCELLED)
        self.release(transfer)

    def release(self, transfer: Transfer) -> None:
        """Free the chunks that were fetched. May be called again."""
        with self._changed:
            if transfer.outcome is Outcome.FETCHED and transfer.loaded is not None:
                transfer.loaded = None
                self._drop(transfer)

    def staged(self) -> int:
        """Bytes of all transfers now."""
        with self._changed:
            return sum(self._staged.values())

    def close(self, seconds: float) -> bool:
        """Accept no more, wait so long for what was accepted, and cancel the rest. Whether all was done."""
        with self._changed:
            self._open = False
            done = self._changed.wait_for(lambda: not self._live, seconds)
            left = list(self._live)
        for transfer in left:
            self.cancel(transfer)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(0.0 if left else seconds)  # those that hang end with the process
        return done

    # -- admission ----------------------------------------------------------------------------------------------

    def _submit(self, transfer: Transfer, first: Step | None) -> Transfer:
        with self._changed:
            most = self.staging // 2 if transfer.stores else self.staging
            accepted = self._open and transfer.need <= most and sum(map(len, self._waiting.values())) < self._most
            if accepted:
                self._live.add(transfer)
                self._waiting[transfer.stores].append((transfer, first))
                self._admit()
        if not accepted:
            self._end(transfer, Outcome.REFUSED)
        return transfer

    def _admit(self) -> None:
        """Begin what waits, in order, as long as its bytes fit: no put before a fetch, and puts leave fetches half."""
        if self._admitting:  # a fetch has ended at once, where no tier is usable: the loop goes on
            return
        self._admitting = True
        while waiting := self._waiting[False] or self._waiting[True]:
            transfer, first = waiting[0]
            of_puts = self._staged[True] + transfer.need if transfer.stores else 0
            if transfer.outcome is None and (self._free() < transfer.need or of_puts > self.staging // 2):
                break
            waiting.popleft()
            if transfer.outcome is None:
                transfer.holders = 1
                self._staged[transfer.stores] += transfer.need
                self._begin(transfer, first if transfer.stores else self._fetch_below(transfer, 0))
        self._admitting = False

    def _free(self) -> int:
        return self.staging - sum(self._staged.values())

    def _drop(self, transfer: Transfer) -> None:
        """One holder less of its bytes."""
        transfer.holders -= 1
        if not transfer.holders:
            self._staged[transfer.stores] -= transfer.need
            self._admit()

    def _end(self, transfer: Transfer, outcome: Outcome, loaded: Loaded | None = None) -> None:
        with self._changed:
            if transfer.outcome is not None:
                return
            if transfer.cancelled:
                outcome, loaded = Outcome.CANCELLED, None
            transfer.outcome, transfer.loaded = outcome, loaded
            self.counts[outcome] += 1
            if transfer.holders and loaded is None:
                self._drop(transfer)
            self._settle(transfer)
            transfer.ended.set()
            self._push(self._events, lambda: self._completed(transfer))

    def _settle(self, transfer: Transfer) -> None:
        if transfer.outcome is not None and not transfer.promotions:
            self._live.discard(transfer)
            self._changed.notify_all()

    # -- steps: each is done in the lane of a tier, and returns the next ------------------------------------------

    def _read(self, transfer: Transfer, chunks: Iterable[bytes], retention: Retention) -> Step | None:
        if self._usable_from(0) is None:  # the device is not read for nothing
            self._end(transfer, Outcome.REFUSED)
            return None
        content = tuple(bytes(chunk) for chunk in checked(transfer.snapshot, chunks))
        return self._store_below(transfer, Loaded(transfer.snapshot, retention, content), 0)

    def _store_below(self, transfer: Transfer, loaded: Loaded, first: int) -> Step | None:
        if (number := self._usable_from(first)) is not None:
            return self._lanes[number], lambda: self._store(transfer, loaded, number)
        self._end(transfer, Outcome.STORED if transfer.tiers else Outcome.REFUSED)
        return None

    def _store(self, transfer: Transfer, loaded: Loaded, number: int) -> Step | None:
        tier, began = self._tiers[number], self._clock()
        if tier.put(loaded.snapshot, loaded.chunks, loaded.retention):
            transfer.tiers += (tier.name,)
        transfer.seconds += self._clock() - began
        return self._store_below(transfer, loaded, number + 1)

    def _fetch_below(self, transfer: Transfer, first: int) -> Step | None:
        if (number := self._usable_from(first)) is not None:
            return self._lanes[number], lambda: self._fetch(transfer, number)
        self._end(transfer, Outcome.MISSED)
        return None

    def _fetch(self, transfer: Transfer, number: int) -> Step | None:
        tier, began = self._tiers[number], self._clock()
        loaded = tier.get(transfer.snapshot.key)
        seconds = self._clock() - began
        transfer.seconds += seconds
        if loaded is None:
            return self._fetch_below(transfer, number + 1)
        transfer.tiers = (tier.name,)
        with self._changed:
            self.reads[tier.name].record(loaded.snapshot.size, seconds)
            self._lanes[number].used.append(loaded.snapshot.key)
            for above in self._usable(range(number)):
                transfer.promotions += 1
                transfer.holders += 1
                self._push(self._lanes[above], lambda above=above: self._promote(transfer, loaded, above))
        self._end(transfer, Outcome.FETCHED, loaded)
        return None

    def _promote(self, transfer: Transfer, loaded: Loaded, number: int) -> None:
        try:
            self._tiers[number].put(loaded.snapshot, loaded.chunks, loaded.retention)
        finally:
            with self._changed:
                transfer.promotions -= 1
                self._drop(transfer)
                self._settle(transfer)

    def _usable_from(self, first: int) -> int | None:
        """The first usable tier from `first` on."""
        return next(iter(self._usable(range(first, len(self._tiers)))), None)

    def _usable(self, numbers: Iterable[int]) -> list[int]:
        """Those of the tiers that are neither down nor hang."""
        with self._changed:
            before = self._clock() - self._patience
            return [n for n in numbers if not self._tiers[n].down and not self._lanes[n].hangs(before)]

    # -- threads ------------------------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer, step: Step | None) -> None:
        if step is not None:
            lane, act = step
            self._push(lane, lambda: self._do(transfer, act))

    def _push(self, lane: _Lane, job: Job) -> None:
        with self._changed:
            lane.jobs.append(job)
            self._changed.notify_all()

    def _do(self, transfer: Transfer, act: Callable[[], Step | None]) -> None:
        """One step of a transfer, unless it has ended. An error of it ends the transfer."""
        with self._changed:
            if transfer.outcome is not None:
                return
            transfer.running = True
        step = None
        try:
            step = act()
        except Exception:
            log.exception("a transfer has failed")
            self._end(transfer, Outcome.FAILED)
        with self._changed:
            transfer.running = False
            if transfer.cancelled:
                self._end(transfer, Outcome.CANCELLED)
            self._begin(transfer, step)

    def _work(self, lane: _Lane) -> None:
        thread = threading.get_ident()
        while (job := self._job(lane, thread)) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of the transfers has failed")
            with self._changed:
                del lane.started[thread]

    def _job(self, lane: _Lane, thread: int) -> Job | None:
        """The next job of a lane, when there is one. None when the transfers are closed."""
        with self._changed:
            self._changed.wait_for(lambda: lane.jobs or lane.used or self._stopping)
            if not lane.jobs and not lane.used:
                return None
            lane.started[thread] = self._clock()
            if lane.jobs and len(lane.used) < TOGETHER:
                return lane.jobs.popleft()
            keys, lane.used = lane.used, []
            return lambda: lane.count(keys)
