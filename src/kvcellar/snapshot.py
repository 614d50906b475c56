"""snapshot: what a span of tokens left in memory, as a record and bytes, outside of the device.

A snapshot is of the tokens [start,end) of a sequence; `parent` is the snapshot of the tokens before it, so that the
snapshots of a sequence are a chain. Its key is a digest of everything that decides its bytes: the identity of the
memory (weights, storage, shape of the groups), the namespace, and all tokens from the first one to the last.
"""

from dataclasses import dataclass
from hashlib import blake2b

from kvcellar.spans import Span

KEY = 32  # bytes of a key


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


def key_after(parent: bytes | None, *, identity: bytes, namespace: str, tokens: bytes, secret: bytes = b"") -> bytes:
    """The key of the tokens that follow those of `parent`, or that begin a sequence.

    `secret`, up to 64 bytes: without it a key cannot be computed from tokens.
    """
    digest = blake2b(digest_size=KEY, key=secret, person=b"kvcellar-key")
    for part in (identity, namespace.encode(), parent or b"", tokens):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
