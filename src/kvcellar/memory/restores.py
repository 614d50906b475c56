"""restores: brings back what tiers have of the requests that wait, while they wait.

    fetch = restores.prefetch(namespace, key)   # a request has arrived: its snapshots are read into staging memory
    restores.advance(fetch, key, enters=True)   # it is its turn: they enter memory. True while more are to come
    restores.end(fetch)                         # the request does not wait for it any more

All of it runs on the engine's thread; tiers are read by the threads of the transfers.

Always true:
  * a snapshot that several requests need is read once at the same time;
  * those of requests whose turn has not come take at most a quarter of the staging memory, so that one whose turn it
    is goes on;
  * what was read is checked against the record and the tokens of its key before any of it is used;
  * a fetch whose turn has come has locked what it needs of the tree until it is done;
  * what enters memory takes nothing that the next step was promised (see `Memory.reserve`);
  * one that makes no progress for as long as `restore_plan` allows is ended: its tokens are computed.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from kvcellar.errors import CacheFull, KvcellarError
from kvcellar.memory.kv.record import Record, from_bytes
from kvcellar.memory.memory import Memory
from kvcellar.memory.prefix.node import TOKEN, Node
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.prefix.why import ReadBack
from kvcellar.memory.prefixes import Prefixes
from kvcellar.memory.restore_plan import Look, News, Part, Plan, Planner
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.admission import Rate
from kvcellar.memory.tiers.tier import Chunk, Loaded
from kvcellar.memory.tiers.transfers import Transfer, Transfers


class ChunkTensor:
    """One chunk at a time as a tensor. It shares the chunk's memory; where that is read-only, for which torch has
    no tensors, it is a copy, always in the same place: the pages of a new allocation cost more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def holding(self, chunk: Chunk) -> Tensor:
        """Until the next call, and until the chunk's memory is used again."""
        if isinstance(chunk, memoryview) and not chunk.readonly:
            return torch.frombuffer(chunk, dtype=torch.uint8)
        if len(chunk) > len(self._memory):
            self._memory = torch.empty(len(chunk), dtype=torch.uint8)
        made = self._memory[: len(chunk)]
        made.numpy().data[:] = chunk
        return made


log = logging.getLogger("kvcellar.engine")

AHEAD = 4  # the part of the staging memory for requests whose turn has not come
STEP = 32 << 20  # bytes that enter memory between two steps, and one snapshot more
SOON = 0.05  # seconds: the engine does not look more often for what takes too long

Evict = Callable[[str | None, int], bool]  # cells of a group, or a state row


@dataclass(eq=False, slots=True)
class _Staged:
    """A snapshot that is read, or was. `ahead`: for requests whose turn has not come."""

    transfer: Transfer
    users: set["Fetch"]
    ahead: bool


@dataclass(eq=False, slots=True)
class Fetch:
    """What is being read back for a request. Its turn has come when `node` is set: where the tree has got to, locked
    until the end. `skipped` and `unavailable` say why tokens that a tier has are not read back."""

    namespace: str
    chain: deque[Part]  # to be read yet
    reads: deque[Part] = field(default_factory=deque[Part])  # being read, and those that were, in order
    key: bytes = b""
    root: Node | None = None
    node: Node | None = None
    done: bool = False
    tokens: Counter[str] = field(default_factory=Counter[str])  # that were brought back, by tier
    skipped: str = ""
    unavailable: str = ""
    looks: list[Look] = field(default_factory=list[Look])  # for what others have stored, until they are waited for
    short: float | None = None  # since when its next snapshot finds too little staging memory
    began: float = 0.0
    seconds: float = 0.0  # from its turn until it was done

    @property
    def missing(self) -> int:
        """Tokens to be brought back yet."""
        return sum(part.piece.tokens for part in (*self.reads, *self.chain))

    @property
    def read_back(self) -> ReadBack:
        return ReadBack(tuple(self.tokens.items()), self.seconds, self.skipped, self.unavailable)


