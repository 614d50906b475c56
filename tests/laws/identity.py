"""K/V that encode their token, layer and plane: in the signs of a vector, and once more in its size.

All elements of a vector are as large, a power of two: exact in every float type. What is quantised reads back as the
same signs, and off by no more than rounding the scale takes. Keys turn by quarter and half circles a position, so that
a turned vector is made of the same elements, in other places or with other signs.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.memory.kv.quantise import LARGEST, rotate
from kvcellar.memory.shapes import Plane, Rotation

LANES = 32
TOKEN, LAYER, PLANE = 20, 6, 2  # bits
MARK = 0b1010  # the four bits on top: neither zeros nor ones spell anything
SCATTER = 0x9E375  # odd: tokens that follow each other differ in half of their bits
QUARTERS = (1, 2)  # of a circle, by which every other pair of elements turns at a position


class Spelt(NamedTuple):
    """What a vector should be: of which token, and turned by how many positions, in how many turns."""

    token: int
    turned: int = 0
    times: int = 0


def vectors(
    tokens: Sequence[int], layer: int, plane: int, heads: int, size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[T,heads,size]. Lane i is a bit of the token's word, 7 bits further on every 32 lanes: no two heads are alike."""
    if heads * size < LANES:
        raise ValueError(f"{heads} heads of {size} have less than {LANES} lanes")
    words = torch.tensor([_word(token, layer, plane) for token in tokens], dtype=torch.long)
    signs = (2 * (words[:, None] >> _bit_of(heads * size) & 1) - 1).reshape(len(tokens), heads, size)
    large = 2 ** ((torch.tensor(tokens, dtype=torch.long)[:, None] + torch.arange(heads)) % 4)
    return (signs * large[:, :, None]).to(dtype)


def spelled(stored: Tensor, layer: int, plane: int) -> list[int]:
    """The tokens that `stored` [N,heads,size] spells, in any float type. Every lane is looked at."""
    flat = stored.reshape(len(stored), stored.shape[1] * stored.shape[2])
    words = ((flat[:, :LANES] > 0).long() << torch.arange(LANES)).sum(1)
    found = [_token(word) for word in (words & (1 << TOKEN) - 1).tolist()]
    expected = vectors(found, layer, plane, *stored.shape[1:], dtype=stored.dtype)
    assert torch.equal(stored, expected), f"layer {layer}, plane {plane} holds something else than tokens"
    return found


def rotation(size: int) -> Rotation:
    """A rotation of keys of `size` elements whose result `turned` computes exactly."""
    return Rotation(tuple(QUARTERS[pair % 2] * pi / 2 for pair in range(size // 2)))


def turned(x: Tensor, by: int) -> Tensor:
    """x [...,size], whose pairs are turned by `by` positions: elements are exchanged, and change their signs."""
    pairs = x.shape[-1] // 2
    quarters = (torch.tensor(QUARTERS).repeat(pairs)[:pairs] * by) % 4
    cos, sin = torch.tensor([1, 0, -1, 0])[quarters], torch.tensor([0, 1, 0, -1])[quarters]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def check(stored: Tensor, expected: Sequence[Spelt], layer: int, number: int, plane: Plane) -> None:
    """Assert that `stored` [N,heads,size], of the `number`-th plane of a layer, is what is expected, in order."""
    assert len(stored) == len(expected)
    if expected:
        right = _within(stored, expected, layer, number, plane)
        wrong = [(i, expected[i]) for i in (~right).nonzero().flatten().tolist()]
        assert not wrong, f"layer {layer}, plane {plane.name}: these are something else: {wrong}"


def recognised(
    stored: Tensor, candidates: Iterable[Spelt], layer: int, number: int, plane: Plane
) -> list[tuple[int, int]]:
    """Which of `candidates` each of `stored` [N,heads,size] is: token, and turned by how much. All must be one."""
    if not len(stored):
        return []
    ordered = sorted(set(candidates))  # of those that read alike, the one of most turns comes last, and is the one
    ordered = list({spelt[:2]: spelt for spelt in ordered}.values())
    book = _expected(ordered, layer, number, plane)
    nearest = torch.cdist(stored.reshape(len(stored), -1).double(), book.reshape(len(book), -1)).argmin(1)
    found = [ordered[i] for i in nearest.tolist()]
    check(stored, found, layer, number, plane)
    return [spelt[:2] for spelt in found]


def _within(stored: Tensor, expected: Sequence[Spelt], layer: int, number: int, plane: Plane) -> Tensor:
    """[N], True where a cell is what it should be, within what its storage promises."""
    wanted = _expected(expected, layer, number, plane)
    off, storage = stored.double() - wanted, plane.storage
    if storage is None or not storage.quantised:
        # A quarter of a circle is no float64: there a turned element is off by its last bits.
        return (off.abs() <= (1e-12 if stored.dtype is torch.float64 else 0.0)).flatten(1).all(1)
    if not storage.hadamard:  # every element has the largest code, so it is off by how the scale was rounded
        return (off.abs() <= wanted.abs() * 2**-10).flatten(1).all(1)
    if storage.kind == "fp8":
        each = 1.1 * wanted.abs().amax(-1) / 16
    else:
        most = torch.stack([_most(s.token, layer, number, plane.heads, plane.size) for s in expected])  # [N,heads]
        each = 1.1 * most / LARGEST[storage.kind] / 2
    rounds = torch.tensor([1 + spelt.times for spelt in expected])
    return (off.norm(dim=-1) <= rounds[:, None] * plane.size**0.5 * each).all(1)


def _expected(spelt: Sequence[Spelt], layer: int, number: int, plane: Plane) -> Tensor:
    """[N,heads,size] in float64."""
    return torch.stack([_vector(s.token, s.turned, layer, number, plane.heads, plane.size) for s in spelt])


@cache
def _vector(token: int, by: int, layer: int, number: int, heads: int, size: int) -> Tensor:
    return turned(vectors([token], layer, number, heads, size, dtype=torch.float64)[0], by)


@cache
def _most(token: int, layer: int, number: int, heads: int, size: int) -> Tensor:
    """[heads], the largest element there ever is when the vector is rotated, however it was turned."""
    every = [_vector(token, by, layer, number, heads, size) for by in range(4)]
    return torch.stack([rotate(x).abs().amax(-1) for x in every]).amax(0).double()


@cache
def _bit_of(lanes: int) -> Tensor:
    lane = torch.arange(lanes)
    return (lane + 7 * (lane // LANES)) % LANES


def _word(token: int, layer: int, plane: int) -> int:
    if not (0 <= token < 1 << TOKEN and 0 <= layer < 1 << LAYER and 0 <= plane < 1 << PLANE):
        raise ValueError(f"token {token}, layer {layer}, plane {plane} do not fit a word")
    scattered = token * SCATTER % (1 << TOKEN)
    return MARK << TOKEN + LAYER + PLANE | plane << TOKEN + LAYER | layer << TOKEN | scattered


def _token(scattered: int) -> int:
    return scattered * pow(SCATTER, -1, 1 << TOKEN) % (1 << TOKEN)
