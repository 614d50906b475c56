"""tree: a compressed tree of token sequences. Each node holds a claim on the memory of its tokens, all groups together.

    root = tree.root(namespace)
    match = tree.match(root, key, most)      # what is in memory of a prompt, and where it can be resumed
    tree.lock(match.node)                    # while a sequence uses it
    node = tree.insert(root, key, claim)     # what a step or an answer has left in memory
    tree.unlock(node); tree.evict_leaf(); tree.evict_checkpoint()

A key is the token ids of a sequence as 8 bytes each (`key_of`), so that edges are compared by the C library.

Always true:
  * a child begins where its parent ends; no edge is empty, and siblings differ in their first token;
  * every node but a root has a claim on exactly its span, whose checkpoints are those of the node;
  * `users` of a node counts the locks on it and on all nodes below it; a node with users is not evicted;
  * every node without children and users that is not pinned, every checkpoint and every tail of a claim is in its heap;
    other entries of the heaps are stale and skipped; two nodes whose tails have a gap between them stay apart;
  * a node is kept at least as long as all below it: its priority is as high, it expires no earlier, and it is pinned if
    one of them is. Nothing that has expired is matched.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf

from kvcellar.memory.prefix.node import (
    TOKEN,
    ClaimStore,
    Kept,
    Lookup,
    Match,
    Node,
    Use,
    Watch,
    below,
    path_digest,
)
from kvcellar.memory.prefix.order import UNLIMITED, Next, Order, Part
from kvcellar.memory.prefix.pins import Pins
from kvcellar.memory.retention import DEFAULT, Retention, stronger

LEAST = 16  # tokens that are evicted together,
PART = 64  # and the part of a long leaf: cutting one costs its tokens
LEAST_OF_TAIL = 64  # tokens that are dropped together of a tail,
PART_OF_TAIL = 8  # and the part of a long one: cells that checkpoints hold, too, are not free then
TRIES = 16  # checkpoints that are looked at for one that is evicted


class Tree(Lookup):
    """The prefix tree of one memory."""

    def __init__(
        self,
        claims: ClaimStore,
        *,
        anywhere: bool,
        evicted: Callable[[Node, int], None] = lambda node, pos: None,
        pins: Part = UNLIMITED,
        quota: Part = UNLIMITED,
        clock: Callable[[], float] = time.time,
        watch: Watch | None = None,
        lowest: Callable[[int], int] | None = None,
    ) -> None:
        """`evicted` is called before the tokens of a node behind a position are evicted. `pins` is the most that may be
        pinned, `quota` what one owner may have before its entries are evicted first; tails have none."""
        super().__init__(claims, anywhere=anywhere, clock=clock, lowest=lowest)
        self._evicted, self._watch = evicted, watch
        self._order = Order(quota)
        self.total, self.worth = self._order.total, self._order.worth
        self.pins = Pins(pins, self._order)

    # -- use ----------------------------------------------------------------------------------------------------

    def touch(self, node: Node, key: bytes = b"", matched: int = 0, *, recurring: bool = False) -> Use | None:
        """A request resumes at the end of a node that it has locked; the tree has the first `matched` tokens of its
        key. What it uses is of the value that it has now. Returns the last use of what it goes on with: of what was
        evicted behind them, or, if it is `recurring`, one that stands for it."""
        lost = self._order.returns.begin(node, key, matched)
        if node.parent is not None:
            self._order.enter_leaf(node)
        if (kept := node.checkpoints.get(node.end)) is not None:
            kept.hits, kept.spare = kept.hits + 1, False
            self._order.enter_checkpoint(kept)
        return self._order.returns.expected() if lost is None and recurring else lost

    def strengthen(self, node: Node, retention: Retention) -> None:
        """What a request has used up to the end of a node is kept at least as long as `retention` says, which pins
        nothing."""
        while node.parent is not None and node.retention is not retention:
            before = node.retention
            if (kept := stronger(before, retention)) == before:
                return  # so are all above it
            node.retention = kept
            if kept.expires != before.expires:
                self._order.enter_lease(node)
            if kept.priority != before.priority:
                for one in node.checkpoints.values():
                    self._order.enter_checkpoint(one)
                if node.tail is not None:
                    self._order.enter_tail(node)
            node = node.parent

    def pin(self, root: Node, key: bytes) -> int:
        """Let what is in memory of a key, as far as it can be resumed, not be evicted; returns how many tokens that
        are, 0 if they are more than may be pinned."""
        match = self.match(root, key, len(key) // TOKEN, tails=False)
        if not match.path or not self.pins.fits(match):
            return 0
        node = match.path[-1]
        self.pins.add(self._split(node, match.resume) if match.resume < node.end else node)
        return match.resume

    def share(self, node: Node) -> None:
        """One more sequence uses a node that is locked, until `unlock`."""
        self._lock(node)

    def lock(self, root: Node, match: Match) -> Node:
        """A sequence resumes at `match`: what it uses stays until the node that is returned is unlocked. Splits the
        last node of the path, so that no more than that is locked; the match is out of date afterwards."""
        node = match.path[-1] if match.path else root
        if match.resume < node.end:
            node = self._split(node, match.resume)
        self._lock(node)
        return node

    def _lock(self, node: Node) -> None:
        above: Node | None = node
        while above is not None:
            above.users += 1
            if above.users == 1 and above.retention.pinned:
                self.pins.use(above, idle=False)
            above = above.parent

    def unlock(self, node: Node) -> None:
        above: Node | None = node
        while above is not None:
            above.users -= 1
            if not above.users and above.retention.pinned:
                self.pins.use(above, idle=True)
            above = above.parent
        self._settle(node)

    # -- changes ------------------------------------------------------------------------------------------------

    def insert(
        self,
        root: Node,
        key: bytes,
        claim: int,
        start: int,
        own: Node,
        retention: Retention = DEFAULT,
        *,
        last: Use | None = None,
        spare: Callable[[int], bool] = lambda pos: False,
    ) -> tuple[Node, int]:
        """Give the tree a claim on the tokens [start, end of the key) of a sequence that has locked the node `own`;
        returns the last node whose tokens are all of the key, which is locked now instead, and how many tokens of the
        key the tree had before.

        What the tree has of these tokens already stays as it is, and takes the checkpoints that it does not have. Where
        it has less than the first `start` tokens (they were evicted), or parts from the claim inside a span that looked
        ahead, the claim is dropped. All of it is kept as `retention` says. `last` is the last use of what is new, if it
        was in the tree before. `spare`: whether its checkpoint at a position is.
        """
        path, matched = self._walk(root, key, expired=True)
        node, end = path[-1] if path else root, len(key) // TOKEN
        if not self._continues(node, matched, claim, start, end):
            self._claims.drop(claim)
            node = node if node.end <= matched else node.parent or root
        else:
            rest = self._rest(claim, start, end, path, matched, spare)
            if matched < node.end:
                node = self._split(node, matched)
            self.strengthen(node, retention)
            if rest is not None:
                node = self._append(node, key[matched * TOKEN :], rest, own, retention, last, spare)
        self._lock(node)
        self.unlock(own)
        return node, matched

    def _continues(self, last: Node, matched: int, claim: int, start: int, end: int) -> bool:
        """Whether a claim on [start,end) can go on where its first `matched` tokens end, in the node `last`."""
        cut = ([claim] if start < matched < end else []) + ([last.claim] if matched < last.end else [])
        return matched >= start and all(self._claims.of(one).whole(matched) == matched for one in cut)

    def _rest(
        self, claim: int, start: int, end: int, path: Sequence[Node], matched: int, spare: Callable[[int], bool]
    ) -> int | None:
        """What of a claim the tree does not have; None: it has all. The nodes of the path take the checkpoints of
        the rest."""
        if matched <= start:
            return claim
        rest = self._claims.split(claim, matched) if matched < end else None
        self._take_checkpoints(claim, path, spare)
        self._claims.drop(claim)
        return rest

    def _append(
        self,
        parent: Node,
        edge: bytes,
        claim: int,
        own: Node,
        retention: Retention,
        last: Use | None,
        spare: Callable[[int], bool],
    ) -> Node:
        """The node becomes longer, or gets a child: a root, one with children, one that others have locked, one that
        is kept in another way, and one whose tail would be lost."""
        positions = self._claims.of(claim).positions
        apart = parent.users > (parent is own) or parent.retention != retention
        if parent.parent is None or parent.children or apart or self._gap(parent, claim):
            node = Node(parent, parent.end, edge, claim, retention=retention, use=self._order.returns.use(last))
            parent.children[edge[:TOKEN]] = node
            self._order.enter_lease(node)
        else:
            node = parent
            self._claims.join(node.claim, claim)
            node.edge += edge
            node.hashed = None
        self._order.leaves.count(retention.owner, len(edge) // TOKEN)
        if self._watch is not None:
            self._watch.gained(node, node.end - len(edge) // TOKEN)
        for pos in positions:
            self._add_checkpoint(node, pos, spare=spare(pos))
        self._order.enter_leaf(node)
        self._rank_tail(node)
        return node

    def _rank_tail(self, node: Node) -> None:
        """Rank the tail of a node's claim, if it has one."""
        if not self._anywhere and self._claims.of(node.claim).tail < node.end:
            self._order.enter_tail(node)

    def _gap(self, node: Node, following: int) -> bool:
        """Whether a node would lose its tail if the claim that follows its own became a part of it."""
        return self._claims.of(node.claim).tail < node.end < self._claims.of(following).tail

    def _add_checkpoint(self, node: Node, pos: int, *, spare: bool) -> None:
        kept = node.checkpoints[pos] = Kept(node, pos, spare=spare)
        self._order.checkpoints.count(node.retention.owner, 1)
        self._order.enter_checkpoint(kept)

    def _take_checkpoints(self, claim: int, path: Sequence[Node], spare: Callable[[int], bool]) -> None:
        """Let nodes have what `claim` has and they do not."""
        at = 0
        for pos in self._claims.of(claim).positions:
            while path[at].end < pos:
                at += 1
            node = path[at]
            if pos not in node.checkpoints:
                self._claims.move_checkpoint(claim, pos, node.claim)
                self._add_checkpoint(node, pos, spare=spare(pos))

    def _split(self, node: Node, pos: int) -> Node:
        """Part a node at `pos`; returns the new node above it. The node itself keeps its end, children and locks."""
        at = (pos - node.start) * TOKEN
        parent = node.parent
        assert parent is not None, "a root has no tokens to be split"
        rest = self._claims.split(node.claim, pos)
        above = Node(parent, node.start, node.edge[:at], node.claim, users=node.users, retention=node.retention)
        above.use = node.use
        self._order.enter_lease(above)
        self._rank_tail(above)
        parent.children[node.edge[:TOKEN]] = above
        node.parent, node.start, node.edge, node.claim = above, pos, node.edge[at:], rest
        above.children[node.edge[:TOKEN]] = node
        above.checkpoints, node.checkpoints = node.checkpoints, node.checkpoints.cut(pos)
        for kept in above.checkpoints.values():
            kept.node = above
        if self._watch is not None:
            self._watch.parted(above, node)
        return above

    def _merge(self, node: Node) -> None:
        """Let the only child of a node have the node's tokens, if no sequence has locked the node itself, and both are
        kept in the same way and of the same class: else a document would be evicted with the last question on it."""
        if node.parent is None or len(node.children) != 1 or node in self.pins:
            return
        (child,) = node.children.values()
        assert node.use is not None and child.use is not None
        alike = child.retention == node.retention and child.use.kind == node.use.kind
        if child.users != node.users or not alike or self._gap(node, child.claim):
            return
        if self._watch is not None:
            self._watch.joined(node, child)
        self._claims.join(node.claim, child.claim)
        for kept in node.checkpoints.values():
            kept.node = child
        node.checkpoints.update(child.checkpoints)
        child.use = max(child.use, node.use, key=lambda use: use.at)
        child.parent, child.start, child.claim = node.parent, node.start, node.claim
        child.edge, child.checkpoints = node.edge + child.edge, node.checkpoints
        node.parent.children[child.edge[:TOKEN]] = child
        node.parent, node.edge, node.tail = None, b"", None  # entries of heaps are stale; a use may refer to it long
        self._order.enter_leaf(child)

    # -- eviction -----------------------------------------------------------------------------------------------

    def evict_leaf(self, most: int) -> int:
        """Drop the last tokens, `most` or somewhat more, of the leaf that no sequence uses which is evicted next;
        returns how many, 0 if there is none. Costs the path of nodes, and `PART` times what is dropped."""
        if (found := self._order.next_leaf()) is None:
            return 0
        leaf, heap, _ = found
        most = max(most, LEAST, leaf.tokens // PART)
        cut = self._claims.of(leaf.claim).whole(max(leaf.start, leaf.end - most))
        if not self.resumes(leaf, cut):  # what lies behind the last checkpoint serves no request
            cut = leaf.checkpoints.last(cut, leaf.start)
        n = leaf.end - cut
        self._order.returns.lose(leaf, cut)
        if cut > leaf.start:
            self._evicted(leaf, cut)
            self._cut(leaf, cut)
            heap.put_back(leaf)
        else:
            self._remove(leaf)
        return n

    def evict_checkpoint(self, frees: Callable[[Kept], bool] = lambda kept: True, worth: float = inf) -> Kept | None:
        """Drop the checkpoint that is evicted next of those for which `frees` is true; returns it. None if there is
        none, or none of at most this `worth`, such as that of a new one, or of an owner above its quota. Where `frees`
        is false for the next `TRIES`, the first of them is dropped, or none with a `worth`."""
        ranking = self._order.checkpoints
        passed: list[Next[Kept]] = []
        while (found := ranking.pop()) is not None:
            if not found.over and found.thing.value > worth:
                passed.append(found)
                found = None
                break
            if frees(found.thing):
                break
            passed.append(found)
            if len(passed) == TRIES:
                found = passed.pop(0) if worth == inf else None
                break
        for one in passed:
            one.heap.put_back(one.thing)
        if found is None:
            return None
        kept = found.thing
        self._order.advance(kept)
        self._claims.drop_checkpoint(kept.node.claim, kept.pos)
        self._order.thin(kept)
        self._settle(kept.node, evicted=True)
        return kept

    def evict_window(self, frees: Callable[[Kept], bool], tokens: int) -> bool:
        """Drop the first `tokens`, or somewhat more, of the tail of least value, or a checkpoint for which `frees` is
        true that is of less value or of an owner above its quota; where there is no tail, the checkpoint that is
        evicted next, if need be one for which it is false. False if there is none."""
        if (tail := self._order.next_tail()) is None:
            return (self.evict_checkpoint(frees) or self.evict_checkpoint()) is not None
        if self.evict_checkpoint(frees, tail.value) is None:
            node = tail.node
            self._order.advance(tail)
            held = node.end - self._claims.of(node.claim).tail
            self._claims.forget(node.claim, most := max(tokens, LEAST_OF_TAIL, held // PART_OF_TAIL))
            if most >= held:
                node.tail = None
            self._settle(node, evicted=True)
        return True

    def expire(self, most: int) -> bool:
        """Remove what has expired and no sequence uses, at up to `most` leaves. False if there is nothing."""
        now, found = self._now(), False
        for _ in range(most):
            if (node := self._order.next_expired(now)) is None:
                break
            found = True
            if node.idle:  # others when the last below them has gone, or their last user
                self._remove(node)
        return found

    def discarding(self, nodes: Sequence[Node]) -> Iterator[int]:
        """Remove what no sequence uses of nodes and those below them, pinned or not. Yields the tokens that went at
        each node that was looked at; the tree may change between two of them. What is idle only after that stays."""
        starts = [node.start for node in nodes]
        for first, start in zip(nodes, starts, strict=True):
            for node in below([first]):
                tokens = 0
                while node.parent is not None and node.idle and node.start >= start:
                    above = node.parent
                    tokens += node.tokens
                    self._remove(node)
                    node = above  # what has lost its last child goes, too
                yield tokens

    def _cut(self, leaf: Node, pos: int) -> None:
        """Drop the tokens of a leaf behind `pos`."""
        if self._watch is not None:
            self._watch.lost(leaf, pos)
        self._claims.drop(self._claims.split(leaf.claim, pos))
        self._order.leaves.count(leaf.retention.owner, pos - leaf.end)
        leaf.edge, leaf.hashed = leaf.edge[: (pos - leaf.start) * TOKEN], None
        self._order.checkpoints.count(leaf.retention.owner, -len(leaf.checkpoints.cut(pos)))
        if self._claims.of(leaf.claim).tail == pos:
            leaf.tail = None

    def _remove(self, leaf: Node) -> None:
        """A leaf that no sequence uses is evicted, and then what is left of no use above it."""
        self._evicted(leaf, leaf.start)
        self._settle(self._removed(leaf), evicted=True)

    def _removed(self, leaf: Node) -> Node:
        """Remove a leaf; returns the node above it."""
        parent = leaf.parent
        assert parent is not None and leaf.idle, "a node that is used, or has children, was to be removed"
        if leaf in self.pins:
            self.pins.release(leaf)
        if self._watch is not None:
            self._watch.lost(leaf, leaf.start)
        self._order.leaves.count(leaf.retention.owner, -leaf.tokens)
        self._claims.drop(leaf.claim)
        self._order.checkpoints.count(leaf.retention.owner, -len(leaf.checkpoints.cut(leaf.start)))
        del parent.children[leaf.edge[:TOKEN]]
        leaf.parent, leaf.edge, leaf.tail = None, b"", None  # a use may refer to it for long
        return parent

    def _settle(self, node: Node, *, evicted: bool = False) -> None:
        """After a node has lost a user, a child or a checkpoint: what can no longer serve any request goes, and nodes
        that need no longer be apart become one. `evicted`: it was lost by an eviction, and what goes now, too."""
        while node.parent is not None and node.idle and self._useful(node) <= node.start:
            if evicted:
                self._evicted(node, node.start)
            node = self._removed(node)
        if (parent := node.parent) is None:
            if not (node.children or node.users):
                del self._roots[node.namespace]
        elif not node.idle:
            self._merge(node)
        else:
            if (last := self._useful(node)) < node.end:
                if evicted:
                    self._evicted(node, last)
                self._cut(node, last)
            self._order.enter_leaf(node)
            self._order.enter_lease(node)
            self._merge(parent)

    def _useful(self, leaf: Node) -> int:
        """The last position at which a leaf can be resumed; 0: it has none."""
        if leaf.retention.pinned or self.resumes(leaf, leaf.end):
            return leaf.end
        return leaf.checkpoints.last(leaf.end)

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what is always true."""
        nodes = list(self.nodes())
        self._order.check(nodes)
        self.pins.check(nodes)
        for node in nodes:
            assert node.parent is not None
            assert node.edge and len(node.edge) % TOKEN == 0
            assert node.start == node.parent.end and node.parent.children[node.edge[:TOKEN]] is node
            assert list(node.checkpoints) == list(self._claims.of(node.claim).positions)
            assert all(node.start < pos <= node.end for pos in node.checkpoints)
            assert node.users >= sum(child.users for child in node.children.values())
            assert all(one.node is node for one in node.checkpoints.values())
            tailed = not self._anywhere and self._claims.of(node.claim).tail < node.end
            assert tailed == (node.tail is not None), "a tail is not in the heap"
            assert node.hashed is None or node.hashed.digest() == path_digest(node, node.end)
            above = node.parent.retention if node.parent.parent is not None else None
            assert above is None or stronger(above, node.retention) == above, "a node outlasts the one above it"
