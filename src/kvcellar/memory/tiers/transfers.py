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
  * the bytes of the chunks of all transfers, and of the buffers that are kept for reading, are at most `staging`, and
    those of puts at most half of it: they are reserved before any is read, and freed when the transfer has ended and,
    of a fetch, its chunks were released; buffers are freed where bytes are to be reserved;
  * a buffer is used again when no transfer has chunks in it;
  * of a transfer that was cancelled no other chunk is read, and nothing is put into other tiers;
  * a tier that is slow or hangs delays no transfer that does not need it: each has threads of its own, is not looked
    into for what others are known to have, and is skipped while it is down, or was too slow for a reader, or all its
    threads have hung for `patience` seconds.

The memory that chunks are read into (`Buffers`) is used again and again: the pages of a new allocation cost nearly
half as much time as verifying what is read into them.

Always true of it:
  * an idle buffer belongs to no transfer;
  * a space hands out one part of its buffer after the other, none of them twice.

The caller counts the bytes, and holds a lock around `Buffers`.
"""

import logging
import mmap
import sys
import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial

from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.admission import Rate
from kvcellar.memory.tiers.codec import Replaced
from kvcellar.memory.tiers.lanes import Lane
from kvcellar.memory.tiers.tier import Catalogue, Loaded, Tier

log = logging.getLogger("kvcellar.memory.tiers")

KEPT = 2  # the part of the staging memory that idle buffers may have


class Outcome(Enum):
    STORED = "in at least one tier"
    FETCHED = "its chunks are in memory until they are released"
    MISSED = "not in any tier that can be read now"
    REFUSED = "no tier has stored it"
    CANCELLED = "by the caller, or when the time for closing was over"
    FAILED = "an error that no tier should raise"


class Transfer:
    """One snapshot on its way to or from the tiers. The results are valid when `outcome` is set.

    `tiers` are the names of those that it was stored in, or of the one that it came from.
    """

    def __init__(self, snapshot: Snapshot, need: int, *, stores: bool) -> None:
        self.snapshot, self.need, self.stores = snapshot, need, stores  # `need`: bytes of memory on its way
        self.outcome: Outcome | None = None
        self.loaded: Loaded | None = None
        self.tiers: tuple[str, ...] = ()
        self.ended = threading.Event()
        self.cancelled = self.running = self.overdue = False
        self.lane: Lane | None = None  # where its present job runs, or waits for a thread
        self.since = 0.0  # when that began
        self.promotions = 0  # into the tiers above the one that it came from
        self.buffer: mmap.mmap | None = None  # what was fetched, with `extra` bytes more than `need`
        self.extra = 0
        self.holders = 1  # of its bytes: the transfer, then the owner of what was fetched; and each promotion


def allocated(size: int) -> mmap.mmap:
    """A buffer, with its pages where the system can make them at once."""
    if sys.platform == "linux":
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return mmap.mmap(-1, size)


class Buffers:
    """Those that are idle, the smallest first."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self.bytes = 0

    def take(self, size: int) -> mmap.mmap | None:
        """The smallest one with at least `size` bytes; None if there is none."""
        for number, buffer in enumerate(self._idle):
            if len(buffer) >= size:
                self.bytes -= len(buffer)
                return self._idle.pop(number)
        return None

    def give(self, buffer: mmap.mmap) -> None:
        """It is idle from now on."""
        insort(self._idle, buffer, key=len)
        self.bytes += len(buffer)

    def trim(self, most: int) -> None:
        """Free idle buffers, the smallest first, until they have at most so many bytes."""
        while self._idle and self.bytes > most:
            self.bytes -= len(self._idle.pop(0))

    def check(self) -> None:
        """Assert what is always true."""
        assert self.bytes == sum(map(len, self._idle))
        assert len({id(one) for one in self._idle}) == len(self._idle)


