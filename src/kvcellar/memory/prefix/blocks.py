"""blocks: token sequences as blocks of one size, each known by a hash of its tokens and of all before them.

The hash of a block is an integer below 2^64. It depends on the namespace: the same tokens have other hashes in another
one.
"""

from array import array
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from kvcellar.memory.prefix.node import TOKEN, Node, NodeBlocks, path_key, root_of, upwards


class Blocks(NamedTuple):
    """Blocks of one sequence that follow each other, and their tokens. `parent` is the hash of the block before them,
    None where they begin the sequence."""

    parent: int | None
    hashes: list[int]
    key: bytes


class Place(NamedTuple):
    """A position in a sequence: `last` is the hash of the last block before it, `rest` the key of the tokens after
    that."""

    last: int | None = None
    rest: bytes = b""


START = Place()


def blocks_of(namespace: str, place: Place, key: bytes, size: int) -> tuple[Blocks, Place]:
    """The blocks that end in the tokens of `key`, which follow `place`; and the place behind them. Costs the tokens of
    `key`, and less than a block."""
    key, last, step = place.rest + key, place.last, size * TOKEN
    hashes: list[int] = []
    for at in range(0, len(key) - step + 1, step):
        digest = blake2b(key[at : at + step], digest_size=8, person=b"kvcellar-block")
        digest.update(namespace.encode() if last is None else last.to_bytes(8, "little"))
        last = int.from_bytes(digest.digest(), "little")
        hashes.append(last)
    done = len(hashes) * step
    return Blocks(place.last, hashes, key[:done]), Place(last, key[done:])


class TreeBlocks:
    """The blocks of the nodes of one prefix tree, on the thread that changes it. Every node keeps the hashes of the
    blocks that end in it, so that no block is hashed twice.

    An epoch is a number that grows when what was published is forgotten. Always true: all above a node that was
    published in the present epoch were, too.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def gained(self, node: Node, start: int, epoch: int) -> list[Blocks]:
        """A node has tokens from `start` on that it did not have. Returns the blocks that end in them, and before these
        the blocks of its path that were not published in this epoch."""
        self._hash(node, start)
        late = list(takewhile(lambda one: _of(one).epoch != epoch, upwards(node.parent)))
        found = [self._from(one, one.start) for one in reversed(late)]
        found.append(self._from(node, start if _of(node).epoch == epoch else node.start))
        for one in (node, *late):
            _of(one).epoch = epoch
        return [blocks for blocks in found if blocks.hashes]

    def lost(self, node: Node, start: int) -> list[int]:
        """A node is about to lose its tokens from `start` on. Returns the hashes of the blocks that end in them."""
        hashes, first = _of(node).hashes, self._count(node, start)
        gone = hashes[first:].tolist()
        del hashes[first:]
        return gone

    def parted(self, above: Node, node: Node) -> None:
        """The first tokens of a node are those of a new one above it."""
        whole, count = _of(node), self._count(above, above.end)
        above.blocks = NodeBlocks(whole.hashes[:count], whole.epoch)
        node.blocks = NodeBlocks(whole.hashes[count:], whole.epoch)

    def joined(self, node: Node, child: Node) -> None:
        """The only child of a node gets its tokens."""
        upper, lower = _of(node), _of(child)
        child.blocks = NodeBlocks(upper.hashes + lower.hashes, min(upper.epoch, lower.epoch))

    def _count(self, node: Node, pos: int) -> int:
        """How many blocks end in the tokens of a node before `pos`."""
        return pos // self._size - node.start // self._size

    def _hash(self, node: Node, start: int) -> None:
        """Hash the tokens of a node from `start` on; those before are."""
        if node.blocks is None:
            node.blocks = NodeBlocks(array("Q"))
        first = start // self._size * self._size
        place = Place(self._before(node, len(node.blocks.hashes)), path_key(node, start, first))
        new, _ = blocks_of(root_of(node).namespace, place, path_key(node, node.end, start), self._size)
        node.blocks.hashes.extend(new.hashes)

    def _before(self, node: Node, count: int) -> int | None:
        """The hash of the block before the one of this number in a node."""
        if count:
            return _of(node).hashes[count - 1]
        return next((_of(one).hashes[-1] for one in upwards(node.parent) if _of(one).hashes), None)

    def _from(self, node: Node, start: int) -> Blocks:
        """The blocks that end in the tokens of a node from `start` on."""
        size, first = self._size, self._count(node, start)
        key = path_key(node, node.end // size * size, start // size * size)
        return Blocks(self._before(node, first), _of(node).hashes[first:].tolist(), key)


def _of(node: Node) -> NodeBlocks:
    assert node.blocks is not None, "a node was not watched when it was made"
    return node.blocks
