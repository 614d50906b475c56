"""order: which leaf and which checkpoint or tail of the prefix tree is evicted next, and which node has expired.

Always true:
  * `total` counts all tokens, or checkpoints, of the tree;
  * `held` of an owner counts all tokens, or checkpoints, that it has in the tree, while there is a quota;
  * the value of a leaf is what it was worth when it was last used, or reached its age, or was to be evicted;
  * each node that expires has its present time in a heap; other entries of the heaps are stale and skipped.
"""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from kvcellar.memory.policy import TAIL, value
from kvcellar.memory.prefix.node import Kept, Lease, Node, Ranked, Tail
from kvcellar.memory.prefix.reuse_statistics import Returns

SPARE = -(2.0**40)  # the clock of spare checkpoints at first: all of them are of less value than any other
TRIES = 8  # leaves whose value has risen since it was computed

T = TypeVar("T", bound=Ranked)


class Heap(Generic[T]):
    """Things in order of their value, which may rise while they are in it. Entries may be stale: one counts while
    `live(thing)`, if it is the latest of the thing.

    `push` and `pop` cost O(log n) on average: stale entries are skipped, and removed when they are most of the heap.
    """

    def __init__(self, live: Callable[[T], bool]) -> None:
        self._live = live
        self._entries: list[tuple[float, int, T]] = []
        self._numbers = count(1)  # equal values leave in the order in which they came
        self._limit = 64

    def push(self, thing: T) -> None:
        """Enter a thing, or its new value: behind all of equal value."""
        thing.entry = next(self._numbers)
        self.put_back(thing)

    def put_back(self, thing: T) -> None:
        """Enter a thing that was popped where it was."""
        heappush(self._entries, (thing.value, thing.entry, thing))
        if len(self._entries) > self._limit:
            self._entries = [entry for entry in self._entries if self._counts(entry)]
            heapify(self._entries)
            self._limit = 64 + 2 * len(self._entries)

    def pop(self) -> T | None:
        """Remove the live thing of the lowest value and return it; None if there is none."""
        while self._entries:
            entry = heappop(self._entries)
            if self._counts(entry):
                return entry[2]
        return None

    def first(self) -> T | None:
        """The live thing of the lowest value, which stays where it is; None if there is none."""
        while self._entries and not self._counts(self._entries[0]):
            heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def _counts(self, entry: tuple[float, int, T]) -> bool:
        return entry[1] == entry[2].entry and self._live(entry[2])

    def things(self) -> list[T]:
        """All that are live."""
        return [entry[2] for entry in self._entries if self._counts(entry)]


class Part(NamedTuple):
    """A part of a cache. None: the cache is not limited in this."""

    tokens: int | None = None
    checkpoints: int | None = None


UNLIMITED = Part()


class Total(NamedTuple):
    """Of a tree. What was evicted, has expired, was removed or served no request any more is lost."""

    tokens: int
    checkpoints: int
    lost: int
    lost_checkpoints: int


class Next(NamedTuple, Generic[T]):
    """What is evicted next. It was removed from `heap`: if it stays, it is to be put back there. `over`: its owner has
    more than its quota."""

    thing: T
    heap: Heap[T]
    over: bool


class Ranking(Generic[T]):
    """What can be evicted, by value. What owners have beyond `quota` comes first, from the one that has most. The owner
    "" has no quota."""

    def __init__(self, live: Callable[[T], bool], quota: int | None) -> None:
        self._live, self._quota = live, quota
        self._all = Heap[T](live)
        self._of: dict[str, Heap[T]] = {}  # of each owner, if there is a quota
        self._over: set[str] = set()  # fewer than the quota is a part of the cache
        self.held = Counter[str]()
        self.total = self.lost = 0  # of all owners, now and since the start

    def count(self, owner: str, change: int) -> None:
        """An owner has so much more in the tree. To be called before what is new is pushed."""
        self.total += change
        self.lost -= min(change, 0)
        if self._quota is None or not owner:
            return
        self.held[owner] += change
        (self._over.add if self.held[owner] > self._quota else self._over.discard)(owner)
        if not self.held[owner]:
            del self.held[owner]
            self._of.pop(owner, None)

    def push(self, thing: T, owner: str) -> None:
        """Enter a thing, or its new value."""
        self._all.push(thing)
        if self._quota is not None and owner:
            self._of.setdefault(owner, Heap(self._live)).put_back(thing)

    def pop(self) -> Next[T] | None:
        """The next one to evict; None if there is none."""
        for owner in sorted(self._over, key=lambda owner: -self.held[owner]):
            heap = self._of.get(owner)
            if heap is not None and (thing := heap.pop()) is not None:
                return Next(thing, heap, True)
        thing = self._all.pop()
        return None if thing is None else Next(thing, self._all, False)

    def things(self) -> list[T]:
        """All that can be evicted."""
        return self._all.things()

    def check(self, held: Counter[str], total: int) -> None:
        """Assert what is always true, where owners have so much, and all together `total`."""
        assert self.total == total
        if self._quota is None:
            return
        assert self.held == held
        assert self._over == {owner for owner in held if held[owner] > self._quota}
        assert self._of.keys() <= held.keys()
        for owner, heap in self._of.items():
            assert set(map(id, heap.things())) <= set(map(id, self._all.things())), f"{owner!r} has others' entries"