class Space:
    """The memory of one reading: parts of the buffer that `buffer` returns when the first one is taken."""

    def __init__(self, buffer: Callable[[], mmap.mmap]) -> None:
        self._buffer, self._memory, self._at = buffer, memoryview(b""), 0

    def __call__(self, size: int) -> memoryview:
        """The next bytes. Raises `Replaced` where the buffer has no more: the entry is larger than was known."""
        if not self._at:
            self._memory = memoryview(self._buffer())
        part = self._memory[self._at : self._at + size]
        if len(part) < size:
            raise Replaced(f"it has more than the {len(self._memory)} bytes that memory was reserved for")
        self._at += size
        return part


class _Cancelled(Exception):
    """The transfer was cancelled while its chunks were read."""


Step = tuple[Lane, Callable[[], "Step | None"]]  # what to do next, and where


class Transfers:
    """The transfers of one engine. All methods may be called from any thread. The tiers stay the caller's."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        staging: int,
        catalogue: Catalogue,
        threads: int = 2,
        patience: float = 5.0,
        completed: Callable[[Transfer], None] = lambda transfer: None,
        freed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tiers`: the fastest first; `staging` in bytes; `threads` for each tier; all report to `catalogue`;
        `freed` is called, like `completed`, when a promotion has freed memory."""
        self.tiers, self.staging = tuple(tiers), staging
        self.reads = {tier.name: Rate() for tier in tiers}  # of what was fetched
        self.traffic: Counter[tuple[str, str]] = Counter()  # bytes, by the name of a tier and "read" or "written"
        self._catalogue = catalogue
        for tier in tiers:
            tier.catalogue = catalogue
        self._copies = 1 + max((tier.copies for tier in tiers), default=0)
        self._patience, self._completed, self._freed, self._clock = patience, completed, freed, clock
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # held for all that follows
        self._staged = {False: 0, True: 0}  # bytes, by `stores`
        self._buffers = Buffers()
        self._live: set[Transfer] = set()  # that have not ended, or are being promoted
        self._open = True
        self._events = Lane(1, lock, clock)
        self._lanes = [Lane(threads, lock, clock, tier) for tier in tiers]
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name="kvcellar-transfers", daemon=True)
            for lane in (self._events, *self._lanes)
            for _ in range(lane.threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            raise

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
        have = self._catalogue.of(key)
        names = (self.tiers[number].name for number in self._usable(range(len(self.tiers))))
        return next((name for name in names if name in have), None)

    def has(self, key: bytes) -> bool:
        """Whether any tier has an entry, as far as is known, usable now or not."""
        return bool(self._catalogue.of(key))

    def room(self) -> int:
        """Bytes of memory that are free now for what is going to be stored; 0 if no tier can be used."""
        if not self._usable(range(len(self.tiers))):
            return 0
        with self._changed:
            staged = sum(self._staged.values())
            return min(self.staging - staged, self.staging // 2 - self._staged[True])

    def prepare(self, size: int) -> None:
        """Allocate buffers for reading snapshots of so many bytes: one for each thread, and as many that were read."""
        with self._changed:
            for _ in range(2 * self._lanes[-1].threads if size else 0):
                if self._buffers.bytes + size <= self.staging // KEPT:
                    self._buffers.give(allocated(size))

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
        """End it: at once where it waits, else when its present chunk is read, or what it stores is stored. Chunks that
        were fetched are released."""
        with self._changed:
            transfer.cancelled = True
            if transfer.outcome is None and not transfer.running:
                self._end(transfer, Outcome.CANCELLED)
        self.release(transfer)

    def waited(self, transfer: Transfer) -> float:
        """Seconds for which a transfer has been at its job, or, where it waits for a thread, for which its tier has not
        begun any; 0 if it has ended."""
        with self._changed:
            if transfer.outcome is not None or transfer.lane is None:
                return 0.0
            since = transfer.since if transfer.running else max(transfer.since, transfer.lane.moved)
            return self._clock() - since

    def overdue(self, transfer: Transfer) -> str | None:
        """A transfer has taken too long: its tier is not used for a while. Returns the name of the tier; None if the
        transfer has just ended. It goes on, and is to be cancelled."""
        with self._changed:
            if transfer.outcome is not None:
                return None
            assert transfer.lane is not None and transfer.lane.tier is not None, "it has not begun"
            tier = transfer.lane.tier
            if not transfer.overdue:
                transfer.overdue = True
                transfer.lane.breaker.failed()
                tier.failures["too slow"] += 1
                log.warning("reading from the %s tier takes too long: it is not used for a while", tier.name)
            return tier.name

    def run(self, number: int, job: Callable[[], object]) -> None:
        """Do what a request waits for in the lane of a tier."""
        with self._changed:
            self._lanes[number].push(job, reads=True)

    def down(self, number: int) -> bool:
        """Whether a tier cannot be used now."""
        return not self._usable([number])

    def release(self, transfer: Transfer) -> None:
        """Free the chunks that were fetched. May be called again."""
        with self._changed:
            if transfer.outcome is Outcome.FETCHED and transfer.loaded is not None:
                transfer.loaded = None
                self._drop(transfer)

    def renew(self, keys: Iterable[bytes], retention: Retention) -> None:
        """Keep entries at least as long as `retention` says."""
        keys = list(keys)
        with self._changed:
            for number in self._usable(range(len(self.tiers))) if self._open else ():
                self._lanes[number].renew(keys, retention)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete entries from all tiers."""
        keys = list(keys)
        with self._changed:
            for number in self._usable(range(len(self.tiers))) if self._open else ():
                self._lanes[number].push(partial(self.tiers[number].remove, keys))

    def staged(self) -> int:
        """Bytes of all transfers now."""
        with self._changed:
            return sum(self._staged.values())

    def close(self, seconds: float = 0.0) -> bool:
        """Accept no more, wait so long for what was accepted, and cancel the rest. Whether all was done."""
        with self._changed:
            self._open = False
            done = self._changed.wait_for(lambda: not self._live, seconds)
            left = list(self._live)
        for transfer in left:
            self.cancel(transfer)
        with self._changed:
            for lane in (self._events, *self._lanes):
                lane.stop()
            self._buffers.trim(0)
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
            self._trim()
            return transfer

    def _buffer(self, transfer: Transfer) -> mmap.mmap:
        """Memory for what is read of a transfer: an idle buffer, else a new one."""
        with self._changed:
            if transfer.buffer is None and (found := self._buffers.take(transfer.snapshot.size)) is not None:
                transfer.buffer, transfer.extra = found, max(0, len(found) - transfer.need)
                self._staged[transfer.stores] += transfer.extra
        if transfer.buffer is None:
            transfer.buffer = allocated(transfer.snapshot.size)
        return transfer.buffer

    def _trim(self) -> None:
        """Free idle buffers as far as their bytes are reserved, or too many to be kept."""
        self._buffers.trim(min(self.staging // KEPT, self.staging - sum(self._staged.values())) if self._open else 0)

    def _drop(self, transfer: Transfer) -> None:
        """One holder less of its bytes."""
        transfer.holders -= 1
        if not transfer.holders:
            self._staged[transfer.stores] -= transfer.need + transfer.extra
            if transfer.buffer is not None:
                self._buffers.give(transfer.buffer)
                transfer.buffer = None
                self._trim()

    def _end(self, transfer: Transfer, outcome: Outcome, loaded: Loaded | None = None) -> None:
        with self._changed:
            if transfer.outcome is not None:
                return
            if transfer.cancelled:
                outcome, loaded = Outcome.CANCELLED, None
            transfer.outcome, transfer.loaded = outcome, loaded
            if loaded is None:
                self._drop(transfer)
            self._settle(transfer)
            transfer.ended.set()
            self._events.push(lambda: self._completed(transfer))

    def _settle(self, transfer: Transfer) -> None:
        if transfer.outcome is not None and not transfer.promotions:
            self._live.discard(transfer)
            self._changed.notify_all()

    def check(self) -> None:
        """Assert what is always true."""
        with self._changed:
            self._buffers.check()
            assert sum(self._staged.values()) + self._buffers.bytes <= self.staging
            assert self._staged[True] <= self.staging // 2

    # -- steps: each is done in the lane of a tier, and returns the next ------------------------------------------

    def _store_below(self, transfer: Transfer, loaded: Loaded, first: int) -> Step | None:
        if usable := self._usable(range(first, len(self.tiers))):
            return self._lanes[usable[0]], lambda: self._store(transfer, loaded, usable[0])
        self._end(transfer, Outcome.STORED if transfer.tiers else Outcome.REFUSED)
        return None

    def _store(self, transfer: Transfer, loaded: Loaded, number: int) -> Step | None:
        if self._put(number, loaded):
            transfer.tiers += (self.tiers[number].name,)
        return self._store_below(transfer, loaded, number + 1)

    def _put(self, number: int, loaded: Loaded) -> bool:
        tier = self.tiers[number]
        stored = tier.put(loaded.snapshot, loaded.chunks, loaded.retention)
        if stored:
            with self._changed:
                self.traffic[tier.name, "written"] += loaded.snapshot.size
        return stored

    def _fetch_below(self, transfer: Transfer, first: int) -> Step | None:
        usable, have = self._usable(range(first, len(self.tiers))), self._catalogue.of(transfer.snapshot.key)
        known = [number for number in usable if self.tiers[number].name in have]
        if (number := next(iter(known or usable), None)) is not None:  # where no tier is known to have it, each may
            return self._lanes[number], lambda: self._fetch(transfer, number)
        self._end(transfer, Outcome.MISSED)
        return None

    def _fetch(self, transfer: Transfer, number: int) -> Step | None:
        tier, began = self.tiers[number], self._clock()
        space = Space(lambda: self._buffer(transfer))

        def take(size: int) -> memoryview:
            if transfer.cancelled:
                raise _Cancelled
            return space(size)

        loaded = tier.get(transfer.snapshot.key, take)
        seconds = self._clock() - began
        if not transfer.overdue:
            self._lanes[number].breaker.succeeded()
        if loaded is None:
            if not tier.contains(transfer.snapshot.key):
                self._catalogue.removed(tier.name, transfer.snapshot.key, "gone")
            return self._fetch_below(transfer, number + 1)
        transfer.tiers = (tier.name,)
        with self._changed:
            self.reads[tier.name].record(loaded.snapshot.size, seconds)
            self.traffic[tier.name, "read"] += loaded.snapshot.size
            self._lanes[number].use(loaded.snapshot.key)
            for above in self._usable(range(number)) if not transfer.cancelled else ():
                transfer.promotions += 1
                transfer.holders += 1
                self._lanes[above].push(partial(self._promote, transfer, loaded, above))
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
                    self._events.push(self._freed)

    def _usable(self, numbers: Iterable[int]) -> list[int]:
        """Those of the tiers that are neither down nor hang."""
        with self._changed:
            return [number for number in numbers if self._lanes[number].usable(self._patience)]

    # -- threads ------------------------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer, step: Step | None) -> None:
        if step is not None:
            transfer.lane, act = step
            transfer.since = self._clock()
            transfer.lane.push(lambda: self._do(transfer, act), reads=not transfer.stores)

    def _do(self, transfer: Transfer, act: Callable[[], Step | None]) -> None:
        """One step of a transfer, unless it has ended. An error of it ends the transfer."""
        with self._changed:
            if transfer.outcome is not None:
                return
            transfer.running, transfer.since = True, self._clock()
        step = None
        try:
            step = act()
        except _Cancelled:
            pass  # it ends below
        except Exception:
            log.exception("a transfer has failed")
            self._end(transfer, Outcome.FAILED)
        with self._changed:
            transfer.running = False
            if transfer.cancelled:
                self._end(transfer, Outcome.CANCELLED)
            self._begin(transfer, step)

    def _work(self, lane: Lane) -> None:
        for job in lane.work():
            try:
                job()
            except Exception:
                log.exception("a job of the transfers has failed")
