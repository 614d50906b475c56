"""sightings: in which namespaces the beginnings of texts have been seen, by digests.

A text is known by its first 64 tokens, its first 128, its first 256 and so on: whether a text with the same beginning
was seen elsewhere is then known without its tokens, to within a factor of two of their number.

Always true:
  * at most `KEPT` beginnings are known, and for each at most two namespaces;
  * texts of different owners are never compared.
"""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from kvcellar.prefix.node import TOKEN

KEPT = 16384
LEAST = 64  # tokens


class Sightings:
    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def note(self, owner: str, namespace: str, key: bytes) -> None:
        """A text of an owner is in a namespace now."""
        for _, digest in _beginnings(owner, key):
            there = self._known.pop(digest, ())
            self._known[digest] = there if namespace in there else (namespace, *there)[:2]
        while len(self._known) > KEPT:
            self._known.popitem(last=False)

    def elsewhere(self, owner: str, namespace: str, key: bytes) -> int:
        """How many of its first tokens, at least, a text has in common with one of the same owner in another
        namespace."""
        found = 0
        for tokens, digest in _beginnings(owner, key):
            if any(one != namespace for one in self._known.get(digest, ())):
                found = tokens
        return found


def _beginnings(owner: str, key: bytes) -> Iterator[tuple[int, bytes]]:
    digest, done, tokens = blake2b(owner.encode(), digest_size=16), 0, LEAST
    view = memoryview(key)
    while tokens * TOKEN <= len(key):
        digest.update(view[done : tokens * TOKEN])
        yield tokens, digest.digest()
        done, tokens = tokens * TOKEN, tokens * 2
