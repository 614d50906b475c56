"""why: the reason why a prompt found no more than it did in the prefix tree.

Always true:
  * `Losses` has the last `KEPT` losses, by what was lost;
  * `Sightings` has at most `SEEN` beginnings, and for each at most two namespaces; texts of different owners are never
    compared.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Literal, NamedTuple

from kvcellar.events import Recall
from kvcellar.prefix.node import TOKEN, Node, digest_of, path_digest
from kvcellar.prefix.tree import Tree
from kvcellar.snapshot import requested

KEPT = 4096
SEEN, LEAST = 16384, 64  # beginnings; tokens of the shortest
SHOWN = 16  # tokens on both sides of a divergence
LOOKED_AT = 8  # nodes that go on in another way, of any number
NAME = 6  # bytes of an entry's name


@dataclass(frozen=True, slots=True)
class Loss:
    """What was lost, and when: in seconds of the clock."""

    at: float
    kind: Literal["evicted", "damaged"]
    cause: str


class Losses:
    """Remembers what was lost by a digest of its tokens up to the first one that went, and that one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, Loss] = OrderedDict()
        self.cause = ""  # of evictions from now on

    def evicted(self, node: Node, pos: int) -> None:
        """The tokens of a node from `pos` on are about to be evicted."""
        self._note(path_digest(node, pos + 1), "evicted", self.cause)

    def damaged(self, namespace: str, key: bytes, pos: int, cause: str) -> None:
        """The tokens of a key from `pos` on could not be read back."""
        self._note(digest_of(namespace, key[: (pos + 1) * TOKEN]), "damaged", cause)

    def _note(self, digest: bytes, kind: Literal["evicted", "damaged"], cause: str) -> None:
        self._known.pop(digest, None)
        self._known[digest] = Loss(self._clock(), kind, cause)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    def of(self, namespace: str, key: bytes, pos: int) -> Loss | None:
        """When the token of a key at `pos` was lost, which follows those that are there."""
        return self._known.get(digest_of(namespace, key[: (pos + 1) * TOKEN]))

    def ago(self, loss: Loss) -> float:
        return self._clock() - loss.at


