"""node: what the prefix tree is made of: nodes, checkpoints, keys, and what it needs of a memory's claims."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

TOKEN = 8  # bytes of a token in a key


def key_of(tokens: Iterable[int]) -> bytes:
    """The key of these token ids. Raises `OverflowError` for an id that does not fit 64 bits."""
    return array("q", tokens).tobytes()


class ClaimView(Protocol):
    """What the tree reads of a claim."""

    @property
    def positions(self) -> Sequence[int]:
        """Of the checkpoints, in order."""
        ...

    def whole(self, pos: int) -> int:
        """The last position up to `pos` at which the claim can be split: not inside a span that looked ahead."""
        ...


class ClaimStore(Protocol):
    """What the tree needs of a memory's claims (see `cache.claims`)."""

    def split(self, claim: int, pos: int) -> int:
        """The claim keeps what lies before `pos`; returns the number of a new one with the rest."""
        ...

    def join(self, claim: int, following: int) -> None: ...

    def drop(self, claim: int) -> None: ...

    def drop_checkpoint(self, claim: int, pos: int) -> None: ...

    def move_checkpoint(self, claim: int, pos: int, to: int) -> None:
        """Give a checkpoint of one claim to another one whose span has its position."""
        ...

    def of(self, claim: int) -> ClaimView: ...


@dataclass(eq=False, slots=True)
class Kept:
    """A checkpoint of a node: what resuming at `pos` needs beside the cells of the span."""

    node: "Node"
    pos: int
    hits: int = 1
    value: float = 0.0
    entry: int = 0


@dataclass(eq=False, slots=True)
class Node:
    """Tokens [start,end) of all sequences below it. A root has a namespace, but no claim and no edge."""

    parent: "Node | None"
    start: int
    edge: bytes
    claim: int = 0
    checkpoints: dict[int, Kept] = field(default_factory=dict[int, Kept])
    children: dict[bytes, "Node"] = field(default_factory=dict[bytes, "Node"])
    users: int = 0
    branches: int = 0  # how many requests have gone on from it, or from below it, in another way than those before
    value: float = 0.0
    entry: int = 0
    namespace: str = ""
    reused: bool = False  # whether a request has begun with its tokens

    @property
    def end(self) -> int:
        return self.start + len(self.edge) // TOKEN

    @property
    def evictable(self) -> bool:
        return not self.children and not self.users and self.parent is not None


class Match(NamedTuple):
    """What is in memory of a key. The first `matched` tokens are; a sequence of them can be assembled at `resume`,
    from the claims of `path`, the last of which has the position `resume` inside or at its end."""

    path: tuple[Node, ...]
    matched: int
    resume: int


def below(root: Node) -> Iterator[Node]:
    rest = list(root.children.values())
    while rest:
        node = rest.pop()
        yield node
        rest += node.children.values()


def common_prefix(a: Iterable[int], b: Iterable[int]) -> int:
    """How many tokens two sequences begin with together."""
    return common(key_of(a), key_of(b))


def common(edge: bytes, key: bytes) -> int:
    """How many tokens two keys begin with together."""
    low, high = 0, min(len(edge), len(key)) // TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        if edge.startswith(key[: middle * TOKEN]):
            low = middle
        else:
            high = middle - 1
    return low
