"""reuse_statistics: how long after a use the tokens of a prefix tree are used again, and what keeping them is worth by
that.

    returns.begin(node, key, matched)     # a request begins: it uses a node again, and everything is one request older
    use = returns.use()                   # something is used now for the first time
    returns.worth(use)                    # what keeping it is worth now
    returns.lose(leaf, pos)               # it is evicted

Ages are counted in requests, in spans that are each about 1.4 times as long as the one before. What was used once is a
class; what was used more often is in one of two, by the mean number of requests between its uses. For each class and
age it is counted how many uses have reached that age and how many of them were followed by another one then. Of tokens
that were evicted, the use stays known by some tokens on both sides of the cut: else nothing could be learned of what
comes back later than a small memory keeps it.

Always true:
  * only uses of tokens that can be evicted, or were, are counted: a node inside the tree stays for those below it;
  * `_waiting` has every use up to the age of `LONGEST` requests once, in order of age; what was evicted longer ago is
    forgotten.
"""

from collections import deque
from collections.abc import Callable, Hashable
from math import ceil

from kvcellar.memory.policy import worth_by_age
from kvcellar.memory.prefix.node import TOKEN, Node, Use, root_of

LONGEST = 4096  # requests
STARTS = sorted({ceil(2 ** (n / 2)) - 1 for n in range(2 * LONGEST.bit_length() - 1)})  # of each span of ages
AGES = len(STARTS)
WIDTHS = [float(end - start) for start, end in zip(STARTS, [*STARTS[1:], 2 * LONGEST], strict=True)]
OFTEN = 20  # mean requests between the uses of a thing: what was used again more often than so is a class of its own
ONCE, AGAIN, RARELY = KINDS = range(3)
AROUND = 8  # tokens on each side of a cut that tell what was evicted there
EVERY = 8  # requests after which worths are computed anew, at most: while there were few, sooner,
FEW = 32  # by so many of all for each
HALVED = 1024  # requests after which what was counted is worth half


class Returns:
    """The uses of one tree. `aged` is called with each node that could be evicted when its worth has changed by age."""

    def __init__(self, aged: Callable[[Node], None]) -> None:
        self._aged = aged
        self.now = 0
        self._waiting: list[deque[Use]] = [deque() for _ in STARTS]
        self._lost: dict[Hashable, Use] = {}
        self._reached = [[0.0] * AGES for _ in KINDS]  # by class and age
        self._returned = [[0.0] * AGES for _ in KINDS]
        self._worth, self._until = worth_by_age(self._returned, self._reached, WIDTHS), 1

    def begin(self, node: Node, key: bytes, matched: int) -> Use | None:
        """A request begins, and uses the tokens up to the end of a node; the tree has the first `matched` tokens of
        its key. Returns the last use of what was evicted behind them, if the request goes on with that."""
        self.tick()
        lost = self.lost(root_of(node).namespace, key, matched)
        if (last := lost or node.use) is not None:
            self.returned(last)
        if node.use is not None:
            shared, above = dict[Use, Use](), node.parent
            while above is not None and (before := above.use) is not None:
                if before not in shared:
                    shared[before] = self.use(before)
                above.use, above = shared[before], above.parent
            node.use = self.use(node.use)
        return lost

    def tick(self) -> None:
        """Everything is one request older."""
        self.now += 1
        if self.now % HALVED == 0:
            for counts in (*self._reached, *self._returned):
                counts[:] = [count / 2 for count in counts]
        for age in range(AGES - 2, -1, -1):
            waiting = self._waiting[age]
            while waiting and self.now - waiting[0].at >= STARTS[age + 1]:
                self._grow(waiting.popleft(), age)

    def _grow(self, use: Use, age: int) -> None:
        """A use reaches the next span of ages."""
        evictable = use.leaf is not None and use.leaf.use is use and use.leaf.evictable
        if not use.returned and (evictable or use.lost is not None):
            self._reached[use.kind][age] += 1
        use.age = age + 1
        if use.age < AGES - 1:
            self._waiting[use.age].append(use)
        else:
            self._forget(use)
        if evictable and use.leaf is not None:
            self._aged(use.leaf)

    def use(self, last: Use | None = None) -> Use:
        """A use that begins now, of what was used last by `last`."""
        use = Use(self.now, self.now)
        if last is not None:
            use.first, use.before = last.first, last.before + 1
            use.kind = AGAIN if use.at - use.first < OFTEN * use.before else RARELY
        self._waiting[0].append(use)
        return use

    def expected(self) -> Use:
        """Stands for the last use of what is stated to be used again: as if it had been used by each request."""
        return Use(self.now - 1, self.now - 1)

    def returned(self, use: Use) -> None:
        """What was used is used again now. Counts once, and only what could have been evicted since."""
        if not use.returned and use.leaf is not None:
            use.returned = True
            self._reached[use.kind][use.age] += 1
            self._returned[use.kind][use.age] += 1
        self._forget(use)

    def worth(self, use: Use) -> float:
        """What keeping something since a use is worth: uses to come in each request for which it is kept."""
        if self.now >= self._until:
            self._worth = worth_by_age(self._returned, self._reached, WIDTHS)
            self._until = self.now + min(EVERY, 1 + self.now // FEW)
        return self._worth[use.kind][use.age]

    def counts(self, kind: int) -> tuple[list[float], list[float]]:
        """For each age, how many uses of a class have reached its end or returned in it, and how many have returned."""
        return list(self._reached[kind]), list(self._returned[kind])

    # -- what was evicted ---------------------------------------------------------------------------------------

    def lose(self, leaf: Node, pos: int) -> None:
        """The tokens of a leaf from `pos` on are about to be evicted."""
        if leaf.use is None or leaf.use.returned or leaf.use.age == AGES - 1:
            return
        at, above = pos - leaf.start, leaf.parent
        before = leaf.edge[max(at - AROUND, 0) * TOKEN : at * TOKEN]
        while above is not None and len(before) < AROUND * TOKEN:
            before, above = above.edge[len(before) - AROUND * TOKEN :] + before, above.parent
        self._forget(leaf.use)
        lost = leaf.use.lost = (root_of(leaf).namespace, pos, before + leaf.edge[at * TOKEN : (at + AROUND) * TOKEN])
        self._lost[lost] = leaf.use

    def lost(self, namespace: str, key: bytes, pos: int) -> Use | None:
        """The use of what was evicted behind the first `pos` tokens of a key."""
        around = key[max(pos - AROUND, 0) * TOKEN : (pos + AROUND) * TOKEN]
        return self._lost.get((namespace, pos, around))

    def _forget(self, use: Use) -> None:
        if use.lost is not None and self._lost.get(use.lost) is use:
            del self._lost[use.lost]
        use.lost = None

    def check(self) -> None:
        """Assert what is always true."""
        for age, waiting in enumerate(self._waiting):
            ages = [self.now - use.at for use in waiting]
            assert ages == sorted(ages, reverse=True)
            assert all(STARTS[age] <= found for found in ages) and all(use.age == age for use in waiting)
        assert all(use.lost == lost and not use.returned for lost, use in self._lost.items())
        waiting = {id(use) for uses in self._waiting for use in uses}
        assert all(id(use) in waiting for use in self._lost.values())
        for returned, reached in zip(self._returned, self._reached, strict=True):
            assert all(0 <= few <= many for few, many in zip(returned, reached, strict=True))
