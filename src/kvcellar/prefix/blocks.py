"""blocks: token sequences as blocks of one size, each known by a hash of its tokens and of all before them.

The hash of a block is an integer below 2^64. It depends on the namespace: the same tokens have other hashes in another
one.
"""

from array import array
from hashlib import blake2b
from typing import NamedTuple

from kvcellar.prefix.node import TOKEN


class Block(NamedTuple):
    """The tokens up to `end`, which is a multiple of the size. `parent` is None for the first block of a sequence."""

    hash: int
    parent: int | None
    end: int
    tokens: tuple[int, ...]


class Place(NamedTuple):
    """A position in a sequence: `last` is the hash of the last block before it, `rest` the key of the tokens after
    that."""

    end: int = 0
    last: int | None = None
    rest: bytes = b""


START = Place()


def blocks_of(namespace: str, place: Place, key: bytes, size: int) -> tuple[list[Block], Place]:
    """The blocks that end in the tokens of `key`, which follow `place`; and the place behind them."""
    key, found, last = place.rest + key, list[Block](), place.last
    start, step = place.end - len(place.rest) // TOKEN, size * TOKEN
    for at in range(0, len(key) - step + 1, step):
        part = key[at : at + step]
        digest = blake2b(part, digest_size=8, person=b"kvcellar-block")
        digest.update(namespace.encode() if last is None else last.to_bytes(8, "little"))
        parent, last = last, int.from_bytes(digest.digest(), "little")
        found.append(Block(last, parent, start + (at + step) // TOKEN, tuple(array("q", part))))
    done = len(found) * step
    return found, Place(start + len(key) // TOKEN, last, key[done:])
