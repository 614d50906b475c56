"""snapshot: what a span of tokens left in memory, as a record and bytes, outside of the device.

A snapshot is of the tokens [start,end) of a sequence; `parent` is the snapshot of the tokens before it, so that the
snapshots of a sequence are a chain. Its key is a digest of everything that decides its bytes: the identity of the
memory (weights, storage, shape of the groups), the namespace, and all tokens from the first one to the last.

What was computed with an adapter is in a namespace of its own, which is made of the digest of the adapter and of the
namespace of the requests. So everything that is kept by namespace is kept by adapter, too. Features of an image are in
a namespace that is made of its digest.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from kvcellar.memory.spans import Span

KEY = 32  # bytes of a key
SEGMENT = 512  # tokens of one snapshot, at most
ADAPTED = "\0adapter:"  # how a namespace begins of what was computed with an adapter; those of requests do not
IMAGE = "\0image:"  # and of the features of an image
MOST_AHEAD = 8  # tokens behind its own that an entry may depend on


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tokens` are those of `span`, 8 bytes each; `record` describes the chunks, which have these `sizes` in bytes;
    only the memory that made it reads it."""

    key: bytes
    parent: bytes | None
    namespace: str
    span: Span
    tokens: bytes
    record: bytes
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of all chunks."""
        return sum(self.sizes)


class StoredImage(NamedTuple):
    """What features are stored for: an image of this digest, that requests of a namespace have sent. `tokens` are the
    ids of its rows, 8 bytes each."""

    namespace: str
    digest: bytes
    tokens: bytes

    @property
    def space(self) -> str:
        """The namespace of its features."""
        return f"{IMAGE}{self.digest.hex()}:{self.namespace}"


def with_adapter(namespace: str, digest: str) -> str:
    """The namespace of what requests of a namespace compute with the adapter of this digest; "": none."""
    return f"{ADAPTED}{digest}:{namespace}" if digest else namespace


def requested(namespace: str) -> str:
    """The namespace that requests name, without their adapter, or the image."""
    made = namespace.startswith((ADAPTED, IMAGE))
    return namespace.removeprefix(ADAPTED).removeprefix(IMAGE).partition(":")[2] if made else namespace


def adapter_of(namespace: str) -> str:
    """The digest of the adapter of a namespace; "": none. What is behind a "/" tells apart what it has computed."""
    name = namespace.removeprefix(ADAPTED).partition(":")[0] if namespace.startswith(ADAPTED) else ""
    return name.partition("/")[0]


def image_of(namespace: str) -> str:
    """The digest of the image of a namespace of features, as hexadecimal digits; "": it is of none."""
    return namespace.removeprefix(IMAGE).partition(":")[0] if namespace.startswith(IMAGE) else ""


def key_after(parent: bytes | None, *, identity: bytes, namespace: str, tokens: bytes, secret: bytes = b"") -> bytes:
    """The key of the tokens that follow those of `parent`, or that begin a sequence.

    `secret`, up to 64 bytes: without it a key cannot be computed from tokens.
    """
    digest = blake2b(digest_size=KEY, key=secret, person=b"kvcellar-key")
    for part in (identity, namespace.encode(), parent or b"", tokens):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def looking_ahead(tokens: Sequence[int], ahead: int) -> "array[int]":
    """What stands for the tokens of a text where the entry at each position depends on `ahead` tokens behind it, too:
    entries of two texts are equal if these are, from the first one on. They are the tokens that entries look ahead to;
    the first one then stands for all tokens that it depends on. It is a digest of 32 bits, since stored ids have no
    more. (If two were equal by chance, drafts would be worse, and texts the same.)"""
    found = array("q", tokens[ahead:])
    if ahead and found:
        depends_on = array("q", tokens[: ahead + 1]).tobytes()
        found[0] = int.from_bytes(blake2b(depends_on, digest_size=4).digest())
    return found
