"""store: what a memory has in the tiers below it: host memory, a disk, a store elsewhere.

    store.keep(namespace, key)          # a completion has ended: write what of it is not stored yet
    store.pump(budget)                  # between steps: read some bytes out of memory for the writing threads
    store.restores                      # a request waits: see `restores`
    store.features                      # of images: see `stored_features`

Everything but what the tiers do runs on the engine's thread. A snapshot is of one node of the tree, or a part of it,
and continues the snapshot of the tokens before it. It is written to all tiers, so that what memory evicts is still
there.

Always true:
  * a snapshot is written after the one that it continues;
  * at most `MOST_BEHIND` tokens wait to be read out of memory or are being written, or those of one sequence; and none
    wait for longer than `LATE` seconds after the next step, while there is staging memory: only a tier that is too slow
    makes them wait;
  * memory for what is written is reserved before it is read out (see `transfers`).
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from kvcellar.errors import EngineClosed
from kvcellar.memory.kv.readout import Reading
from kvcellar.memory.kv.record import to_bytes
from kvcellar.memory.memory import Memory
from kvcellar.memory.prefix.node import TOKEN, Node
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.prefix.why import Sightings
from kvcellar.memory.prefixes import Prefixes
from kvcellar.memory.restore_plan import LEAST, News
from kvcellar.memory.restores import Evict, Restores
from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import IMAGE, SEGMENT, Snapshot, key_after
from kvcellar.memory.spans import Span
from kvcellar.memory.stored_features import StoredFeatures
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.tier import Tier
from kvcellar.memory.tiers.transfers import Outcome, Transfer, Transfers

log = logging.getLogger("kvcellar.engine")

BUSY = 4 << 20  # bytes that are read out of memory between two steps of running requests,
SLICE = 0.01  # in so many seconds at most,
LATE = 2.0  # but for what has waited longer
MOST_OTHERS = 1024  # snapshots of other identities that are looked at to say that they cannot be used
MOST_BEHIND = 1 << 18  # tokens that are not stored yet: those that a kill loses
STAGING_PAUSE = 0.005  # seconds between two looks for free staging memory, at the end
WAIT = 2.0  # seconds for unwritten snapshots at the end


# Opens the store of a memory with this tree, which the last one frees cells of; None: it has none.
OpenStore = Callable[[Memory, Prefixes, Evict], "Store | None"]


@dataclass(eq=False, slots=True)
class _Writing:
    """A sequence of which snapshots are being made. `at` tokens of it are done, up to the snapshot `parent`. It waits
    since `since`."""

    namespace: str
    key: bytes
    retention: Retention
    at: int
    parent: bytes | None
    since: float

    @property
    def unread(self) -> int:
        """Tokens that wait."""
        return len(self.key) // TOKEN - self.at


@dataclass(eq=False, slots=True)
class _Open:
    """The snapshot that is being read out of memory."""

    writing: _Writing
    transfer: Transfer
    reading: Reading
    chunks: Iterator[Tensor]
    done: list[bytes] = field(default_factory=list[bytes])


class Store:
    """The snapshots of one memory in its tiers, the fastest first. `post` runs a call on the engine's thread, between
    two steps."""

    def __init__(
        self,
        tiers: list[Tier],
        memory: Memory,
        prefixes: Prefixes,
        *,
        identity: bytes,
        secret: bytes,
        staging: int,
        catalogue: Catalogue,
        post: Callable[[Callable[[], None]], None],
        evict: Evict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`identity` is that of the snapshots that this memory can read; `secret`: keys cannot be computed from tokens
        without it; `catalogue`: the tiers report there what they have."""
        self._memory, self._prefixes, self.catalogue = memory, prefixes, catalogue
        self.identity, self._secret, self._post, self._clock = identity, secret, post, clock
        self._wanted: deque[_Writing] = deque()
        self._open: _Open | None = None
        self._segment = SEGMENT
        self._least = 1  # bytes of staging memory without which the next snapshot is not begun
        self._on_way: dict[bytes, int] = {}  # tokens of the snapshots that are being written
        self._closed = False
        self._until: float | None = None  # when nothing more is written, at the end
        self._others = Sightings()  # of other identities
        self.written = 0  # tokens
        self.failures: Counter[str] = Counter()  # snapshots that were not written, by kind
        with ExitStack() as opened:
            made = partial(
                Transfers,
                tiers,
                staging=staging,
                catalogue=catalogue,
                completed=self._completed,
                freed=lambda: self._posted(self.restores.freed),
                clock=clock,
            )
            self.transfers = opened.enter_context(closing(made()))
            news = News(self.transfers, self.catalogue, post=self._posted, clock=clock)
            self.restores = Restores(
                self.transfers,
                self.catalogue,
                memory,
                prefixes,
                evict=evict,
                wake=lambda: self._posted(self.restores.go_on),
                missed=self._note_lost,
                news=news,
                clock=clock,
            )
            self.features = StoredFeatures(
                self.transfers,
                self.catalogue,
                news,
                identity=identity,
                secret=secret,
                renew=self._renew,
                not_written=self._not_written,
                clock=clock,
            )
            opened.pop_all()

    def load(self) -> None:
        """Learn which snapshots there are on disk. What is elsewhere is looked up when a request needs it."""
        if (disk := self.disk) is not None:
            disk.entries()
            for identity, snapshot in disk.others(MOST_OTHERS):
                self._others.note(snapshot.namespace, identity.hex(), snapshot.tokens)
        self._note_lost()
        self._prefixes.know_others(self._others, self.identity.hex())
        self.transfers.prepare(max((snapshot.size for snapshot in self.of_texts()), default=0))

    def of_texts(self) -> Iterator[Snapshot]:
        """All snapshots but features of images."""
        return (snapshot for snapshot in self.catalogue if not snapshot.namespace.startswith(IMAGE))

    def _note_lost(self) -> None:
        """Requests are told what was damaged since the last call, and what cannot be used is removed."""
        if unusable := self.catalogue.unusable():
            self.transfers.remove(unusable)
        for lost in [one for one in self.catalogue.lost() if not one.namespace.startswith(IMAGE)]:
            why = f"the {lost.tier} tier had other bytes than were written"
            self._prefixes.losses.damaged(lost.namespace, lost.key, lost.start, why)

    # -- writing ------------------------------------------------------------------------------------------------

    def keep(self, namespace: str, key: bytes, retention: Retention = DEFAULT) -> None:
        """Write the snapshots of these tokens, as far as the tree has them when their turn comes. Not if too many wait.
        What is stored of them already is kept at least as long as `retention` says."""
        chain = self.catalogue.whole(namespace, key)
        self._renew([one.key for one in chain], retention)
        at, parent = (chain[-1].span.end, chain[-1].key) if chain else (0, None)
        wanted = _Writing(namespace, key, retention, at, parent, self._clock())
        if wanted.unread < LEAST or self._closed:
            return
        if (behind := self.behind) and behind + wanted.unread > MOST_BEHIND:
            self._not_written("the tiers are too slow")
            return
        self._wanted.append(wanted)

    def _renew(self, keys: Sequence[bytes], retention: Retention) -> None:
        """Keep what is stored at least as long as `retention` says."""
        stated = replace(retention, owner="") != DEFAULT
        if keys := [one for one in keys if stated or self.catalogue.expires(one)]:
            self.transfers.renew(keys, retention)
        if retention.expires is None:
            self.catalogue.lasts(keys)

    @property
    def behind(self) -> int:
        """Tokens that wait to be read out of memory or are being written. Costs the number of sequences and snapshots
        that they are of."""
        return self.unread + sum(self._on_way.values())

    @property
    def unread(self) -> int:
        """Tokens that wait to be read out of memory."""
        return sum(one.unread for one in self._wanted)

    def pump(self, budget: int = BUSY, seconds: float = SLICE) -> bool:
        """Read up to about `budget` bytes out of memory, in so many seconds, and all that has waited for `LATE` seconds
        anyway. False if there is nothing to read, or nowhere to put it."""
        if self._open is None and self.transfers.room() < self._least:
            return False
        began = self._clock()
        while (budget > 0 and self._clock() - began < seconds) or self._late(began):
            if self._open is None and not self._begin_next():
                return False
            assert self._open is not None
            chunk = next(self._open.chunks, None)
            if chunk is None:
                self._finish(self._open)
                continue
            content = chunk.numpy().tobytes()
            self._open.done.append(content)
            budget -= len(content)
        return bool(self._wanted)

    def _late(self, now: float) -> bool:
        return bool(self._wanted) and self._wanted[0].since <= now - LATE

    def _begin_next(self) -> bool:
        while self._wanted:
            writing = self._wanted[0]
            found = self._next_of(writing)
            if found is None:
                self._wanted.popleft()
                continue
            node, span = found
            tokens = writing.key[span.start * TOKEN : span.end * TOKEN]
            key = key_after(
                writing.parent, identity=self.identity, namespace=writing.namespace, tokens=tokens, secret=self._secret
            )
            if key in self._on_way or key in self.catalogue:  # another completion had the same tokens
                writing.at, writing.parent = span.end, key
                continue
            spare = {pos for pos, kept in node.checkpoints.items() if kept.spare}
            reading = self._memory.claims.reading(node.claim, span, without=spare)
            record, sizes = to_bytes(reading.record), reading.sizes()
            snapshot = Snapshot(key, writing.parent, writing.namespace, span, tokens, record, sizes)
            transfer = self.transfers.reserve(snapshot) if snapshot.size <= self.transfers.largest else None
            if transfer is not None:
                self._open, self._least = _Open(writing, transfer, reading, iter(reading)), 1
                return True
            reading.close()
            if snapshot.size <= self.transfers.largest:
                self._least = self.transfers.need(snapshot)
                return False
            self._too_large(snapshot)
        return False

    def _too_large(self, snapshot: Snapshot) -> None:
        """Make shorter ones, or none of this sequence."""
        if len(snapshot.span) >= 2 * LEAST:
            self._segment = min(self._segment, len(snapshot.span)) // 2
            return
        self._wanted.popleft()
        self._not_written("too large for staging")

    def _not_written(self, why: str) -> None:
        if not self.failures[why]:
            log.warning("a snapshot is not stored: %s; staging_bytes is %d", why, self.transfers.staging)
        self.failures[why] += 1

    def _next_of(self, writing: _Writing) -> tuple[Node, Span] | None:
        """The node and the span of the next snapshot; None if nothing is left, or was evicted meanwhile."""
        end = len(writing.key) // TOKEN
        if writing.at >= end:
            return None
        node = self._prefixes.tree.node_at(writing.namespace, writing.key, writing.at)
        if node is None:
            return None
        claim = self._memory.claims.of(node.claim)
        upto = min(node.end, end, writing.at + self._segment)
        if claim.whole(writing.at) != writing.at or (upto := claim.whole(upto)) <= writing.at:
            return None
        return node, Span(writing.at, upto)

    def _finish(self, opened: _Open) -> None:
        """All of the snapshot was read out: let it be written."""
        snapshot, writing = opened.transfer.snapshot, opened.writing
        opened.reading.close()
        self._open = None
        self._on_way[snapshot.key] = len(snapshot.span)
        writing.at, writing.parent = snapshot.span.end, snapshot.key
        self.transfers.put(opened.transfer, opened.done, writing.retention)

    def _completed(self, transfer: Transfer) -> None:
        """On a thread of the transfers."""
        written = self.features.written if transfer.snapshot.namespace.startswith(IMAGE) else self._written
        self._posted((lambda: written(transfer)) if transfer.stores else _nothing)

    def _written(self, transfer: Transfer) -> None:
        self._on_way.pop(transfer.snapshot.key, None)  # it is not there if it was given up before all was read
        if transfer.outcome is Outcome.STORED:
            self.written += len(transfer.snapshot.span)

    def stop_reading(self) -> bool:
        """Give up the snapshot that is being read out: its cells are needed. False if there is none."""
        if self._open is None:
            return False
        self._wanted.popleft()
        self._stop_reading()
        return True

    def _stop_reading(self) -> None:
        if self._open is not None:
            self._open.reading.close()
            self.transfers.cancel(self._open.transfer)
            self._open = None

    # -- the whole ----------------------------------------------------------------------------------------------

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        self._note_lost()
        self.restores.stepped(tokens, seconds)

    def reset(self, prefixes: Prefixes) -> None:
        """The tree was made anew after an error: give up what was under way."""
        self.restores.reset(prefixes)
        self._wanted.clear()
        self._stop_reading()
        self._prefixes = prefixes
        prefixes.know_others(self._others, self.identity.hex())

    def flush(self) -> float | None:
        """At the end: read a part of what is left out of memory. Returns the seconds until there is more; None if
        nothing is left, and `WAIT` seconds after the first call."""
        self._until = self._until or time.monotonic() + WAIT
        if not (self._wanted or self._open) or time.monotonic() >= self._until:
            return None
        if self.pump():
            return 0.0
        return STAGING_PAUSE if self._wanted else None

    def stop(self) -> None:
        """Read no more of memory; what was read is still written."""
        self._closed = True
        self.reset(self._prefixes)

    def close(self) -> None:
        """After `stop`: wait until what was read is written, as long as `flush` has left of its time, and close the
        tiers. May be called from any thread."""
        left = (self._until or time.monotonic()) - time.monotonic()
        if not self.transfers.close(max(0.0, left)):
            log.warning("some snapshots could not be written in %g seconds", WAIT)
        for tier in self.transfers.tiers:
            tier.close()

    def _posted(self, call: Callable[[], None]) -> None:
        try:
            self._post(call)
        except EngineClosed:
            return

    # -- for an operator ----------------------------------------------------------------------------------------

    @property
    def disk(self) -> DiskTier | None:
        return next((tier for tier in self.transfers.tiers if isinstance(tier, DiskTier)), None)

    def remove_all(self, keys: Iterable[bytes] | None = None) -> int:
        """Remove these snapshots, or all, from all tiers; returns how many. May be called from any thread."""
        gone: set[bytes] = set()
        for tier in self.transfers.tiers:
            there = [entry.snapshot.key for entry in tier.entries()] if keys is None else list(keys)
            tier.remove(there)
            gone.update(there)
        return len(gone)

    @property
    def unwritten(self) -> bool:
        """Whether something is left to be written."""
        return bool(self._wanted or self._on_way or self.features.on_way)

    def check(self) -> None:
        """Assert what is always true."""
        self.catalogue.check()
        self.restores.check()
        self.features.check()
        self.transfers.check()
        assert self._open is None or self._open.writing is self._wanted[0]


def _nothing() -> None:
    """A call that lets the engine go on."""
