"""why: the reason why a prompt found no more than it did in the prefix tree.

Always true:
  * `Losses` has the last `KEPT` digests of what was lost. Only what a prompt begins with is its loss: what it never had
    is none, however many prompts before it had the same first token;
  * `Sightings` has at most `SEEN` beginnings, and for each at most two namespaces; texts of different owners are never
    compared.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Literal, NamedTuple

from kvcellar.events import Recall
from kvcellar.images.image import is_row
from kvcellar.memory.prefix.node import TOKEN, Node, digest_begun, ids_of, path_digest, path_state
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.snapshot import requested

KEPT = 16384
SEEN, LEAST = 16384, 64  # beginnings; tokens of the shortest
SHOWN = 16  # tokens on both sides of a divergence
LOOKED_AT = 8  # nodes that go on in another way, of any number
NAME = 6  # bytes of an entry's name


@dataclass(frozen=True, slots=True)
class Loss:
    """Tokens [start,end) of a text that were lost, and when: in seconds of the clock."""

    at: float
    kind: Literal["evicted", "damaged"]
    cause: str
    start: int
    end: int

    @property
    def marks(self) -> Iterator[int]:
        """Ends of the beginnings that it is known by: its first token, its first 2, its first 4 and so on, and all."""
        tokens = 1
        while tokens < self.end - self.start:
            yield self.start + tokens
            tokens *= 2
        yield self.end


class Losses:
    """Remembers what was lost by digests of the texts up to each of its marks: how much of a prompt was lost is then
    known without its tokens, exactly where the prompt goes on behind it, and else to within a factor of two."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, Loss] = OrderedDict()
        self.cause = ""  # of evictions from now on, as a phrase

    def evicted(self, node: Node, pos: int) -> None:
        """The tokens of a node from `pos` on are about to be evicted. Costs as `path_state`, and these tokens."""
        lost = Loss(self._clock(), "evicted", self.cause, pos, node.end)
        self._note(path_state(node, pos), memoryview(node.edge)[(pos - node.start) * TOKEN :], lost)

    def damaged(self, namespace: str, key: bytes, pos: int, cause: str) -> None:
        """The tokens of a key from `pos` on could not be read back."""
        state, view = digest_begun(namespace), memoryview(key)
        state.update(view[: pos * TOKEN])
        self._note(state, view[pos * TOKEN :], Loss(self._clock(), "damaged", cause, pos, len(key) // TOKEN))

    def _note(self, state: blake2b, tokens: memoryview, lost: Loss) -> None:
        """`state` is that before the lost tokens."""
        at = lost.start
        for end in lost.marks:
            state.update(tokens[(at - lost.start) * TOKEN : (end - lost.start) * TOKEN])
            at, digest = end, state.digest()
            self._known.pop(digest, None)
            self._known[digest] = lost
        while len(self._known) > KEPT:
            self._known.popitem(last=False)

    def of(self, namespace: str, key: bytes, pos: int) -> tuple[int, Loss] | None:
        """How many tokens of a key from `pos` on were lost, at least, and the loss that has most of them; the tokens
        before `pos` are there. None if none is known to be."""
        if not self._known:
            return None
        view, most = memoryview(key), len(key) // TOKEN
        state = digest_begun(namespace)
        state.update(view[: pos * TOKEN])
        at, lost, shares = pos, None, Counter[Loss]()
        while True:
            # Where a text leaves one loss for another, the first mark of that is near: else enough is known already.
            near = range(at + 1, min(at + LEAST, most) + 1)
            far = [] if lost is None else [end for end in lost.marks if near.stop <= end <= most][:1]
            for end in (*near, *far):
                further = state.copy()
                further.update(view[at * TOKEN : end * TOKEN])
                if (lost := self._known.get(further.digest())) is not None:
                    shares[lost] += end - at
                    state, at = further, end
                    break
            else:
                return (at - pos, shares.most_common(1)[0][0]) if shares else None

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

    def elsewhere(self, owner: str, namespace: str, key: bytes, *, beyond: int = 0, adapters: bool = False) -> int:
        """How many of its first tokens, at least, a text has in common with one of the same owner in another
        namespace, or, with `adapters`, in the same one with another adapter; 0 if not more than `beyond`, which is all
        that is looked at."""
        found = 0
        for tokens, digest in _beginnings(owner, key, beyond):
            others = [one for one in self._known.get(digest, ()) if one != namespace]
            if any((requested(one) == requested(namespace)) == adapters for one in others):
                found = tokens
        return found


def _beginnings(owner: str, key: bytes, beyond: int = 0) -> Iterator[tuple[int, bytes]]:
    """The beginnings of more than `beyond` tokens that a text is known by."""
    digest, done, tokens = blake2b(owner.encode(), digest_size=16), 0, LEAST << (beyond // LEAST).bit_length()
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
    images: Sequence[tuple[int, str]] = (),
) -> Recall:
    """The record of a prompt whose first `matched` tokens were there, and of which `restored` are used. `kinds` names
    the layers that can be resumed only at checkpoints. `images`: of those of the prompt, where the first row is, and a
    name, in order."""
    most = len(key) // TOKEN - 1
    found = min(matched, most)
    salted = elsewhere.owners.elsewhere(elsewhere.owner, namespace, key, beyond=found)

    def record(reason: str, detail: str, other: tuple[Node, int] | None = None) -> Recall:
        recall = Recall(most, found, restored, _sources(restored, read), read.seconds, reason, detail, salted=salted)
        return recall if other is None else _with_sides(recall, key, *other, images)

    if restored == most:
        return record("all", "the last token is always computed")
    if read.skipped:
        return record("cheaper to recompute", read.skipped)
    if read.unavailable:
        return record("tier unavailable", read.unavailable)
    if restored < found:
        detail = f"{kinds} layers can resume at token {restored}, not at {found}"
        return record("no checkpoint", detail, _diverging(tree, namespace, key))
    tokens, loss = losses.of(namespace, key[:-TOKEN], found) or (0, None)
    if loss is not None and tokens >= _enough(most - found):
        return record(loss.kind, f"at least {tokens} tokens, {losses.ago(loss):.0f} s ago: {loss.cause}")
    if tokens := elsewhere.namespaces.elsewhere(namespace, elsewhere.identity, key, beyond=found):
        detail = f"at least {tokens} tokens are stored by other weights, settings or versions, which cannot be used"
        return record("other weights", detail)
    if tokens := elsewhere.owners.elsewhere(elsewhere.owner, namespace, key, beyond=found, adapters=True):
        detail = f"at least {tokens} tokens were computed with another adapter, or without one, and cannot be used"
        return record("other adapter", detail)
    if (other := _diverging(tree, namespace, key)) is not None:
        return record("diverged", f"at token {matched} from what was computed before", other)
    return record("new", "nothing that was computed before goes on from here")


def _enough(missing: int) -> int:
    """How many tokens must have been lost to be the reason why so many are missing: half of them, or `LEAST`. A prompt
    that has only what all prompts begin with in common with what was lost is new."""
    return min(LEAST, (missing + 1) // 2)


def _sources(restored: int, read: ReadBack) -> tuple[tuple[str, int], ...]:
    """Restored tokens by tier: what was read back lies behind what the device had."""
    found: list[tuple[str, int]] = []
    left = restored
    for tier, tokens in reversed(read.tokens):
        if (n := min(tokens, left)) > 0:
            found.append((tier, n))
            left -= n
    return (*((("device", left),) if left else ()), *reversed(found))


def _diverging(tree: Tree, namespace: str, key: bytes) -> tuple[Node, int] | None:
    """The entry that goes on in another way than a key where the tree ends for it, and how many of its tokens are
    before that."""
    node, offset = tree.reached(namespace, key)
    if offset * TOKEN < len(node.edge):
        return node, offset
    child = _most_valued(node)
    return None if child is None else (child, 0)


def _most_valued(node: Node) -> Node | None:
    return max(islice(node.children.values(), LOOKED_AT), key=lambda child: child.value, default=None)


def _shown(tokens: bytes, at: int) -> tuple[int, ...]:
    return tuple(ids_of(tokens[at * TOKEN : (at + SHOWN) * TOKEN]))


def _with_sides(recall: Recall, key: bytes, node: Node, offset: int, images: Sequence[tuple[int, str]]) -> Recall:
    """With what a key and an entry have where they diverge."""
    ours, theirs = _shown(key, recall.matched), _shown(node.edge, offset)
    image = _image(node, offset, key, recall.matched, images)
    return replace(recall, entry=name_of(node), ours=ours, theirs=theirs, image=image)


def _image(node: Node, offset: int, key: bytes, matched: int, images: Sequence[tuple[int, str]]) -> str:
    """The first image of a prompt from where an entry goes on in another way, and what memory has there; "" if there
    is none, or memory has not had it. Of what is behind the entry, only the most valued nodes are looked at."""
    at, name = next(((at, name) for at, name in images if at >= matched), (0, ""))
    if not name:
        return ""
    if at == matched:
        return f"{name}: {'another image' if is_row(_shown(node.edge, offset)[0]) else 'there was none'}"
    row, start, looked = key[at * TOKEN : (at + 1) * TOKEN], offset * TOKEN, 0
    below: Node | None = node
    while below is not None and looked < LOOKED_AT:
        if row in below.edge[start:]:
            return f"{name}: the same image, after other tokens"
        below, start, looked = _most_valued(below), 0, looked + 1
    return ""


def name_of(node: Node) -> str:
    """The name of a node: it stays the same while the node grows, is cut and is split (the upper part keeps it)."""
    return path_digest(node, node.start + 1)[:NAME].hex()
