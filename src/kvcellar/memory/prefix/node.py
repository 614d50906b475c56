"""node: what the prefix tree is made of: nodes, checkpoints, keys, and what it needs of a memory's claims; and what it
has of a key."""

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvcellar.memory.retention import DEFAULT, Retention
from kvcellar.memory.snapshot import ADAPTED, adapter_of, with_adapter
from kvcellar.memory.spans import ByPosition, reach_back

TOKEN = 8  # bytes of a token in a key
BLOCK = 512  # tokens that are compared first
EVERYONE = "\0"  # the namespace of what requests of all namespaces find


def everyone(namespace: str) -> str:
    """The namespace of what requests of all namespaces find that have the same adapter as this one."""
    return with_adapter(EVERYONE, adapter_of(namespace)) if namespace.startswith(ADAPTED) else EVERYONE


def key_of(tokens: Iterable[int]) -> bytes:
    """The key of these token ids. Raises `OverflowError` for an id that does not fit 64 bits."""
    return array("q", tokens).tobytes()


def ids_of(key: bytes | memoryview) -> Sequence[int]:
    """The token ids of a key, which are not copied."""
    return memoryview(key).cast("q")


class ClaimView(Protocol):
    """What the tree reads of a claim."""

    @property
    def positions(self) -> Sequence[int]:
        """Of the checkpoints, in order."""
        ...

    @property
    def tail(self) -> int:
        """The first position of which it has the cells of groups with windows, beside those of checkpoints."""
        ...

    def whole(self, pos: int) -> int:
        """The last position up to `pos` at which the claim can be split: not inside a span that looked ahead."""
        ...


class ClaimStore(Protocol):
    """What the tree needs of a memory's claims (see `memory.kv.claims`)."""

    def split(self, claim: int, pos: int) -> int:
        """The claim keeps what lies before `pos`; returns the number of a new one with the rest."""
        ...

    def join(self, claim: int, following: int) -> None: ...

    def drop(self, claim: int) -> None: ...

    def forget(self, claim: int, tokens: int) -> None:
        """Drop the first tokens of the tail of a claim, so many or all that it has."""
        ...

    def drop_checkpoint(self, claim: int, pos: int) -> None: ...

    def move_checkpoint(self, claim: int, pos: int, to: int) -> None:
        """Give a checkpoint of one claim to another one whose span has its position."""
        ...

    def of(self, claim: int) -> ClaimView: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Ranked:
    """What a heap has in order of `value`; `entry` is the number of its latest entry there."""

    value: float = 0.0
    entry: int = 0


@dataclass(eq=False, slots=True)
class Kept(Ranked):
    """A checkpoint of a node: what resuming at `pos` needs beside the cells of the span. A `spare` one is there in case
    a request diverges near it: it is not stored, and goes before others, until it was used."""

    node: "Node"
    pos: int
    hits: int = 1
    spare: bool = False
    pinned: bool = False  # a pin ends here: it is not evicted


@dataclass(eq=False, slots=True)
class Tail(Ranked):
    """The tail of a node's claim. `used` is when the node had been used last when its value was computed."""

    node: "Node"
    used: int = 0


@dataclass(eq=False, slots=True)
class Lease(Ranked):
    """When a node expires, in seconds of the wall clock, as an entry of a heap."""

    node: "Node"


@dataclass(eq=False, slots=True)
class Use:
    """When something was last used: its tokens by a request, number `at`. `age` is the number of its span of ages."""

    at: int
    first: int  # request that used it first
    before: int = 0  # how often it was used before
    kind: int = 0  # its class
    age: int = 0
    returned: bool = False  # it was used once more
    leaf: "Node | None" = None  # the last node of this use that could be evicted
    lost: Hashable = None  # what tells the tokens that were evicted since, if any


@dataclass(slots=True)
class NodeBlocks:
    """The hashes of the blocks (see `blocks`) that end in the tokens of a node, and in which epoch they were last
    published; -1: never."""

    hashes: "array[int]"
    epoch: int = -1


