"""turns: the prompts of chats by their text, with the tokens that they had, and the replies to them.

The texts of a namespace are a compressed trie of characters. A node where a prompt ends has a `PromptTurn`. The tokens
of a turn follow those of the turn that it continues, its `parent`: a conversation is in memory once.

Always true:
  * a turn was used no later than the turn that it continues: what is evicted is never continued by another one;
  * each turn is the turn of one node, and each leaf of a trie has a turn;
  * the texts, tokens and replies of all turns take at most `most` bytes; a character counts as 4, a token as 4,
    or 8 where there are images.

Not safe to use from several threads at once.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from kvcellar.events import Rewrite
from kvcellar.text.conversation import common

TURN_BYTES = 2000  # of a turn and the nodes of its text, beside characters and tokens
REPLY_BYTES = 200
REPLIES = 8  # to one prompt


def packed(ids: Sequence[int]) -> "array[int]":
    """In 4 bytes each; in 8 where there are rows of images."""
    try:
        return array("I", ids)
    except OverflowError:
        return array("Q", ids)


def unpacked(content: bytes, *, wide: bool = False) -> "array[int]":
    """`wide`: with rows of images. Raises `ValueError`."""
    found = array("Q" if wide else "I")
    found.frombytes(content)
    return found


@dataclass(eq=False, slots=True)
class Node:
    """Characters that follow those of `parent`. A root has none, and the name of its namespace."""

    parent: "Node | None"
    edge: str
    namespace: str
    children: dict[str, "Node"] = field(default_factory=dict[str, "Node"])  # by first character
    turn: "PromptTurn | None" = None

    def text(self) -> str:
        edges: list[str] = []
        node: Node | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return "".join(reversed(edges))


@dataclass(eq=False, slots=True)
class PromptTurn:
    """A prompt of `end` characters and `count` tokens. `said` are digests of its messages, `marks` the positions in its
    text at which control tokens are plain text (see `conversation`), and `borders` those of its tokens where messages
    begin."""

    node: Node
    parent: "PromptTurn | None"
    ids: "array[int]"  # that follow those of the parent
    end: int
    count: int
    marks: tuple[int, ...]
    said: tuple[bytes, ...]
    prompt: bytes  # key of its tokens
    history: bytes  # key of its messages
    borders: tuple[int, ...] = ()
    replies: tuple["array[int]", ...] = ()  # the newest last
    continued: int = 0  # turns whose parent it is
    images: tuple[tuple[int, int], ...] = ()  # of each, message and number in it, when the prompt was last rendered
    rewrite: Rewrite | None = None  # found then

    def all_ids(self) -> list[int]:
        parts: list[array[int]] = []
        turn: PromptTurn | None = self
        while turn is not None:
            parts.append(turn.ids)
            turn = turn.parent
        return [token for part in reversed(parts) for token in part]

    @property
    def size(self) -> int:
        replies = sum(REPLY_BYTES + 4 * len(reply) for reply in self.replies)
        ids = self.ids.itemsize * len(self.ids)
        return (
            TURN_BYTES
            + ids
            + 8 * (len(self.marks) + len(self.borders) + 2 * len(self.images))
            + 48 * len(self.said)
            + replies
        )


class Walk(NamedTuple):
    """The turns whose texts a text begins with, shortest first, and the last node that has some of its characters."""

    turns: list[PromptTurn]
    node: Node


class Turns:
    """The turns of all namespaces."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._roots: dict[str, Node] = {}
        self._used: OrderedDict[PromptTurn, None] = OrderedDict()  # the longest unused first
        self._by_prompt: dict[bytes, PromptTurn] = {}
        self._by_history: dict[bytes, PromptTurn] = {}

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, turn: PromptTurn) -> bool:
        return turn in self._used

    def walk(self, namespace: str, text: str) -> Walk:
        turns: list[PromptTurn] = []
        node, at = self._roots.get(namespace) or Node(None, "", namespace), 0
        while (child := node.children.get(text[at : at + 1])) is not None:
            node = child
            if not text.startswith(node.edge, at):
                break
            at += len(node.edge)
            if node.turn is not None:
                turns.append(node.turn)
        return Walk(turns, node)

    def below(self, node: Node) -> PromptTurn | None:
        """A turn whose text begins with that of `node`, and that no longer text begins with."""
        while node.children:
            node = next(reversed(node.children.values()))
        return node.turn

    def of_prompt(self, key: bytes) -> PromptTurn | None:
        """The turn whose prompt has this key (`prompt_key`)."""
        return self._by_prompt.get(key)

    def of_history(self, key: bytes) -> PromptTurn | None:
        return self._by_history.get(key)

    def add(
        self,
        namespace: str,
        text: str,
        ids: Sequence[int],
        *,
        parent: PromptTurn | None,
        marks: tuple[int, ...],
        said: tuple[bytes, ...],
        history: bytes,
        borders: tuple[int, ...] = (),
        images: tuple[tuple[int, int], ...] = (),
    ) -> PromptTurn:
        """Know a prompt of the tokens `ids`, of which the first are those of `parent`; returns its turn. Its text may
        have a turn already, which stays if another one continues it, or if it is the same."""
        node = self._node(namespace, text)
        before, key = node.turn, prompt_key(namespace, ids)
        if before is not None:
            if before.prompt == key or before.continued:
                before.images = images  # as many as it had
                self._use(before)
                return before
            node.turn = None
            self._forget(before)
        new = packed(ids[parent.count if parent is not None else 0 :])
        turn = PromptTurn(node, parent, new, len(text), len(ids), marks, said, key, history, borders, images=images)
        node.turn = turn
        if parent is not None:
            parent.continued += 1
        self.bytes += turn.size
        self._used[turn] = None
        self._by_prompt[key] = self._by_history[history] = turn
        self._use(turn)
        while self.bytes > self.most:
            self._evict()
        return turn

    def reply(self, turn: PromptTurn, ids: Sequence[int]) -> None:
        """Know the tokens of a reply to a prompt."""
        reply = packed(ids)
        if turn not in self._used or not reply:
            return
        self.bytes -= turn.size
        turn.replies = (*(other for other in turn.replies if other != reply), reply)[-REPLIES:]
        self.bytes += turn.size
        self._use(turn)
        while self.bytes > self.most:
            self._evict()

    def clear(self) -> None:
        while self._used:
            self._evict()

    def _use(self, turn: PromptTurn | None) -> None:
        while turn is not None:
            self._used.move_to_end(turn)
            turn = turn.parent

    def _evict(self) -> None:
        turn = next(iter(self._used))
        turn.node.turn = None
        self._forget(turn)
        self._prune(turn.node)

    def _forget(self, turn: PromptTurn) -> None:
        del self._used[turn]
        if turn.parent is not None:
            turn.parent.continued -= 1
        self.bytes -= turn.size
        for keys, key in ((self._by_prompt, turn.prompt), (self._by_history, turn.history)):
            if keys.get(key) is turn:
                del keys[key]

    # -- the trie -----------------------------------------------------------------------------------------------

    def _node(self, namespace: str, text: str) -> Node:
        """The node where a text ends, which is made if there is none."""
        node, at = self._roots.setdefault(namespace, Node(None, "", namespace)), 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = Node(node, text[at:], namespace)
                self.bytes += 4 * len(child.edge)
            elif not text.startswith(child.edge, at):
                child = self._split(child, common(child.edge, text, at))
            node = child
            at += len(node.edge)
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Part a node after `length` characters; returns the new node above it."""
        assert node.parent is not None
        above = Node(node.parent, node.edge[:length], node.namespace)
        node.parent.children[node.edge[0]] = above
        node.parent, node.edge = above, node.edge[length:]
        above.children[node.edge[0]] = node
        return above

    def _prune(self, node: Node) -> None:
        """Remove what no turn needs, and join nodes that need no longer be apart."""
        while node.parent is not None and not node.children and node.turn is None:
            del node.parent.children[node.edge[0]]
            self.bytes -= 4 * len(node.edge)
            node = node.parent
        if node.parent is None:
            if not node.children and node.turn is None:
                self._roots.pop(node.namespace, None)
        elif node.turn is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.parent, child.edge = node.parent, node.edge + child.edge
            node.parent.children[child.edge[0]] = child

    def check(self) -> None:
        """Assert what is always true."""
        chars, found = 0, set[PromptTurn]()
        for node in self._nodes():
            chars += len(node.edge)
            assert node.parent is None or node.parent.children[node.edge[0]] is node
            assert node.children or node.turn is not None, "a leaf has no turn"
            if node.turn is not None:
                found.add(node.turn)
                assert node.turn.node is node and node.turn.end == len(node.text())
        assert found == set(self._used)
        assert self.bytes == 4 * chars + sum(turn.size for turn in found) <= self.most
        age = {turn: number for number, turn in enumerate(self._used)}
        for turn in self._used:
            assert turn.parent is None or age[turn.parent] > age[turn], "a turn is older than one that continues it"
            assert turn.count == len(turn.ids) + (turn.parent.count if turn.parent is not None else 0)
            assert turn.continued == sum(other.parent is turn for other in found)
        assert set(self._by_prompt.values()) | set(self._by_history.values()) <= found

    def _nodes(self) -> Iterator[Node]:
        rest = list(self._roots.values())
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()


def prompt_key(namespace: str, ids: Sequence[int]) -> bytes:
    digest = blake2b(packed(ids), digest_size=16)
    digest.update(namespace.encode())
    return digest.digest()