class Order:
    """The rankings of a tree. `quota` is the part of the cache that one owner may have beyond which its entries are
    evicted first."""

    def __init__(self, quota: Part) -> None:
        self.returns = Returns(self.enter_leaf)
        self.leaves = Ranking[Node](lambda node: node.evictable, quota.tokens)
        self.checkpoints = Ranking[Kept](
            lambda kept: kept.node.checkpoints.get(kept.pos) is kept and not kept.pinned, quota.checkpoints
        )
        self.tails = Heap[Tail](lambda tail: tail.node.tail is tail)
        self._clocks = {False: 0.0, True: SPARE}  # values of the last ones that were evicted, of spare ones, too
        self._leases = Heap[Lease](lambda lease: lease.node.parent is not None and lease.node.lease is lease)

    def total(self) -> Total:
        """What the tree has, and what it has lost."""
        return Total(self.leaves.total, self.checkpoints.total, self.leaves.lost, self.checkpoints.lost)

    def enter_leaf(self, node: Node) -> None:
        """A node has its value of now; it is ranked if it can be evicted."""
        node.value = self._worth(node)
        if node.evictable:
            assert node.use is not None
            node.use.leaf = node
            self.leaves.push(node, node.retention.owner)

    def _worth(self, node: Node) -> float:
        assert node.use is not None, "a root is not ranked"
        return self.returns.worth(node.use) * 2.0**node.retention.priority

    def next_leaf(self) -> Next[Node] | None:
        """The leaf that is evicted next; None if there is none. Values that have risen since they were computed are
        computed again, as far as that takes few tries."""
        for _ in range(TRIES):
            found = self.leaves.pop()
            if found is None or self._worth(found.thing) <= found.thing.value:
                return found
            self.enter_leaf(found.thing)
        return self.leaves.pop()

    def enter_checkpoint(self, kept: Kept) -> None:
        self._rank(kept, self._clocks[kept.spare], self._saves(kept))

    def _rank(self, kept: Kept, clock: float, saves: int) -> None:
        retention = kept.node.retention
        kept.value = value(clock, hits=kept.hits, saves=saves, costs=1, priority=retention.priority)
        self.checkpoints.push(kept, retention.owner)

    def worth(self, saves: int, *, spare: bool) -> float:
        """The value of a new checkpoint that saves so many tokens."""
        return value(self._clocks[spare], hits=1, saves=saves, costs=1)

    def _saves(self, kept: Kept) -> int:
        """The tokens from the checkpoint before it on, of one that is not spare from the last such one on."""
        points, start = kept.node.checkpoints, kept.node.start
        before = points.last(kept.pos - 1, start)
        while before > start and points[before].spare and not kept.spare:
            before = points.last(before - 1, start)
        return kept.pos - before

    def advance(self, evicted: Kept | Tail) -> None:
        """What was not used since then falls behind."""
        spare = isinstance(evicted, Kept) and evicted.spare
        self._clocks[spare] = max(self._clocks[spare], evicted.value)

    def thin(self, kept: Kept) -> None:
        """A node has a checkpoint no more. A spare one behind it saves what it did, too: so those of a text become
        sparser, and none of them is the last one to go."""
        points, saved = kept.node.checkpoints, kept.pos - kept.node.checkpoints.last(kept.pos - 1, kept.node.start)
        del points[kept.pos]
        self.checkpoints.count(kept.node.retention.owner, -1)
        after = points.next(kept.pos)
        if after is not None and (heir := points[after]).spare:
            self._rank(heir, heir.value, saved)

    def enter_tail(self, node: Node) -> None:
        """The claim of a node has a tail, of the value that it has now."""
        assert node.use is not None, "a root is not ranked"
        tail = node.tail = node.tail or Tail(node)
        tail.used, priority = node.use.at, node.retention.priority
        tail.value = value(self._clocks[False], hits=1, saves=TAIL, costs=1, priority=priority)
        self.tails.push(tail)

    def next_tail(self) -> Tail | None:
        """The tail of least value, which stays; None if there is none. Those of nodes that were used since they were
        ranked are ranked again."""
        while (tail := self.tails.first()) is not None and tail.node.use is not None and tail.node.use.at > tail.used:
            self.enter_tail(tail.node)
        return tail

    def enter_lease(self, node: Node) -> None:
        """A node expires at another time, or not any more."""
        if node.retention.expires is None:
            node.lease = None
            return
        if node.lease is None:
            node.lease = Lease(node)
        node.lease.value = node.retention.expires
        self._leases.push(node.lease)

    def next_expired(self, now: float) -> Node | None:
        """A node that has expired, each once; None if there is none."""
        lease = self._leases.first()
        if lease is None or lease.value > now:
            return None
        self._leases.pop()
        return lease.node

    def check(self, nodes: list[Node]) -> None:
        """Assert what is always true, where `nodes` are all of the tree."""
        leaves, kept = (set(map(id, ranking.things())) for ranking in (self.leaves, self.checkpoints))
        tails = set(map(id, self.tails.things()))
        tokens, points = Counter[str](), Counter[str]()
        for node in nodes:
            assert node.evictable == (id(node) in leaves), f"a leaf of {node.start} to {node.end} is not in its heap"
            assert all((id(one) in kept) == (not one.pinned) for one in node.checkpoints.values())
            assert node.tail is None or (node.tail.node is node and id(node.tail) in tails)
            assert (node.lease.value if node.lease is not None else None) == node.retention.expires
            if owner := node.retention.owner:
                tokens[owner] += node.tokens
                points[owner] += len(node.checkpoints)
        self.returns.check()
        self.leaves.check(tokens, sum(node.tokens for node in nodes))
        self.checkpoints.check(+points, sum(len(node.checkpoints) for node in nodes))