@dataclass(eq=False, slots=True)
class Node(Ranked):
    """Tokens [start,end) of all sequences below it. A root has a namespace, but no claim and no edge."""

    parent: "Node | None"
    start: int
    edge: bytes
    claim: int = 0
    checkpoints: ByPosition[Kept] = field(default_factory=ByPosition[Kept])
    children: dict[bytes, "Node"] = field(default_factory=dict[bytes, "Node"])
    users: int = 0
    namespace: str = ""
    use: Use | None = None  # the last one; of a root None
    retention: Retention = DEFAULT
    lease: Lease | None = None
    tail: Tail | None = None  # if its claim has one
    hashed: blake2b | None = None  # the state of `path_digest` at the end, where it was needed
    blocks: NodeBlocks | None = None  # where the tree is watched by one that publishes blocks

    @property
    def end(self) -> int:
        return self.start + len(self.edge) // TOKEN

    @property
    def evictable(self) -> bool:
        return self.idle and not self.retention.pinned and self.parent is not None

    @property
    def idle(self) -> bool:
        """Whether it is a leaf that no sequence uses."""
        return not self.children and not self.users

    @property
    def tokens(self) -> int:
        return len(self.edge) // TOKEN


class Watch(Protocol):
    """Is told what a tree has of tokens, whatever the reason."""

    def gained(self, node: Node, start: int) -> None:
        """A node has its tokens from `start` on, which it did not have."""
        ...

    def lost(self, node: Node, start: int) -> None:
        """A node is about to lose its tokens from `start` on."""
        ...

    def parted(self, above: Node, node: Node) -> None:
        """The first tokens of a node are those of a new one above it."""
        ...

    def joined(self, node: Node, child: Node) -> None:
        """The only child of a node is about to get its tokens."""
        ...


class Reuse(NamedTuple):
    """What memory has of the tokens of a sequence to come: its first `resume` tokens need not be computed, and of these
    running sequences hold the first `shared`."""

    resume: int
    shared: int


class Match(NamedTuple):
    """What is in memory of a key. The first `matched` tokens are; a sequence of them can be assembled at `resume`,
    from the claims of `path`, the last of which has the position `resume` inside or at its end."""

    path: tuple[Node, ...]
    matched: int
    resume: int


class Lookup:
    """What a tree has of a key; changes nothing. Nothing that has expired is matched. `anywhere`: a sequence can be
    resumed at any position, without a checkpoint. Else, with `lowest`, where tails have the cells from `lowest` of the
    position on."""

    def __init__(
        self,
        claims: ClaimStore,
        *,
        anywhere: bool,
        clock: Callable[[], float],
        lowest: Callable[[int], int] | None = None,
    ) -> None:
        self._claims, self._anywhere, self._lowest, self._now = claims, anywhere, lowest, clock
        self._roots: dict[str, Node] = {}

    def root(self, namespace: str) -> Node:
        """The root of the sequences of a namespace. A match never leaves it."""
        return self._roots.setdefault(namespace, Node(None, 0, b"", namespace=namespace))

    def peek(self, namespace: str) -> Node:
        """The same for looking only: a namespace without tokens does not become known."""
        return self._roots.get(namespace) or Node(None, 0, b"", namespace=namespace)

    def match(self, root: Node, key: bytes, most: int, *, tails: bool = True) -> Match:
        """What is in memory of `key`, to be resumed at position `most` at the latest; without `tails` only where a
        checkpoint is, if one is needed. Changes nothing."""
        path, matched = self._walk(root, key)
        limit, resume = min(matched, most), 0
        while path and not (resume := self._resume(path[-1], min(limit, path[-1].end), tails=tails)):
            path.pop()
        return Match(tuple(path), matched, resume)

    def _resume(self, node: Node, limit: int, *, tails: bool) -> int:
        """The last position of a node up to `limit` where a sequence can be resumed; 0: there is none."""
        if limit <= node.start:
            return 0
        pos = self._claims.of(node.claim).whole(limit)  # a span that looked ahead may begin with the node
        if pos > node.start and (self._anywhere or (tails and self.resumes(node, pos))):
            return pos
        return node.checkpoints.last(limit)

    def resumes(self, node: Node, pos: int) -> bool:
        """Whether a sequence can be resumed at a position of a node without a checkpoint. Costs the nodes that the next
        token sees in windows."""
        if self._anywhere or self._lowest is None:
            return self._anywhere
        lowest = self._lowest(pos)
        tails = ((one.start, self._claims.of(one.claim).tail) for one in upwards(node))
        return lowest == pos or reach_back(lowest, tails)

    def reached(self, namespace: str, key: bytes) -> tuple[Node, int]:
        """The last node that has tokens of a key, and how many of its own; the root, and 0, if there is none."""
        path, matched = self._walk(self.peek(namespace), key)
        return (path[-1], matched - path[-1].start) if path else (self.peek(namespace), 0)

    def node_at(self, namespace: str, key: bytes, pos: int) -> Node | None:
        """The node that has the token of a key at `pos`, and those before it; None if there is none."""
        path, matched = self._walk(self.peek(namespace), key)
        return next((node for node in path if node.start <= pos < min(node.end, matched)), None)

    def _walk(self, root: Node, key: bytes, *, expired: bool = False) -> tuple[list[Node], int]:
        """The nodes below `root` that hold a prefix of `key`, the last one perhaps only with a part of its edge, and
        how many tokens of the key they hold together. Nodes that have expired only if `expired` is true."""
        path: list[Node] = []
        node, at, now = root, 0, -1.0 if expired else self._now()
        while (child := node.children.get(key[at : at + TOKEN])) is not None and (
            (expires := child.retention.expires) is None or expires > now
        ):
            path.append(child)
            if not key.startswith(child.edge, at):
                return path, child.start + common(child.edge, key[at : at + len(child.edge)])
            at += len(child.edge)
            node = child
        return path, at // TOKEN

    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """All but the roots, parents before children."""
        return below(child for root in self._roots.values() for child in root.children.values())


