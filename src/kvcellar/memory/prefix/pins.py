"""pins: what of the prefix tree is not evicted.

Always true:
  * a node is pinned if and only if a pin ends at it or below it; all nodes above a pinned one are pinned;
  * a checkpoint is pinned only at the end of a node at which a pin ends;
  * pinned tokens and checkpoints are at most those of `most`; `idle` counts those that no sequence uses.
"""

from dataclasses import replace

from kvcellar.memory.prefix.node import Match, Node
from kvcellar.memory.prefix.order import Order, Part


class Pins:
    """The pins of one tree."""

    def __init__(self, most: Part, order: Order) -> None:
        self._most, self._order = most, order
        self._ends: dict[int, Node] = {}  # by identity, the oldest first
        self.tokens = self.checkpoints = 0
        self.idle_tokens = self.idle_checkpoints = 0

    def __contains__(self, node: Node) -> bool:
        """Whether a pin ends at a node."""
        return id(node) in self._ends

    def fits(self, match: Match) -> bool:
        """Whether what was matched up to the position to resume at can be pinned, too."""
        last = match.path[-1]
        new = sum(min(node.end, match.resume) - node.start for node in match.path if not node.retention.pinned)
        kept = last.checkpoints.get(match.resume)
        points = kept is not None and not kept.pinned
        return _within(self.tokens + new, self._most.tokens) and (
            not points or _within(self.checkpoints + 1, self._most.checkpoints)
        )

    def add(self, node: Node) -> None:
        """Pin all tokens up to the end of a node, and its checkpoint there. They fit."""
        self._ends.setdefault(id(node), node)
        kept = node.checkpoints.get(node.end)
        if kept is not None and not kept.pinned:
            kept.pinned = True
            self.checkpoints += 1
            self.idle_checkpoints += not node.users
        above: Node | None = node
        while above is not None and above.parent is not None and not above.retention.pinned:
            self._change(above, pinned=True)
            above = above.parent

    def use(self, node: Node, *, idle: bool) -> None:
        """The first sequence begins to use a pinned node, or the last one has ended."""
        sign = 1 if idle else -1
        self.idle_tokens += sign * node.tokens
        if (kept := node.checkpoints.get(node.end)) is not None and kept.pinned:
            self.idle_checkpoints += sign

    def release_oldest(self) -> bool:
        """Unpin what was pinned first; False if nothing is pinned."""
        if not self._ends:
            return False
        self.release(next(iter(self._ends.values())))
        return True

    def release(self, node: Node) -> None:
        """Unpin what is pinned only because a pin ends at a node."""
        del self._ends[id(node)]
        if (kept := node.checkpoints.get(node.end)) is not None and kept.pinned:
            kept.pinned = False
            self.checkpoints -= 1
            self.idle_checkpoints -= not node.users
            self._order.enter_checkpoint(kept)
        above = node
        while above.parent is not None and above not in self and not _pinned_below(above):
            self._change(above, pinned=False)
            self._order.enter_leaf(above)
            above = above.parent

    def _change(self, node: Node, *, pinned: bool) -> None:
        sign = 1 if pinned else -1
        node.retention = replace(node.retention, pinned=pinned)
        self.tokens += sign * node.tokens
        if not node.users:
            self.idle_tokens += sign * node.tokens

    def check(self, nodes: list[Node]) -> None:
        """Assert what is always true, where `nodes` are all of the tree."""
        pinned = [node for node in nodes if node.retention.pinned]
        points = [kept for node in nodes for kept in node.checkpoints.values() if kept.pinned]
        assert all(node.retention.pinned == (node in self or _pinned_below(node)) for node in nodes)
        assert {id(node) for node in pinned} >= self._ends.keys()
        assert all(kept.node in self and kept.pos == kept.node.end for kept in points)
        assert self.tokens == sum(node.tokens for node in pinned)
        assert self.checkpoints == len(points)
        assert self.idle_tokens == sum(node.tokens for node in pinned if not node.users)
        assert self.idle_checkpoints == sum(not kept.node.users for kept in points)
        assert _within(self.tokens, self._most.tokens) and _within(self.checkpoints, self._most.checkpoints)


def _pinned_below(node: Node) -> bool:
    return any(child.retention.pinned for child in node.children.values())


def _within(number: int, most: int | None) -> bool:
    return most is None or number <= most
