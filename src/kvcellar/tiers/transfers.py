"""transfers: snapshots on their way to and from the tiers, off the engine's thread.

    if (transfer := transfers.reserve(snapshot)) is not None:       # bytes of memory for its chunks
        transfers.put(transfer, chunks, retention)                  # into all tiers
    if (transfer := transfers.fetch(snapshot)) is not None:         # from the first tier that has it
        ...; transfers.release(transfer)
    transfers.cancel(transfer)

No call waits. A transfer ends once, with an outcome, and `completed` is then called with it, one after another, in a
thread of the transfers, which holds no lock. What is stored is written through to all tiers, so that evicting an entry
from one costs no transfer; what is fetched from a lower tier is put into those above it.

Always true:
  * the bytes of the chunks of all transfers are at most `staging`, and those of puts at most half of it: they are
    reserved before any is read, and freed when the transfer has ended and, of a fetch, its chunks were released;
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
from kvcellar.tiers.locations import Locations
from kvcellar.tiers.tier import Loaded, Tier

log = logging.getLogger("kvcellar.tiers")

TOGETHER = 64  # uses of entries that are counted in a tier with one call


class Outcome(Enum):
    STORED = "in at least one tier"
    FETCHED = "its chunks are in memory until they are released"
    MISSED = "not in any tier that can be read now"
    REFUSED = "no tier has stored it"
    CANCELLED = "by the caller, or when the time for closing was over"
    FAILED = "an error that no tier should raise"


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
        self.holders = 1  # of its bytes: the transfer, then the owner of what was fetched; and each promotion


class _Lane:
    """The jobs of one tier, or the events; and the threads that do them."""

    def __init__(self, threads: int, count: Callable[[list[bytes]], None]) -> None:
        self.threads, self.count = threads, count
        self.jobs: deque[Job] = deque()
        self.used: list[bytes] = []  # keys of entries that were fetched, to be counted
        self.started: dict[int, float] = {}  # when each thread that has a job began it

    def hangs(self, before: float) -> bool:
        """Whether all threads have been at their jobs since before a time."""
        return len(self.started) == self.threads and max(self.started.values()) < before


Job = Callable[[], object]
Step = tuple[_Lane, Callable[[], "Step | None"]]  # what to do next, and where


class Transfers:
    """The transfers of one engine. All methods may be called from any thread. The tiers stay the caller's."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        staging: int,
        threads: int = 2,
        patience: float = 5.0,
        locations: Locations | None = None,
        completed: Callable[[Transfer], None] = lambda transfer: None,
        freed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tiers`: the fastest first; `staging` in bytes; `threads` for each tier; `locations` is kept up to date;
        `freed` is called, like `completed`, when a promotion has freed memory."""
        self.tiers, self.staging = tuple(tiers), staging
        self.reads = {tier.name: Rate() for tier in tiers}  # of what was fetched
        self.counts: Counter[Outcome] = Counter()
        self._locations = locations if locations is not None else Locations()
        self._copies = 1 + max((tier.copies for tier in tiers), default=0)
        self._patience, self._completed, self._freed, self._clock = patience, completed, freed, clock
        self._changed = threading.Condition(threading.RLock())  # held for all that follows
        self._staged = {False: 0, True: 0}  # bytes, by `stores`
        self._live: set[Transfer] = set()  # that have not ended, or are being promoted
        self._open, self._stopping = True, False
        self._events = _Lane(1, lambda keys: None)
        self._lanes = [_Lane(threads, tier.used) for tier in tiers]
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name="kvcellar-transfers", daemon=True)
            for lane in (self._events, *self._lanes)
            for _ in range(lane.threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- for the engine -----------------------------------------------------------------------------------------

    def need(self, snapshot: Snapshot) -> int:
        """Bytes of memory that a snapshot takes on its way."""
        return snapshot.size * self._copies

    @property
    def largest(self) -> int:
        """Bytes of the largest snapshot that can be moved."""
        return self.staging // 4 // self._copies

    def source(self, key: bytes) -> str | None:
        """The name of the first usable tier that has an entry, as far as is known."""
        have = self._locations.of(key)
        names = (self.tiers[number].name for number in self._usable(range(len(self.tiers))))
        return next((name for name in names if name in have), None)

    def has(self, key: bytes) -> bool:
        """Whether any tier has an entry, as far as is known, usable now or not."""
        return bool(self._locations.of(key))

    @property
    def usable(self) -> bool:
        """Whether any tier can be used now."""
        return bool(self._usable(range(len(self.tiers))))

    def room(self) -> int:
        """Bytes of memory that are free now for what is going to be stored; 0 if no tier can be used."""
        if not self.usable:
            return 0
        with self._changed:
            staged = sum(self._staged.values())
            return min(self.staging - staged, self.staging // 2 - self._staged[True])

    def reserve(self, snapshot: Snapshot) -> Transfer | None:
        """Reserve memory for the chunks of a snapshot that is going to be stored. None if too little is free."""
        return self._reserved(Transfer(snapshot, self.need(snapshot), stores=True))

    def put(self, transfer: Transfer, chunks: Sequence[bytes], retention: Retention = DEFAULT) -> None:
        """Store the snapshot of a transfer that was reserved in all tiers."""
        loaded = Loaded(transfer.snapshot, retention, tuple(chunks))
        with self._changed:
            self._live.add(transfer)
            self._begin(transfer, self._store_below(transfer, loaded, 0))

    def fetch(self, snapshot: Snapshot) -> Transfer | None:
        """Read a snapshot from the first tier that has it; release what was fetched. None if too little memory is free
        for it now."""
        with self._changed:
            transfer = self._reserved(Transfer(snapshot, self.need(snapshot), stores=False))
            if transfer is not None:
                self._live.add(transfer)
                self._begin(transfer, self._fetch_below(transfer, 0))
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """End it: at once where it waits, else when its present job is done. Chunks that were fetched are released."""
        with self._changed:
            transfer.cancelled = True
            if transfer.outcome is None and not transfer.running:
                self._end(transfer, Outcome.CANCELLED)
        self.release(transfer)

    def release(self, transfer: Transfer) -> None:
        """Free the chunks that were fetched. May be called again."""
        with self._changed:
            if transfer.outcome is Outcome.FETCHED and transfer.loaded is not None:
                transfer.loaded = None
                self._drop(transfer)

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """Keep entries at least as long as `retention` says."""
        keys = list(keys)
        self._everywhere(lambda tier: tier.renew(keys, retention))

    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete entries from all tiers."""
        keys = list(keys)
        self._everywhere(lambda tier: tier.remove(keys))

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
        until = time.monotonic() + (0.0 if left else seconds)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))  # those that hang end with the process
        return done

    # -- memory -------------------------------------------------------------------------------------------------

    def _reserved(self, transfer: Transfer) -> Transfer | None:
        with self._changed:
            room = self.room() if transfer.stores else self.staging - sum(self._staged.values())
            if not self._open or transfer.need > room:
                return None
            self._staged[transfer.stores] += transfer.need
            return transfer

    def _drop(self, transfer: Transfer) -> None:
        """One holder less of its bytes."""
        transfer.holders -= 1
        if not transfer.holders:
            self._staged[transfer.stores] -= transfer.need

    def _end(self, transfer: Transfer, outcome: Outcome, loaded: Loaded | None = None) -> None:
        with self._changed:
            if transfer.outcome is not None:
                return
            if transfer.cancelled:
                outcome, loaded = Outcome.CANCELLED, None
            transfer.outcome, transfer.loaded = outcome, loaded
            self.counts[outcome] += 1
            if loaded is None:
                self._drop(transfer)
            self._settle(transfer)
            transfer.ended.set()
            self._push(self._events, lambda: self._completed(transfer))

    def _settle(self, transfer: Transfer) -> None:
        if transfer.outcome is not None and not transfer.promotions:
            self._live.discard(transfer)
            self._changed.notify_all()

    # -- steps: each is done in the lane of a tier, and returns the next ------------------------------------------

    def _store_below(self, transfer: Transfer, loaded: Loaded, first: int) -> Step | None:
        if (number := self._usable_from(first)) is not None:
            return self._lanes[number], lambda: self._store(transfer, loaded, number)
        self._end(transfer, Outcome.STORED if transfer.tiers else Outcome.REFUSED)
        return None

    def _store(self, transfer: Transfer, loaded: Loaded, number: int) -> Step | None:
        began = self._clock()
        if self._put(number, loaded):
            transfer.tiers += (self.tiers[number].name,)
        transfer.seconds += self._clock() - began
        return self._store_below(transfer, loaded, number + 1)

    def _put(self, number: int, loaded: Loaded) -> bool:
        tier = self.tiers[number]
        stored = tier.put(loaded.snapshot, loaded.chunks, loaded.retention)
        if stored:
            self._locations.stored(tier.name, [loaded.snapshot])
        return stored

    def _fetch_below(self, transfer: Transfer, first: int) -> Step | None:
        if (number := self._usable_from(first)) is not None:
            return self._lanes[number], lambda: self._fetch(transfer, number)
        self._end(transfer, Outcome.MISSED)
        return None

    def _fetch(self, transfer: Transfer, number: int) -> Step | None:
        tier, began = self.tiers[number], self._clock()
        loaded = tier.get(transfer.snapshot.key)
        seconds = self._clock() - began
        transfer.seconds += seconds
        if loaded is None:
            if not tier.contains(transfer.snapshot.key):
                self._locations.removed(tier.name, transfer.snapshot.key, "gone")
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
            self._put(number, loaded)
        finally:
            with self._changed:
                transfer.promotions -= 1
                self._drop(transfer)
                self._settle(transfer)
                if not transfer.holders:  # a fetch may wait for these bytes
                    self._push(self._events, self._freed)

    def _everywhere(self, act: Callable[[Tier], object]) -> None:
        """Do something in the lanes of all tiers that can be used."""
        with self._changed:
            for number in self._usable(range(len(self.tiers))) if self._open else ():
                self._push(self._lanes[number], lambda number=number: act(self.tiers[number]))

    def _usable_from(self, first: int) -> int | None:
        """The first usable tier from `first` on."""
        return next(iter(self._usable(range(first, len(self.tiers)))), None)

    def _usable(self, numbers: Iterable[int]) -> list[int]:
        """Those of the tiers that are neither down nor hang."""
        with self._changed:
            before = self._clock() - self._patience
            return [n for n in numbers if not self.tiers[n].down and not self._lanes[n].hangs(before)]

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