def below(nodes: Iterable[Node]) -> Iterator[Node]:
    """Nodes and those below them, parents before children. The tree may change between two of them: what was removed
    is passed, and children are those that a node has when it was passed. Each costs the same, but for a copy of its
    references to children."""
    rest = [iter(list(nodes))]
    while rest:
        if (node := next(rest[-1], None)) is None:
            rest.pop()
            continue
        yield node
        if node.children:
            rest.append(iter(list(node.children.values())))


def upwards(node: Node | None) -> Iterator[Node]:
    """A node and those above it, but for the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def path_digest(node: Node, end: int) -> bytes:
    """What tells the first `end` tokens of a node's path, which end in the node, from all others. Costs as
    `path_state`."""
    return path_state(node, end).digest()


def path_state(node: Node, end: int) -> blake2b:
    """The state of a digest after the first `end` tokens of a node's path, which end in the node or where it begins.
    Costs the tokens of the node, and those above it that were not hashed before."""
    assert node.parent is not None, "a root has no tokens"
    digest = _hashed(node.parent).copy()
    digest.update(memoryview(node.edge)[: (end - node.start) * TOKEN])
    return digest


def _hashed(node: Node) -> blake2b:
    """The state after the tokens up to the end of a node, which keeps it."""
    path: list[Node] = []
    while node.hashed is None and node.parent is not None:
        path.append(node)
        node = node.parent
    state = node.hashed = node.hashed or digest_begun(node.namespace)
    for one in reversed(path):
        state = state.copy()
        state.update(one.edge)
        one.hashed = state
    return state


def digest_begun(namespace: str) -> blake2b:
    """The state of a digest before the first token."""
    digest = blake2b(digest_size=16)
    digest.update(blake2b(namespace.encode(), digest_size=16).digest())
    return digest


def path_key(node: Node, end: int, start: int = 0) -> bytes:
    """The key of the tokens [start,end) of a node's path, which end in the node. Costs these tokens."""
    parts: list[bytes] = []
    for one in upwards(node):
        if start < end:
            parts.append(one.edge[max(0, start - one.start) * TOKEN : (end - one.start) * TOKEN])
        if start >= one.start:
            break
        end = min(end, one.start)
    return b"".join(reversed(parts))


def common_prefix(a: Iterable[int], b: Iterable[int]) -> int:
    """How many tokens two sequences begin with together."""
    return common(key_of(a), key_of(b))


def common(edge: bytes, key: bytes) -> int:
    """How many tokens two keys begin with together. Compares and copies about these, in a logarithm of steps."""
    low, size, most = 0, BLOCK, min(len(edge), len(key)) // TOKEN
    while low < most and edge.startswith(key[low * TOKEN : (low + size) * TOKEN], low * TOKEN):
        low, size = low + size, 2 * size
    low, high = min(low, most), min(low + size, most)
    while low < high:
        middle = (low + high + 1) // 2
        if edge.startswith(key[low * TOKEN : middle * TOKEN], low * TOKEN):
            low = middle
        else:
            high = middle - 1
    return low