class Restores:
    """The restores of one memory. `wake` calls `go_on` on the engine's thread, before it looks at waiting requests."""

    def __init__(
        self,
        transfers: Transfers,
        catalogue: Catalogue,
        memory: Memory,
        prefixes: Prefixes,
        *,
        evict: Evict,
        wake: Callable[[], None],
        missed: Callable[[], None],
        news: News,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`missed` is called when a snapshot could not be read."""
        self._transfers, self._catalogue, self._memory, self._prefixes = transfers, catalogue, memory, prefixes
        self._evict, self._wake, self._missed, self._clock = evict, wake, missed, clock
        self._news = news
        self.planner = Planner(transfers, catalogue, prefixes)
        self._fetches: set[Fetch] = set()
        self._staged: dict[bytes, _Staged] = {}
        self._ahead = 0  # bytes staged for requests whose turn has not come
        self._left = STEP  # bytes that may still enter memory before the next step
        self._chunk = ChunkTensor()
        self.restored = 0  # tokens
        self.restoring = Rate()  # of tokens of a request, from its turn on
        self.declined = 0  # requests of which tokens were cheaper to recompute

    def go_on(self) -> None:
        """More may enter memory."""
        self._left = STEP

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        self.go_on()
        self.planner.stepped(tokens, seconds)

    def freed(self) -> None:
        """Some staging memory has become free."""
        for fetch in self._fetches:
            fetch.short = None

    # -- for a request ------------------------------------------------------------------------------------------

    def prefetch(self, namespace: str, key: Callable[[], bytes]) -> Fetch:
        """A request waits: begin to read what it needs, as far as there is staging memory."""
        fetch = Fetch(namespace, deque())
        self._fetches.add(fetch)
        fetch.looks = self._news.ask(namespace, key, lambda: self.planner.misses(namespace, key()))
        self._plan(fetch, key)
        self._read(fetch)
        return fetch

    def advance(self, fetch: Fetch, key: Callable[[], bytes], *, enters: bool) -> bool:
        """Go on with a restore; False when it is done. Its turn comes with the first call with `enters`."""
        if fetch.looks and not fetch.done:
            if self._news.left(fetch.looks):
                return True
            fetch.looks = []
            if fetch.node is None and not enters:
                self._plan(fetch, key)
        if not fetch.done and fetch.node is None and enters:
            self._begin(fetch, key)
        if not fetch.done:
            self._read(fetch)
        if fetch.node is not None:
            while not fetch.done and self._enter_next(fetch):
                self._read(fetch)
            if not (fetch.done or fetch.reads or fetch.chain):
                self.end(fetch)
            if not fetch.done:
                self._limit(fetch)
        return not fetch.done

    @property
    def awaited(self) -> bool:
        """Whether something is under way, or a time runs, after which `advance` makes progress."""
        reads = any(staged.transfer.outcome is None for staged in self._staged.values())
        return reads or any(fetch.looks or fetch.short is not None for fetch in self._fetches)

    def look_again(self) -> float | None:
        """Seconds after which `advance` may end a restore that makes no progress; None: there is none."""
        waiting = (fetch for fetch in self._fetches if fetch.node is not None)
        left = min((self._patience(fetch, self._waited(fetch)) for fetch in waiting), default=inf)
        left = min((left, *(self._news.left(fetch.looks) for fetch in self._fetches if fetch.looks)))
        return max(left, SOON) if left < inf else None

    def _plan(self, fetch: Fetch, key: Callable[[], bytes]) -> None:
        """Decide which snapshots a request needs; what was read of others for it is dropped."""
        plan = self.planner.plan(fetch.namespace, key()) if len(self._catalogue) else Plan()
        fetch.chain, fetch.skipped, fetch.unavailable = deque(plan.parts), plan.skipped, plan.unavailable
        fetch.reads.clear()
        self._leave(fetch, keep={part.snapshot.key for part in fetch.chain})

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, fetch: Fetch) -> None:
        """Read what comes next of a chain, as far as there is memory for it."""
        while fetch.chain:
            snapshot = fetch.chain[0].snapshot
            ahead = fetch.node is None
            staged = self._staged.get(snapshot.key)
            if staged is None:
                if ahead and self._ahead + self._transfers.need(snapshot) > self._transfers.staging // AHEAD:
                    return
                transfer = self._transfers.fetch(snapshot)
                if transfer is None:
                    if not ahead and fetch.short is None:
                        fetch.short = self._clock()
                    return
                fetch.short = None
                staged = self._staged[snapshot.key] = _Staged(transfer, set(), ahead)
                self._ahead += transfer.need if ahead else 0
            self._use(fetch, staged)
            fetch.reads.append(fetch.chain.popleft())

    def _use(self, fetch: Fetch, staged: _Staged) -> None:
        staged.users.add(fetch)
        if staged.ahead and fetch.node is not None:
            staged.ahead = False
            self._ahead -= staged.transfer.need

    def _drop(self, key: bytes) -> None:
        """Free what is staged of a snapshot. Requests that need it too find it in memory, or read it again."""
        staged = self._staged.pop(key, None)
        if staged is not None:
            self._ahead -= staged.transfer.need if staged.ahead else 0
            self._transfers.cancel(staged.transfer)

    def _leave(self, fetch: Fetch, keep: Iterable[bytes] = ()) -> None:
        """The fetch needs nothing of what is staged any more, but for some."""
        for key, staged in list(self._staged.items()):
            if fetch in staged.users and key not in keep:
                staged.users.discard(fetch)
                if staged.users and not self._counts_ahead(staged):
                    staged.ahead = True
                    self._ahead += staged.transfer.need
                if not staged.users or self._ahead > self._transfers.staging // AHEAD:
                    self._drop(key)

    def _counts_ahead(self, staged: _Staged) -> bool:
        """Whether it is counted as is right for its users."""
        return staged.ahead == all(fetch.node is None for fetch in staged.users)

    # -- what takes too long ------------------------------------------------------------------------------------

    def _waited(self, fetch: Fetch) -> float | None:
        """Seconds for which what a restore needs next has made no progress; None if it is there."""
        if not fetch.reads:
            return None if fetch.short is None else self._clock() - fetch.short
        staged = self._staged.get(fetch.reads[0].snapshot.key)
        if staged is None or staged.transfer.outcome is not None:
            return None
        return self._transfers.waited(staged.transfer)

    def _patience(self, fetch: Fetch, waited: float | None) -> float:
        """Seconds for which a restore that has waited so long goes on waiting."""
        return inf if waited is None else self.planner.patience([*fetch.reads, *fetch.chain]) - waited

    def _limit(self, fetch: Fetch) -> None:
        """End a restore that has waited too long: the request computes what was not read, and its tier is not used for
        a while. Not if what it waits for has arrived just now."""
        waited = self._waited(fetch)
        if waited is None or self._patience(fetch, waited) > 0:
            return
        what = "there was no staging memory"
        if fetch.reads:
            tier = self._transfers.overdue(self._staged[fetch.reads[0].snapshot.key].transfer)
            if tier is None:
                return
            what = f"the {tier} tier did not end"
        fetch.skipped = ""
        fetch.unavailable = f"{fetch.missing} stored tokens were not read: {what} for {waited:.1f} s"
        self.end(fetch)

    # -- entering memory ----------------------------------------------------------------------------------------

    def _begin(self, fetch: Fetch, key: Callable[[], bytes]) -> None:
        """The turn of a request has come: lock what memory has, and decide again, since both may have changed."""
        fetch.began = self._clock()
        self._plan(fetch, key)
        self.declined += bool(fetch.skipped)
        if not fetch.chain:
            self.end(fetch)
            return
        fetch.key, fetch.root = key(), self._prefixes.tree.root(fetch.namespace)
        self._lock(fetch)
        for staged in self._staged.values():
            if fetch in staged.users:
                self._use(fetch, staged)

    def _enter_next(self, fetch: Fetch) -> bool:
        """Let the tree have the next snapshot; False if it is not there yet, or none may enter before the next step."""
        if not fetch.reads:
            return False
        snapshot = fetch.reads[0].snapshot
        staged = self._staged.get(snapshot.key)
        if self._has(fetch, fetch.reads[0]):
            self._lock(fetch)
        elif staged is None:  # another request has had it, and it was evicted
            fetch.chain.extendleft(reversed(fetch.reads))
            fetch.reads.clear()
            return True
        elif staged.transfer.outcome is None:
            return False
        elif self._left <= 0:
            self._wake()
            return False
        elif not self._enter(fetch, snapshot, staged.transfer):
            self._drop(snapshot.key)
            self.end(fetch)
            return False
        fetch.reads.popleft()
        self._drop(snapshot.key)
        return True

    def _has(self, fetch: Fetch, part: Part) -> bool:
        """Whether the tree has all that a request needs of a snapshot."""
        if self._prefixes.tree.node_at(fetch.namespace, fetch.key, part.end - 1) is None:
            return False
        return self.planner.own(fetch.namespace, fetch.key) >= part.resume

    def _lock(self, fetch: Fetch) -> None:
        """Lock what the tree has: at first, and when another request has brought back more of the same tokens."""
        assert fetch.root is not None
        tree, before = self._prefixes.tree, fetch.node
        fetch.node = tree.lock(fetch.root, tree.match(fetch.root, fetch.key, len(fetch.key) // TOKEN - 1))
        if before is not None:
            tree.unlock(before)

    def _enter(self, fetch: Fetch, snapshot: Snapshot, transfer: Transfer) -> bool:
        """False if it is missing, is not what was stored, or does not fit."""
        loaded, began = transfer.loaded, self._clock()
        if loaded is None:
            self._missed()
            if self._transfers.has(snapshot.key):  # not damaged, nor evicted
                fetch.skipped, fetch.unavailable = "", f"{fetch.missing} stored tokens could not be read"
            return False
        try:
            if (loaded.snapshot.tokens, loaded.snapshot.span) != (snapshot.tokens, snapshot.span):
                raise KvcellarError("it is of other tokens")
            if not self._insert(fetch, loaded):
                return False
        except CacheFull:
            return False
        except KvcellarError as error:
            log.warning("a stored snapshot is not used: %s", error)
            self._catalogue.forget(snapshot.key)
            self._transfers.remove([snapshot.key])
            return False
        self.planner.entering.record(snapshot.size, self._clock() - began)
        self._left -= snapshot.size
        fetch.tokens[transfer.tiers[0]] += len(snapshot.span)
        return True

    def _insert(self, fetch: Fetch, loaded: Loaded) -> bool:
        """Let the tree have what was read. False if it has not the tokens before it any longer."""
        assert fetch.root is not None
        assert fetch.node is not None
        record, span = from_bytes(loaded.snapshot.record), loaded.snapshot.span
        self._make_free(record)
        before = None if fetch.node is fetch.root else fetch.node.claim
        claim = self._memory.claims.write_back(record, map(self._chunk.holding, loaded.chunks), before)
        key = fetch.key[: span.start * TOKEN] + loaded.snapshot.tokens  # may end in other tokens than the request's
        retention = replace(loaded.retention, pinned=False)
        fetch.node, _ = self._prefixes.tree.insert(fetch.root, key, claim, span.start, fetch.node, retention)
        return fetch.node.end == span.end

    def _make_free(self, record: Record) -> None:
        need: Counter[str] = Counter()
        for stretch in record.stretches:
            need[stretch.group] += len(stretch.span)
        for group, cells in need.items():
            while (short := cells - self._memory.spare().get(group, cells)) > 0 and self._evict(group, short):
                pass
        rows = self._memory.rows
        while (spare := rows.spare) is not None and spare < len(record.checkpoints) and self._evict(None, 1):
            pass

    def end(self, fetch: Fetch) -> None:
        """What has not entered memory yet is dropped. May be called again."""
        if fetch.done:
            return
        fetch.done, fetch.key = True, b""
        fetch.chain.clear()
        fetch.reads.clear()
        self._leave(fetch)
        self._fetches.discard(fetch)
        self.restored += fetch.tokens.total()
        if fetch.node is not None:
            fetch.seconds = self._clock() - fetch.began
            if tokens := fetch.tokens.total():
                self.restoring.record(tokens, fetch.seconds)
            self._prefixes.tree.unlock(fetch.node)
            fetch.node = None

    # -- the whole ----------------------------------------------------------------------------------------------

    def reset(self, prefixes: Prefixes) -> None:
        """The tree was made anew after an error, or memory is closed: give up what was under way."""
        for fetch in list(self._fetches):
            fetch.node = None
            self.end(fetch)
        self._prefixes = prefixes
        self.planner.reset(prefixes)

    def locks(self) -> Iterable[Node]:
        """Nodes that are locked, each as often as it is."""
        return [fetch.node for fetch in self._fetches if fetch.node is not None]

    def check(self) -> None:
        """Assert what is always true."""
        assert self._ahead == sum(one.transfer.need for one in self._staged.values() if one.ahead)
        assert self._ahead <= self._transfers.staging // AHEAD
        assert all(one.users and not any(fetch.done for fetch in one.users) for one in self._staged.values())
        assert all(map(self._counts_ahead, self._staged.values()))
