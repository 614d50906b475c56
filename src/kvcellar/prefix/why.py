"""why: the reason why a prompt found no more than it did in the prefix tree.

Always true:
  * `Evictions` has the last `KEPT` evictions, by what was evicted.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from kvcellar.events import Recall
from kvcellar.prefix.node import TOKEN, Node
from kvcellar.prefix.tree import Tree

KEPT = 4096
SHOWN = 8  # tokens on both sides of a divergence


@dataclass(frozen=True, slots=True)
class Eviction:
    at: float  # seconds of the clock
    cause: str


class Evictions:
    """Remembers what was evicted by a digest of its tokens up to the first one that went, and that one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, Eviction] = OrderedDict()
        self.cause = ""  # of evictions from now on

    def note(self, node: Node, pos: int) -> None:
        """The tokens of a node from `pos` on are about to be evicted."""
        edges: list[bytes] = [node.edge[: (pos + 1 - node.start) * TOKEN]]
        above = node
        while above.parent is not None and (above := above.parent).parent is not None:
            edges.append(above.edge)
        self._known[_digest(above.namespace, b"".join(reversed(edges)))] = Eviction(self._clock(), self.cause)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    def of(self, namespace: str, key: bytes, pos: int) -> Eviction | None:
        """When the token of a key at `pos` was evicted, which follows those that are there."""
        return self._known.get(_digest(namespace, key[: (pos + 1) * TOKEN]))

    def ago(self, eviction: Eviction) -> float:
        return self._clock() - eviction.at


def _digest(namespace: str, key: bytes) -> bytes:
    digest = blake2b(key, digest_size=16)
    digest.update(namespace.encode())
    return digest.digest()


def explained(
    tree: Tree,
    evictions: Evictions,
    namespace: str,
    key: bytes,
    *,
    matched: int,
    restored: int,
    stored: int,
    kinds: str,
) -> Recall:
    """The record of a prompt whose first `matched` tokens were there, and of which `restored` are used. `kinds` names
    the layers that can be resumed only at checkpoints."""
    most = len(key) // TOKEN - 1
    found = min(matched, most)

    def record(reason: str, detail: str, ours: tuple[int, ...] = (), theirs: tuple[int, ...] = ()) -> Recall:
        return Recall(most, found, restored, stored, reason, detail, ours, theirs)

    if restored == most:
        return record("complete", "all tokens but the last")
    if restored < found:
        return record("no checkpoint", f"{kinds} layers can resume at {restored}, not at {found}")
    if (eviction := evictions.of(namespace, key, matched)) is not None:
        return record("evicted", f"{evictions.ago(eviction):.0f} s ago, for {eviction.cause}")
    node, offset = tree.reached(namespace, key)
    theirs = _tokens(node.edge[offset * TOKEN : (offset + SHOWN) * TOKEN])
    if not theirs and node.children:
        theirs = _tokens(max(node.children.values(), key=lambda child: child.value).edge[: SHOWN * TOKEN])
    if theirs:
        ours = _tokens(key[matched * TOKEN : (matched + SHOWN) * TOKEN])
        return record("diverged", f"at token {matched} from what was computed before", ours, theirs)
    return record("new", "nothing that was computed before goes on from here")


def _tokens(edge: bytes) -> tuple[int, ...]:
    return tuple(memoryview(edge).cast("q"))
