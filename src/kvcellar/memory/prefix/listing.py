"""listing: the entries of a prefix tree, in slices, so that a long list does not delay requests.

    walk = Walk(tree)
    while not walk.over:
        some = walk.next(512)              # each call between two steps

Every entry is listed as it is when its turn comes. What is split, joined or removed between two slices is listed once
at most.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from kvcellar.memory.prefix.node import TOKEN, Node, digest_begun, path_key
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefix.why import NAME
from kvcellar.memory.snapshot import adapter_of, requested

SHOWN = 16  # tokens of an entry
BYTES = 1 << 20  # of tokens that one slice reads


class Listed(NamedTuple):
    """The tokens [start,end) of all sequences below an entry. `name` is as in `why.name_of`; `parent` is "" at the
    beginning of a text. `tokens` are the first `SHOWN` ones."""

    namespace: str
    name: str
    parent: str
    start: int
    end: int
    tokens: tuple[int, ...]
    checkpoints: tuple[int, ...]
    users: int  # running sequences
    reused: bool
    value: float
    leaf: bool
    pinned: bool
    expires: float | None  # seconds of the wall clock
    owner: str
    adapter: str  # the digest of the one that it was computed with; "": none


class _Place(NamedTuple):
    """A node that is to be listed from a position on; `before` has digested all tokens before that."""

    namespace: str
    parent: str
    node: Node
    start: int
    before: "blake2b"


class Walk:
    def __init__(self, tree: Tree, namespace: str | None = None) -> None:
        """Of what requests of one namespace have computed, or of all."""
        self.tree = tree
        roots = [root for root in tree.roots() if namespace is None or requested(root.namespace) == namespace]
        begun = (_places(one.namespace, "", one, digest_begun(one.namespace)) for one in roots)
        self._rest: list[Iterator[_Place]] = [chain.from_iterable(begun)]

    @property
    def over(self) -> bool:
        """Has `next` returned the last entry?"""
        return not self._rest

    def end(self) -> list[tuple[Listed, Node]]:
        """Leave out the rest."""
        self._rest.clear()
        return []

    def next(self, most: int) -> list[tuple[Listed, Node]]:
        """The next entries: those of up to `most` nodes, and of about `BYTES` of tokens. Costs these, and a copy of the
        references to the children of each node."""
        found: list[tuple[Listed, Node]] = []
        left = BYTES
        while self._rest and most > 0 and left > 0:
            if (place := next(self._rest[-1], None)) is None:
                self._rest.pop()
                continue
            edge = path_key(place.node, place.node.end, place.start)  # empty if it is not in the tree any more
            most, left = most - 1, left - len(edge)
            if edge:
                found.append((self._listed(place, edge), place.node))
        return found

    def _listed(self, place: _Place, edge: bytes) -> Listed:
        node = place.node
        naming = place.before.copy()
        naming.update(edge[:TOKEN])
        name = naming.digest()[:NAME].hex()
        if node.children:
            whole = place.before.copy()
            whole.update(edge)
            self._rest.append(_places(place.namespace, name, node, whole))
        tokens = tuple(memoryview(edge[: SHOWN * TOKEN]).cast("q"))
        places = tuple(node.checkpoints)
        return Listed(
            *(requested(place.namespace), name, place.parent, place.start, node.end, tokens, places),
            *(node.users, node.use is not None and node.use.before > 0, node.value, not node.children),
            *(node.retention.pinned, node.retention.expires, node.retention.owner),
            adapter_of(place.namespace),
        )


def _places(namespace: str, name: str, node: Node, before: "blake2b") -> Iterator[_Place]:
    """Of the children of a node of this name."""
    return (_Place(namespace, name, child, node.end, before) for child in list(node.children.values()))
