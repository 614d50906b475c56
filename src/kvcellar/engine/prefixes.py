"""prefixes: what running sequences take from the prefix tree of a memory, and what they give it.

Always true:
  * a sequence has locked the node of the tree that its published tokens end in, for as long as it runs;
  * the tree has no tokens behind the start of what a sequence has derived from text that was removed.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcellar.cache.memory import Memory
from kvcellar.prefix.node import TOKEN, Node, key_of
from kvcellar.prefix.tree import Tree
from kvcellar.spans import Span

EVERY = 256  # tokens between checkpoints inside a prompt, where resuming needs one


@dataclass(eq=False, slots=True)
class Prefix:
    """What one running sequence has of the tree. `matched` tokens of its prompt were there, `restored` are in memory
    because of that; the tree has the first `published` of its tokens. `wanted` are positions where it will leave
    checkpoints, in order."""

    root: Node
    key: bytes
    node: Node
    matched: int
    restored: int
    published: int
    wanted: list[int]


class Prefixes:
    """The prefix tree of one memory."""

    def __init__(self, memory: Memory, *, every: int = EVERY) -> None:
        self._memory, self._every = memory, every
        groups = memory.storage.groups
        self._bounded = {group.name for group in groups if group.bounded}
        self.anywhere = not self._bounded and memory.rows.capacity is None
        self.tree = Tree(memory.claims, anywhere=self.anywhere)

    # -- a sequence ---------------------------------------------------------------------------------------------

    def restorable(self, namespace: str, tokens: Sequence[int]) -> int:
        """How many of these tokens `restore` would find in memory now. Changes nothing."""
        return self.tree.match(self.tree.peek(namespace), key_of(tokens), len(tokens) - 1).resume

    def restore(self, seq: int, namespace: str, tokens: Sequence[int], marks: Iterable[int] = ()) -> Prefix:
        """Begin the new sequence `seq` with what the tree has of `tokens`; at least one of them stays to be read.

        `marks` are positions that later requests may resume at, such as the borders of messages.
        """
        key, root = key_of(tokens), self.tree.root(namespace)
        match = self.tree.match(root, key, len(tokens) - 1)
        if match.resume:
            self._memory.claims.assemble(seq, [node.claim for node in match.path], match.resume)
        self.tree.touch(match)
        node = self.tree.lock(root, match)
        wanted = [] if self.anywhere else self._wanted(len(tokens), match.matched, marks)
        del wanted[: bisect_right(wanted, match.resume)]
        return Prefix(root, key, node, match.matched, match.resume, match.resume, wanted)

    def _wanted(self, length: int, matched: int, marks: Iterable[int]) -> list[int]:
        """Where a prompt leaves checkpoints: every so many tokens, where it parts from what is known, at its marks, and
        before its last token, where the same prompt resumes."""
        positions = {*range(self._every, length, self._every), matched, *marks, length - 1}
        return sorted(pos for pos in positions if 0 < pos < length)

    def checkpoints(self, prefix: Prefix, new: Span) -> tuple[int, ...]:
        """Where a step that reads the tokens `new` leaves checkpoints."""
        wanted = prefix.wanted
        return tuple(wanted[bisect_right(wanted, new.start) : bisect_right(wanted, new.end)])

    def publish(self, seq: int, prefix: Prefix, tokens: Sequence[int], end: int, claim: int | None = None) -> None:
        """Give the tree the first `end` tokens of a sequence, which are all that are in memory. `claim` is what a step
        has left of the last of them; else one is made, so that the sequence can be resumed at its end."""
        if claim is not None:
            start = self._memory.claims.of(claim).span.start
        elif (start := self._unpublished(prefix, end)) < end:
            claim = self._memory.claims.make(seq, Span(start, end), () if self.anywhere else (end,))
        else:
            return
        if len(prefix.key) < end * TOKEN:
            prefix.key += key_of(tokens[len(prefix.key) // TOKEN : end])
        prefix.node, known = self.tree.insert(prefix.root, prefix.key[: end * TOKEN], claim, start, prefix.node)
        prefix.published = end
        del prefix.wanted[: bisect_right(prefix.wanted, end)]
        if known > start:
            self._share(seq, prefix.node, Span(start, known))

    def _unpublished(self, prefix: Prefix, end: int) -> int:
        """Where a claim begins that gives the tree what it lacks of the first `end` tokens: those behind the published
        ones, or no more than the last token, where only a checkpoint is missing."""
        node = prefix.node
        if self.anywhere or prefix.published < end or node.end != end or end in node.checkpoints or not end:
            return prefix.published
        return self._memory.claims.of(node.claim).whole(end - 1) if node.start < end - 1 else node.start

    def _share(self, seq: int, node: Node, computed: Span) -> None:
        """What a sequence has computed that was in the tree: hold the tree's cells instead."""
        above: Node | None = node
        while above is not None and above.end > computed.start:
            if above.start < computed.end and above.parent is not None:
                self._memory.claims.share_with(seq, above.claim)
            above = above.parent

    def release(self, prefix: Prefix) -> None:
        """The sequence is over."""
        self.tree.unlock(prefix.node)

    # -- memory -------------------------------------------------------------------------------------------------

    def evict(self, group: str | None, tokens: int) -> bool:
        """Free cells of a group, or, without one, rows of state, of what no sequence uses; False if nothing is left
        that could free any. More or fewer than `tokens` may become free."""
        if group is None or group in self._bounded:
            return self.tree.evict_checkpoint() is not None
        return self.tree.evict_leaf(max(tokens, 1)) > 0

    def clear(self) -> None:
        """Forget everything that no sequence uses."""
        while self.tree.evict_checkpoint() is not None or self.tree.evict_leaf(1 << 40):
            pass

    def check(self, running: Iterable[Prefix]) -> None:
        """Assert what is always true, where `running` are the prefixes of all sequences."""
        self.tree.check()
        locks: dict[int, int] = {}
        for prefix in running:
            above: Node | None = prefix.node
            while above is not None:
                locks[id(above)] = locks.get(id(above), 0) + 1
                above = above.parent
        assert all(node.users == locks.get(id(node), 0) for node in self.tree.nodes())
        claims = [node.claim for node in self.tree.nodes()]
        assert sorted(claims) == sorted(self._memory.claims), "a claim is in no node of the tree"
