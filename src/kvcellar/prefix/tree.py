"""tree: a compressed tree of token sequences. Each node holds a claim on the memory of its tokens, all groups together.

    root = tree.root(namespace)
    match = tree.match(root, key, most)      # what is in memory of a prompt, and where it can be resumed
    tree.lock(match.node)                    # while a sequence uses it
    node = tree.insert(root, key, claim)     # what a step or an answer has left in memory
    tree.unlock(node)
    tree.evict_leaf(); tree.evict_checkpoint()

A key is the token ids of a sequence as 8 bytes each (`key_of`), so that edges are compared by the C library.

Always true:
  * a child begins where its parent ends; no edge is empty, and siblings differ in their first token;
  * every node but a root has a claim on exactly its span, whose checkpoints are those of the node;
  * `users` of a node counts the locks on it and on all nodes below it; a node with users is not evicted;
  * every node without children and users, and every checkpoint, is in its heap with its present value; other entries
    of the heaps are stale and skipped.
"""

from collections.abc import Iterator, Sequence

from kvcellar.heap import Heap
from kvcellar.policy import value
from kvcellar.prefix.node import TOKEN, ClaimStore, Kept, Match, Node, below, common


class Tree:
    """The prefix tree of one memory. `anywhere`: a sequence can be resumed at any position, without a checkpoint."""

    def __init__(self, claims: ClaimStore, *, anywhere: bool) -> None:
        self._claims, self._anywhere = claims, anywhere
        self._roots: dict[str, Node] = {}
        self._leaves = Heap[Node](lambda node: node.evictable)
        self._kept = Heap[Kept](lambda kept: kept.node.checkpoints.get(kept.pos) is kept)
        self._clock = 0.0  # value of the last leaf evicted, and of the last checkpoint: what is not used falls behind
        self._kept_clock = 0.0

    # -- looking ------------------------------------------------------------------------------------------------

    def root(self, namespace: str) -> Node:
        """The root of the sequences of a namespace. A match never leaves it."""
        return self._roots.setdefault(namespace, Node(None, 0, b"", namespace=namespace))

    def peek(self, namespace: str) -> Node:
        """The same for looking only: a namespace without tokens does not become known."""
        return self._roots.get(namespace) or Node(None, 0, b"", namespace=namespace)

    def match(self, root: Node, key: bytes, most: int) -> Match:
        """What is in memory of `key`, to be resumed at position `most` at the latest. Changes nothing."""
        path, matched = self._walk(root, key)
        limit = min(matched, most)
        while path and path[-1].start >= limit:
            path.pop()
        if self._anywhere:
            resume = self._claims.of(path[-1].claim).whole(limit) if path else 0
        else:
            resume = 0
            while path and not (resume := max((pos for pos in path[-1].checkpoints if pos <= limit), default=0)):
                path.pop()
        while path and path[-1].start >= resume:  # a span that looked ahead begins with the node
            path.pop()
        return Match(tuple(path), matched, resume)

    def _walk(self, root: Node, key: bytes) -> tuple[list[Node], int]:
        """The nodes below `root` that hold a prefix of `key`, the last one perhaps only with a part of its edge, and
        how many tokens of the key they hold together."""
        path: list[Node] = []
        node, at = root, 0
        while (child := node.children.get(key[at : at + TOKEN])) is not None:
            path.append(child)
            if not key.startswith(child.edge, at):
                return path, child.start + common(child.edge, key[at : at + len(child.edge)])
            at += len(child.edge)
            node = child
        return path, at // TOKEN

    # -- use ----------------------------------------------------------------------------------------------------

    def touch(self, match: Match) -> None:
        """A request resumes where `match` says: what it uses is of the value that it has now."""
        if not match.path:
            return
        last = match.path[-1]
        self._enter_leaf(last)
        if (kept := last.checkpoints.get(match.resume)) is not None:
            kept.hits += 1
            self._enter_checkpoint(kept)

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
            above = above.parent

    def unlock(self, node: Node) -> None:
        above: Node | None = node
        while above is not None:
            above.users -= 1
            above = above.parent
        self._settle(node)

    # -- changes ------------------------------------------------------------------------------------------------

    def insert(self, root: Node, key: bytes, claim: int, start: int, own: Node) -> tuple[Node, int]:
        """Give the tree a claim on the tokens [start, end of the key) of a sequence that has locked the node `own`;
        returns the last node whose tokens are all of the key, which is locked now instead, and how many tokens of the
        key the tree had before.

        What the tree has of these tokens already stays as it is, and takes the checkpoints that it does not have. Where
        it has less than the first `start` tokens (they were evicted), or parts from the claim inside a span that looked
        ahead, the claim is dropped.
        """
        path, matched = self._walk(root, key)
        node = self._inserted(root, key, claim, start, own, path, matched)
        self._lock(node)
        self.unlock(own)
        return node, matched

    def _inserted(
        self, root: Node, key: bytes, claim: int, start: int, own: Node, path: Sequence[Node], matched: int
    ) -> Node:
        end = len(key) // TOKEN
        parent = path[-1] if path else root
        possible = matched >= start and all(
            self._claims.of(number).whole(matched) == matched
            for number in ([claim] if start < matched < end else []) + ([parent.claim] if matched < parent.end else [])
        )
        if not possible:
            self._claims.drop(claim)
            return parent if parent.end <= matched else parent.parent or root
        rest = None
        if matched <= start:
            rest = claim
        else:
            if matched < end:
                rest = self._claims.split(claim, matched)
            self._take_checkpoints(claim, path)
            self._claims.drop(claim)
        if matched < parent.end:
            parent = self._split(parent, matched)
        if rest is None:
            return parent
        return self._append(parent, key[matched * TOKEN :], rest, own)

    def _append(self, parent: Node, edge: bytes, claim: int, own: Node) -> Node:
        """The node becomes longer, or gets a child: a root, one with children, and one that others have locked."""
        if parent.parent is None or parent.children or parent.users > (parent is own):
            node = Node(parent, parent.end, edge, claim)
            parent.children[edge[:TOKEN]] = node
            self._count_branch(parent)
            positions = self._claims.of(claim).positions
        else:
            node, positions = parent, self._claims.of(claim).positions
            self._claims.join(node.claim, claim)
            node.edge += edge
        for pos in positions:
            kept = node.checkpoints[pos] = Kept(node, pos)
            self._enter_checkpoint(kept)
        self._enter_leaf(node)
        return node

    @staticmethod
    def _count_branch(node: Node) -> None:
        """A request has left the path of an earlier one at `node`: it and all above it are shared by one more. A
        conversation that goes on shares nothing: frequent is what many use, not what one has used often."""
        above: Node | None = node
        while above is not None:
            above.branches += 1
            above = above.parent

    def _take_checkpoints(self, claim: int, path: Sequence[Node]) -> None:
        """Let nodes have what `claim` has and they do not."""
        at = 0
        for pos in self._claims.of(claim).positions:
            while path[at].end < pos:
                at += 1
            node = path[at]
            if pos not in node.checkpoints:
                self._claims.move_checkpoint(claim, pos, node.claim)
                kept = node.checkpoints[pos] = Kept(node, pos)
                self._enter_checkpoint(kept)

    def _split(self, node: Node, pos: int) -> Node:
        """Part a node at `pos`; returns the new node above it. The node itself keeps its end, children and locks."""
        at = (pos - node.start) * TOKEN
        parent = node.parent
        assert parent is not None, "a root has no tokens to be split"
        rest = self._claims.split(node.claim, pos)
        above = Node(parent, node.start, node.edge[:at], node.claim, users=node.users, branches=node.branches)
        parent.children[node.edge[:TOKEN]] = above
        node.parent, node.start, node.edge, node.claim = above, pos, node.edge[at:], rest
        above.children[node.edge[:TOKEN]] = node
        for at in [at for at in node.checkpoints if at <= pos]:
            kept = above.checkpoints[at] = node.checkpoints.pop(at)
            kept.node = above
        return above

    def _merge(self, node: Node) -> None:
        """Let the only child of a node have the node's tokens, if no sequence has locked the node itself."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.users != node.users:
            return
        self._claims.join(node.claim, child.claim)
        for kept in node.checkpoints.values():
            kept.node = child
        child.parent, child.start, child.claim = node.parent, node.start, node.claim
        child.edge, child.checkpoints = node.edge + child.edge, node.checkpoints | child.checkpoints
        child.branches = max(node.branches, child.branches)
        node.parent.children[child.edge[:TOKEN]] = child
        node.parent = None  # stale entries of heaps must not count

    # -- eviction -----------------------------------------------------------------------------------------------

    def evict_leaf(self, most: int) -> int:
        """Drop the last tokens, `most` at most, of the leaf of the lowest value that no sequence uses; returns how
        many, 0 if there is none."""
        leaf = self._leaves.pop()
        if leaf is None:
            return 0
        self._clock = max(self._clock, leaf.value)
        n, whole = leaf.end - leaf.start, leaf.end
        if (cut := self._claims.of(leaf.claim).whole(leaf.end - most)) > leaf.start:
            self._cut(leaf, cut)
            self._leaves.push(leaf)
            n = whole - cut
        else:
            self._remove(leaf)
        return n

    def evict_checkpoint(self) -> Kept | None:
        """Drop the checkpoint of the lowest value; returns it, None if there is none."""
        kept = self._kept.pop()
        if kept is None:
            return None
        self._kept_clock = max(self._kept_clock, kept.value)
        node = kept.node
        self._claims.drop_checkpoint(node.claim, kept.pos)
        del node.checkpoints[kept.pos]
        self._settle(node)
        return kept

    def clear(self) -> None:
        """Drop every claim. No lock may be held."""
        for root in list(self._roots.values()):
            for node in list(below(root)):
                self._claims.drop(node.claim)
                node.parent = None
        self._roots.clear()

    def _cut(self, leaf: Node, pos: int) -> None:
        """Drop the tokens of a leaf behind `pos`."""
        self._claims.drop(self._claims.split(leaf.claim, pos))
        leaf.edge = leaf.edge[: (pos - leaf.start) * TOKEN]
        for at in [at for at in leaf.checkpoints if at > pos]:
            del leaf.checkpoints[at]

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert leaf.evictable, "a node that is used, or has children, was to be removed"
        self._claims.drop(leaf.claim)
        leaf.checkpoints.clear()
        del parent.children[leaf.edge[:TOKEN]]
        leaf.parent = None
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """After a node has lost a user, a child or a checkpoint: what can no longer serve any request goes, and nodes
        that need no longer be apart become one."""
        parent = node.parent
        if parent is None:
            if not (node.children or node.users):
                del self._roots[node.namespace]
            return
        if not node.evictable:
            self._merge(node)
        elif self._anywhere or (last := max(node.checkpoints, default=0)) == node.end:
            self._enter_leaf(node)
        elif last:
            self._cut(node, last)
            self._enter_leaf(node)
        else:
            self._remove(node)
            return
        self._merge(parent)

    def _enter_leaf(self, node: Node) -> None:
        node.value = value(self._clock, hits=1 + node.branches, saves=1, costs=1)
        if node.evictable:
            self._leaves.push(node)

    def _enter_checkpoint(self, kept: Kept) -> None:
        before = max((pos for pos in kept.node.checkpoints if pos < kept.pos), default=kept.node.start)
        kept.value = value(self._kept_clock, hits=kept.hits, saves=kept.pos - before, costs=1)
        self._kept.push(kept)

    # -- checks -------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All but the roots, parents before children."""
        for root in self._roots.values():
            yield from below(root)

    def check(self) -> None:
        """Assert what is always true."""
        leaves, kept = set(map(id, self._leaves.things())), set(map(id, self._kept.things()))
        for node in self.nodes():
            assert node.parent is not None
            assert node.edge and len(node.edge) % TOKEN == 0
            assert node.start == node.parent.end and node.parent.children[node.edge[:TOKEN]] is node
            assert sorted(node.checkpoints) == list(self._claims.of(node.claim).positions)
            assert all(node.start < pos <= node.end for pos in node.checkpoints)
            assert node.users >= sum(child.users for child in node.children.values())
            assert node.evictable == (id(node) in leaves), f"a leaf of {node.start} to {node.end} is not in its heap"
            for one in node.checkpoints.values():
                assert one.node is node and id(one) in kept
