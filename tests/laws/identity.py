"""K/V that say whose they are: every vector is ±1 and spells its token, layer and plane. Exact in every float type.

A vector that was turned by half a circle has the other sign everywhere: it spells the same token, turned.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

LANES = 32
TOKEN, LAYER, PLANE = 20, 6, 2  # bits
MARK = 0b1010  # the four bits on top; turned, they are 0101, and neither zeros nor ones spell anything


def vectors(
    tokens: Sequence[int], layer: int, plane: int, heads: int, size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[T,heads,size]. Lane i is a bit of the token's word, 7 bits further on every 32 lanes: no two heads are alike."""
    if heads * size < LANES:
        raise ValueError(f"{heads} heads of {size} have less than {LANES} lanes")
    words = torch.tensor([_word(token, layer, plane) for token in tokens], dtype=torch.long)
    return (2 * (words[:, None] >> _bit_of(heads * size) & 1) - 1).to(dtype).reshape(len(tokens), heads, size)


def spelled(stored: Tensor, layer: int, plane: int) -> list[tuple[int, int]]:
    """What `stored` [N,heads,size] spells: (token, is it turned). Every lane is looked at."""
    flat = stored.reshape(len(stored), stored.shape[1] * stored.shape[2])
    words = ((flat[:, :LANES] > 0).long() << torch.arange(LANES)).sum(1)
    turned = words >> TOKEN + LAYER + PLANE != MARK
    found = torch.where(turned, ~words, words) & (1 << TOKEN) - 1
    expected = vectors(found.tolist(), layer, plane, *stored.shape[1:], dtype=stored.dtype)
    expected[turned] *= -1
    assert torch.equal(stored, expected), f"layer {layer}, plane {plane} holds something else than tokens"
    return list(zip(found.tolist(), turned.int().tolist(), strict=True))


@cache
def _bit_of(lanes: int) -> Tensor:
    lane = torch.arange(lanes)
    return (lane + 7 * (lane // LANES)) % LANES


def _word(token: int, layer: int, plane: int) -> int:
    if not (0 <= token < 1 << TOKEN and 0 <= layer < 1 << LAYER and 0 <= plane < 1 << PLANE):
        raise ValueError(f"token {token}, layer {layer}, plane {plane} do not fit a word")
    return MARK << TOKEN + LAYER + PLANE | plane << TOKEN + LAYER | layer << TOKEN | token