class Sightings:
    """In which namespaces the beginnings of texts have been seen, by digests.

    A text is known by its first 64 tokens, its first 128, its first 256 and so on: whether one with the same beginning
    was seen elsewhere is then known without its tokens, to within a factor of two of their number.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def note(self, owner: str, namespace: str, key: bytes) -> None:
        """A text of an owner is in a namespace now."""
        for _, digest in _beginnings(owner, key):
            there = self._known.pop(digest, ())
            self._known[digest] = there if namespace in there else (namespace, *there)[:2]
        while len(self._known) > SEEN:
            self._known.popitem(last=False)

    def elsewhere(self, owner: str, namespace: str, key: bytes, *, adapters: bool = False) -> int:
        """How many of its first tokens, at least, a text has in common with one of the same owner in another
        namespace, or, with `adapters`, in the same one with another adapter."""
        found = 0
        for tokens, digest in _beginnings(owner, key):
            others = [one for one in self._known.get(digest, ()) if one != namespace]
            if any((requested(one) == requested(namespace)) == adapters for one in others):
                found = tokens
        return found


def _beginnings(owner: str, key: bytes) -> Iterator[tuple[int, bytes]]:
    digest, done, tokens = blake2b(owner.encode(), digest_size=16), 0, LEAST
    view = memoryview(key)
    while tokens * TOKEN <= len(key):
        digest.update(view[done : tokens * TOKEN])
        yield tokens, digest.digest()
        done, tokens = tokens * TOKEN, tokens * 2


class ReadBack(NamedTuple):
    """What was read back for a prompt: tokens by tier, and the seconds that it took. Why tokens that a tier has were
    not: `skipped` says that computing them is faster, `unavailable` that the tier could not be used; else ""."""

    tokens: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    skipped: str = ""
    unavailable: str = ""


class Elsewhere(NamedTuple):
    """Where else the beginnings of texts were seen: `owners` of namespaces in this memory, `namespaces` of stored
    memory of other weights. `owner` is that of the prompt, `identity` that of this memory."""

    owners: Sightings
    namespaces: Sightings
    owner: str = ""
    identity: str = ""


def explained(
    tree: Tree,
    losses: Losses,
    namespace: str,
    key: bytes,
    *,
    matched: int,
    restored: int,
    read: ReadBack,
    kinds: str,
    elsewhere: Elsewhere,
) -> Recall:
    """The record of a prompt whose first `matched` tokens were there, and of which `restored` are used. `kinds` names
    the layers that can be resumed only at checkpoints."""
    most = len(key) // TOKEN - 1
    found = min(matched, most)
    salted = elsewhere.owners.elsewhere(elsewhere.owner, namespace, key)
    salted = salted if salted > found else 0

    def record(
        reason: str, detail: str, entry: str = "", ours: tuple[int, ...] = (), theirs: tuple[int, ...] = ()
    ) -> Recall:
        sources = _sources(restored, read)
        return Recall(most, found, restored, sources, read.seconds, reason, detail, entry, ours, theirs, salted)

    if restored == most:
        return record("complete", "all tokens but the last")
    if read.skipped:
        return record("cheaper to recompute", read.skipped)
    if read.unavailable:
        return record("tier unavailable", read.unavailable)
    if restored < found:
        return record("no checkpoint", f"{kinds} layers can resume at {restored}, not at {found}")
    if (loss := losses.of(namespace, key, matched)) is not None:
        return record(
            loss.kind, f"{losses.ago(loss):.0f} s ago{', for ' if loss.kind == 'evicted' else ': '}{loss.cause}"
        )
    if (tokens := elsewhere.namespaces.elsewhere(namespace, elsewhere.identity, key)) > found:
        detail = f"at least {tokens} tokens are stored by other weights, settings or versions, which cannot be used"
        return record("other weights", detail)
    if (tokens := elsewhere.owners.elsewhere(elsewhere.owner, namespace, key, adapters=True)) > found:
        detail = f"at least {tokens} tokens were computed with another adapter, or without one, and cannot be used"
        return record("other adapter", detail)
    if (other := _diverging(tree, namespace, key)) is not None:
        entry, theirs = other
        ours = _tokens(key[matched * TOKEN : (matched + SHOWN) * TOKEN])
        return record("diverged", f"at token {matched} from what was computed before", entry, ours, theirs)
    return record("new", "nothing that was computed before goes on from here")


def _sources(restored: int, read: ReadBack) -> tuple[tuple[str, int], ...]:
    """Restored tokens by tier: what was read back lies behind what the device had."""
    found: list[tuple[str, int]] = []
    left = restored
    for tier, tokens in reversed(read.tokens):
        if (n := min(tokens, left)) > 0:
            found.append((tier, n))
            left -= n
    return (*((("device", left),) if left else ()), *reversed(found))


def _diverging(tree: Tree, namespace: str, key: bytes) -> tuple[str, tuple[int, ...]] | None:
    """The name of the entry that goes on in another way than a key where the tree ends for it, and its next tokens."""
    node, offset = tree.reached(namespace, key)
    if offset * TOKEN < len(node.edge):
        return name_of(node), _tokens(node.edge[offset * TOKEN : (offset + SHOWN) * TOKEN])
    if not node.children:
        return None
    child = max(islice(node.children.values(), LOOKED_AT), key=lambda child: child.value)
    return name_of(child), _tokens(child.edge[: SHOWN * TOKEN])


def name_of(node: Node) -> str:
    """The name of a node: it stays the same while the node grows, is cut and is split (the upper part keeps it)."""
    return path_digest(node, node.start + 1)[:NAME].hex()


def named(namespace: str, key: bytes) -> str:
    """The name of the node whose first token is the last one of a key."""
    return digest_of(namespace, key)[:NAME].hex()


def path_key(node: Node, end: int) -> bytes:
    """The key of the first `end` tokens of a node's path, which end in the node."""
    edges: list[bytes] = [node.edge[: (end - node.start) * TOKEN]]
    above = node
    while (parent := above.parent) is not None:
        edges.append(parent.edge)
        above = parent
    return b"".join(reversed(edges))


def _tokens(edge: bytes) -> tuple[int, ...]:
    return tuple(memoryview(edge).cast("q"))
