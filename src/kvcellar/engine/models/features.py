"""features: what a network that sees makes of an image, as tensors and as bytes.

    record, sizes, chunks = to_bytes(features, like)        # `chunks()` are the bytes
    from_bytes(record, chunks, rows, like)                  # None if they are of another kind

Bytes may be from an untrusted file. What features of a network are, beside their numbers, is known from those of
another image, `like` these: what is read has its types, and its shapes but for the rows of the image. Sizes are checked
before anything is allocated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from kvcellar.engine.models.crossing import Crossed

Layers = Sequence[Tensor] | Mapping[int, Tensor]  # of the first layers, in order, or by the number of a layer


class Mask(NamedTuple):
    """The argument that says which rows are of images, or see some [*before,T,*more], where `before` are ones."""

    name: str
    before: torch.Size
    more: torch.Size
    dtype: torch.dtype

    def of(self, rows: Tensor, count: int) -> Tensor:
        """That of `count` rows."""
        made = torch.zeros(*self.before, count, *self.more, dtype=self.dtype, device=rows.device)
        made.view(count, -1)[rows] = 1
        return made


class Features(NamedTuple):
    """Of one image: what replaces embeddings [n,D], and by the names of the decoder's arguments what early layers get,
    [n,D] for each. `ahead`: its tokens see each other both ways, `in_windows`: not on layers with full attention.
    `crossed`: what layers attend to; None: they attend to rows only."""

    rows: Tensor
    layers: Mapping[str, Layers]
    mask: Mask | None
    ahead: bool
    in_windows: bool = False
    crossed: Crossed | None = None

    @property
    def bytes(self) -> int:
        several = [one if isinstance(one, Mapping) else dict(enumerate(one)) for one in self.layers.values()]
        crossed = self.crossed.bytes if self.crossed is not None else 0
        return self.rows.nbytes + sum(one.nbytes for each in several for one in each.values()) + crossed

    def tensors(self, like: "Features") -> list[Tensor]:
        """All of them, in the order of those `like` these."""
        if self.crossed is not None and like.crossed is not None:
            kv = chain.from_iterable(self.crossed.kv[module] for module in like.crossed.kv)
            return [*kv, *(self.crossed.given[name] for name in like.crossed.given)]
        layers = ((name, at) for name, several in like.layers.items() for at in _numbers(several))
        return [self.rows, *(self.layers[name][at] for name, at in layers)]

    def holding(self, tensors: Sequence[Tensor]) -> "Features":
        """Features like these that have other tensors, in this order."""
        rest = iter(tensors)
        if self.crossed is not None:
            kv = {module: (next(rest), next(rest)) for module in self.crossed.kv}
            return self._replace(crossed=Crossed(kv, {name: next(rest) for name in self.crossed.given}))
        rows = next(rest)
        layers = {name: alike(several, lambda _: next(rest)) for name, several in self.layers.items()}
        return self._replace(rows=rows, layers=layers)

    def shapes(self, rows: int) -> list[tuple[int | None, ...]]:
        """Of the tensors of an image with so many rows; None: any number."""
        if self.crossed is None:
            return [(rows, *one.shape[1:]) for one in self.tensors(self)]
        states = [(one.shape[0], None, one.shape[2]) for each in self.crossed.kv.values() for one in each]
        return [*states, *(tuple(one.shape) for one in self.crossed.given.values())]


def _numbers(layers: Layers) -> Iterable[int]:
    return layers if isinstance(layers, Mapping) else range(len(layers))


def alike(several: Layers, made: Callable[[int], Tensor]) -> Layers:
    """What is made of each layer, in the form of `several`."""
    return (
        {at: made(at) for at in several} if isinstance(several, Mapping) else [made(at) for at in range(len(several))]
    )


def to_bytes(features: Features, like: Features) -> tuple[bytes, list[int], Callable[[], list[bytes]]]:
    """The record of features, the sizes of their chunks, and a call that makes these."""
    tensors = features.tensors(like)
    record = msgspec.json.encode([tuple(one.shape) for one in tensors])
    return record, [one.nbytes for one in tensors], lambda: list(map(_chunk, tensors))


def _chunk(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def from_bytes(
    record: bytes, chunks: Sequence[bytes | memoryview], rows: int, like: Features, device: torch.device
) -> Features | None:
    """Features of an image that has so many rows; None if the bytes are none."""
    try:
        found = msgspec.json.decode(record, type=list[tuple[int, ...]])
    except (ValueError, RecursionError):
        return None
    tensors, wanted = like.tensors(like), like.shapes(rows)
    if not len(found) == len(wanted) == len(chunks):
        return None
    pairs = chain.from_iterable(zip(*each, strict=False) for each in zip(found, wanted, strict=True))
    free = {n for n, want in pairs if want is None}  # one number, of what tokens see of an image
    if len(free) > 1 or min(free, default=1) < 1:
        return None
    made = list[Tensor]()
    for shape, want, chunk, one in zip(found, wanted, chunks, tensors, strict=True):
        same = len(shape) == len(want) and all(n in (size, None) for size, n in zip(shape, want, strict=True))
        if not same or prod(shape) * one.itemsize != len(chunk):
            return None
        made.append(torch.frombuffer(bytearray(chunk), dtype=one.dtype).reshape(shape).to(device))
    return like.holding(made)
