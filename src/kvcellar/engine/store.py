"""store: writes what the prefix tree has to a tier, and brings it back for the requests that need it.

    store.keep(namespace, key)          # a completion has ended: write what of it is not stored yet
    store.pump(budget)                  # between steps: read some bytes out of memory for a writing thread
    store.fetches(namespace, key, ...)  # a request waits: let a reading thread read what it needs

Everything but `put` and `get` of the tier runs on the engine's thread. A snapshot is of one node of the tree, or a part
of it, and continues the snapshot of the tokens before it.

Always true:
  * a snapshot is written after the one that it continues;
  * at most `STAGED` bytes, and one snapshot more, are on their way to the tier, and as many on their way back;
  * what was read back is checked against the record and the tokens of its key before any of it is used.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Semaphore
from typing import TypeVar

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.cache.readout import Reading, Record
from kvcellar.cache.record import from_bytes, positions, to_bytes
from kvcellar.engine.prefixes import Prefixes
from kvcellar.errors import CacheFull, EngineClosed, KvcellarError
from kvcellar.prefix.node import TOKEN, Node
from kvcellar.prefix.stored import Catalogue
from kvcellar.prefix.why import ReadBack
from kvcellar.snapshot import Snapshot, key_after
from kvcellar.spans import Span
from kvcellar.tiers.tier import Loaded, Tier, Why, chains

log = logging.getLogger("kvcellar.engine")

LEAST = 64  # tokens: fewer are computed again as fast as they are read
SEGMENT = 512  # tokens of one snapshot, at most
STAGED = 256 << 20
BUSY = 4 << 20  # bytes that are read out of memory between two steps of running requests
MOST_WANTED = 256  # sequences that wait to be written: a tier that is slow or down costs no more memory
WAIT = 2.0  # seconds for unwritten snapshots at the end

T = TypeVar("T")
Evict = Callable[[str | None, int], bool]  # cells of a group, or a state row


@dataclass(eq=False, slots=True)
class _Writing:
    """A sequence of which snapshots are being made. `at` tokens of it are done, up to the snapshot `parent`."""

    namespace: str
    key: bytes
    at: int
    parent: bytes | None


@dataclass(eq=False, slots=True)
class _Open:
    """The snapshot that is being read out of memory."""

    writing: _Writing
    span: Span
    key: bytes
    reading: Reading
    chunks: Iterator[Tensor]
    done: list[bytes] = field(default_factory=list[bytes])


@dataclass(eq=False, slots=True)
class Fetch:
    """What is being read back for a request. `node` is where the tree has got to; it is locked until the end."""

    namespace: str
    key: bytes
    chain: tuple[Snapshot, ...]
    root: Node
    node: Node
    done: bool = False
    tokens: Counter[str] = field(default_factory=Counter[str])  # that were brought back, by tier
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0  # that it took, once it is done

    @property
    def read_back(self) -> ReadBack:
        return ReadBack(tuple(self.tokens.items()), self.seconds)


class Store:
    """The snapshots of one memory in one tier. `post` runs a call on the engine's thread, between two steps."""

    def __init__(
        self,
        tier: Tier,
        memory: Memory,
        prefixes: Prefixes,
        *,
        identity: bytes,
        post: Callable[[Callable[[], None]], None],
        evict: Evict,
        gone: deque[tuple[bytes, Why]],
    ) -> None:
        """`gone` are keys that the tier has removed, with the reasons, appended on any thread and taken out here."""
        self.tier, self._memory, self._prefixes = tier, memory, prefixes
        self._identity, self._post, self._evict = identity, post, evict
        self.catalogue = Catalogue(anywhere=prefixes.anywhere)
        self._gone = gone
        self._wanted: deque[_Writing] = deque()
        self._open: _Open | None = None
        self._staged = 0
        self._on_way: set[bytes] = set()  # snapshots that the writing thread has
        self._fetches: set[Fetch] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvcellar-write")
        self._reader = ThreadPoolExecutor(2, thread_name_prefix="kvcellar-read")
        self._room = Semaphore(2)  # snapshots that were read and are not in memory yet
        self._closed = False
        self.written = self.restored = 0  # tokens

    def load(self) -> None:
        """Learn which snapshots there are."""
        for entry in chains(self.tier.entries()):
            self._learn(entry.snapshot)

    def _learn(self, snapshot: Snapshot) -> None:
        try:
            self.catalogue.add(snapshot, positions(snapshot.record))
        except KvcellarError as error:
            log.warning("a stored snapshot is not used: %s", error)
            self.tier.remove([snapshot.key])

    # -- writing ------------------------------------------------------------------------------------------------

    def keep(self, namespace: str, key: bytes) -> None:
        """Write the snapshots of these tokens, as far as the tree has them when their turn comes. Not if many wait."""
        self._forget_gone()
        if len(self._wanted) >= MOST_WANTED:
            return
        chain = self.catalogue.whole(namespace, key)
        at = chain[-1].span.end if chain else 0
        if len(key) // TOKEN - at >= LEAST and not self._closed:
            self._wanted.append(_Writing(namespace, key, at, chain[-1].key if chain else None))

    def pump(self, budget: int = BUSY) -> bool:
        """Read up to about `budget` bytes out of memory. False if there is nothing to read, or nowhere to put it."""
        if self._staged >= STAGED or self.tier.down:
            return False
        while budget > 0:
            if self._open is None and not self._begin_next():
                return False
            assert self._open is not None
            chunk = next(self._open.chunks, None)
            if chunk is None:
                self._finish(self._open)
                return True
            content = chunk.numpy().tobytes()
            self._open.done.append(content)
            budget -= len(content)
        return True

    def _begin_next(self) -> bool:
        while self._wanted:
            writing = self._wanted[0]
            found = self._next_of(writing)
            if found is None:
                self._wanted.popleft()
                continue
            node, span = found
            key = self._key(writing, span)
            if key in self._on_way or key in self.catalogue:  # another completion had the same tokens
                writing.at, writing.parent = span.end, key
                continue
            reading = self._memory.claims.reading(node.claim, span)
            self._open = _Open(writing, span, key, reading, iter(reading))
            return True
        return False

    def _next_of(self, writing: _Writing) -> tuple[Node, Span] | None:
        """The node and the span of the next snapshot; None if nothing is left, or was evicted meanwhile."""
        end = len(writing.key) // TOKEN
        if writing.at >= end:
            return None
        node = self._prefixes.tree.node_at(writing.namespace, writing.key, writing.at)
        if node is None:
            return None
        claim = self._memory.claims.of(node.claim)
        upto = min(node.end, end, writing.at + SEGMENT)
        if claim.whole(writing.at) != writing.at or (upto := claim.whole(upto)) <= writing.at:
            return None
        return node, Span(writing.at, upto)

    def _key(self, writing: _Writing, span: Span) -> bytes:
        tokens = writing.key[span.start * TOKEN : span.end * TOKEN]
        return key_after(writing.parent, identity=self._identity, namespace=writing.namespace, tokens=tokens)

    def _finish(self, opened: _Open) -> None:
        """All of the snapshot was read out: give it to the writing thread."""
        record = opened.reading.record
        self._stop_reading()
        writing, span, key, chunks = opened.writing, opened.span, opened.key, tuple(opened.done)
        tokens = writing.key[span.start * TOKEN : span.end * TOKEN]
        snapshot = Snapshot(
            key, writing.parent, writing.namespace, span, tokens, to_bytes(record), tuple(map(len, chunks))
        )
        self._staged += snapshot.size
        self._on_way.add(key)
        places = tuple(mark.pos for mark in record.checkpoints)
        writing.at, writing.parent = span.end, key
        self._writer.submit(self._write, snapshot, chunks, places)

    def _write(self, snapshot: Snapshot, chunks: tuple[bytes, ...], places: tuple[int, ...]) -> None:
        """On the writing thread."""
        stored = self._tried(lambda: self.tier.put(snapshot, chunks))

        def note() -> None:
            self._staged -= snapshot.size
            self._on_way.discard(snapshot.key)
            if stored and self.catalogue.add(snapshot, places):
                self.written += len(snapshot.span)

        self._posted(note)

    @staticmethod
    def _tried(act: Callable[[], T]) -> T | None:
        """On a thread of the store: a tier should not raise, and an error here would leave a request waiting."""
        try:
            return act()
        except Exception:
            log.exception("a tier failed where it should not; this is a miss")
            return None

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
            self._open = None

    def _forget_gone(self) -> None:
        """Forget what the tier has evicted since the last call."""
        while self._gone:
            key, why = self._gone.popleft()
            if why == "damaged" and (lost := self.catalogue.path(key)) is not None:
                self._prefixes.losses.damaged(*lost, f"the {self.tier.name} tier had other bytes than were written")
            self.catalogue.remove(key)

    # -- reading ------------------------------------------------------------------------------------------------

    def fetch(self, namespace: str, key: bytes) -> Fetch | None:
        """Begin to read back what a request needs; None if the tier has not much more than memory."""
        limit = len(key) // TOKEN - 1
        if self._closed or self.tier.down or not len(self.catalogue):
            return None
        self._forget_gone()
        found = self.catalogue.match(namespace, key, limit)
        have = self._prefixes.restorable(namespace, key)
        if found.resume < have + LEAST:
            return None
        chain = tuple(snapshot for snapshot in found.chain if snapshot.span.end > have)
        root = self._prefixes.tree.root(namespace)
        self._prefixes.tree.share(root)
        fetch = Fetch(namespace, key, chain, root, root)
        self._fetches.add(fetch)
        self._reader.submit(self._read, fetch)
        return fetch

    @property
    def fetching(self) -> bool:
        return bool(self._fetches)

    def _read(self, fetch: Fetch) -> None:
        """On a reading thread: the snapshots in order, as many as there is room for at once."""
        for snapshot in fetch.chain:
            self._room.acquire()
            if fetch.done or self._closed:
                self._room.release()
                break
            loaded = self._tried(lambda snapshot=snapshot: self.tier.get(snapshot.key))
            self._posted(lambda snapshot=snapshot, loaded=loaded: self._arrived(fetch, snapshot, loaded))
            if loaded is None:
                return
        self._posted(lambda: self._end(fetch))

    def _arrived(self, fetch: Fetch, snapshot: Snapshot, loaded: Loaded | None) -> None:
        self._room.release()
        if fetch.done:
            return
        self._forget_gone()
        if loaded is None or (loaded.snapshot.tokens, loaded.snapshot.span) != (snapshot.tokens, snapshot.span):
            self.catalogue.remove(snapshot.key)
            self._end(fetch)
            return
        try:
            self._enter(fetch, loaded)
        except CacheFull:
            self._end(fetch)
        except KvcellarError as error:
            log.warning("a stored snapshot is not used: %s", error)
            self.catalogue.remove(snapshot.key)
            self.tier.remove([snapshot.key])
            self._end(fetch)

    def _enter(self, fetch: Fetch, loaded: Loaded) -> None:
        """Let the tree have what was read."""
        record, span = from_bytes(loaded.snapshot.record), loaded.snapshot.span
        self._make_free(record)
        claim = self._memory.claims.write_back(record, map(_as_tensor, loaded.chunks))
        key = fetch.key[: span.start * TOKEN] + loaded.snapshot.tokens  # may end in other tokens than the request's
        fetch.node, _ = self._prefixes.tree.insert(fetch.root, key, claim, span.start, fetch.node)
        fetch.tokens[self.tier.name] += len(span)

    def _make_free(self, record: Record) -> None:
        need: dict[str, int] = {}
        for stretch in record.stretches:
            need[stretch.group] = need.get(stretch.group, 0) + len(stretch.span)
        for group, cells in need.items():
            while (short := cells - self._memory.free().get(group, cells)) > 0 and self._evict(group, short):
                pass
        rows = self._memory.rows
        while rows.capacity is not None and (rows.free or 0) < len(record.checkpoints) and self._evict(None, 1):
            pass

    def _end(self, fetch: Fetch) -> None:
        if fetch.done:
            return
        fetch.done, fetch.seconds = True, time.perf_counter() - fetch.began
        self._fetches.discard(fetch)
        self.restored += fetch.tokens.total()
        self._prefixes.tree.unlock(fetch.node)
        keys = [snapshot.key for snapshot in fetch.chain]
        self._reader.submit(self._tried, lambda: self.tier.used(keys))  # which may write to a disk

    # -- the whole ----------------------------------------------------------------------------------------------

    def reset(self, prefixes: Prefixes) -> None:
        """The tree was made anew after an error: give up what was under way."""
        for fetch in self._fetches:
            fetch.done = True
        self._fetches.clear()
        self._wanted.clear()
        self._stop_reading()
        self._prefixes = prefixes

    def close(self) -> None:
        """Write what is left, for `WAIT` seconds at most."""
        until = time.monotonic() + WAIT
        while time.monotonic() < until and self.pump(1 << 30):
            pass
        self._closed = True
        self.reset(self._prefixes)
        self._room.release(1 << 16)  # what no longer arrives
        self._reader.shutdown(wait=False, cancel_futures=True)
        done = self._writer.submit(lambda: None)
        try:
            done.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            log.warning("some snapshots could not be written in %g seconds", WAIT)
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._reader.shutdown(wait=True)
        self.tier.close()

    def _posted(self, call: Callable[[], None]) -> None:
        try:
            self._post(call)
        except EngineClosed:
            return

    def locks(self) -> list[Node]:
        """Nodes that are locked while something is read back, each as often as it is."""
        return [fetch.node for fetch in self._fetches]

    @property
    def unwritten(self) -> bool:
        """Whether something is left to be written."""
        return bool(self._wanted or self._staged)

    def check(self) -> None:
        """Assert what is always true."""
        self.catalogue.check()
        assert self._staged >= 0
        assert not any(fetch.done for fetch in self._fetches)


def _as_tensor(chunk: bytes) -> Tensor:
    """A copy: torch warns of tensors that share memory which must not be written."""
    made = torch.empty(len(chunk), dtype=torch.uint8)
    memoryview(made.numpy())[:] = chunk
    return made
