"""layouts: codes of weights, and how compressed-tensors packs them.

Shapes: o outputs, i inputs, c scales of an output, w words of 32 bits. A word holds 32 // b codes of b bits, the first
one in its lowest bits; a packed code is unsigned: its value plus 2^(b-1).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 20  # elements that are converted at once: they stay in the CPU's cache


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes I8 [o,i], i a multiple of 32 // bits -> words I32 [o,w]."""
    per, half = 32 // bits, 1 << bits - 1
    words = torch.zeros(len(codes), codes.shape[1] // per, dtype=torch.int32)
    for rows in row_blocks(*codes.shape):
        unsigned = (codes[rows].to(torch.int32) + half).view(len(codes[rows]), -1, per)  # [n,w,32/b]
        for at in range(per):
            words[rows] |= unsigned[..., at] << bits * at
    return words


def unpack(words: Tensor, bits: int) -> Tensor:
    """Words I32 [o,w] -> unsigned codes I32 [o, w * 32 / b]. Where b does not divide 32, codes cross words."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        return ((words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & mask).flatten(-2)
    starts = torch.arange(words.shape[1] * 32 // bits) * bits
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    following = torch.cat((unsigned[:, 1:], torch.zeros_like(unsigned[:, :1])), 1)
    joined = (unsigned | following << 32)[:, starts // 32]  # bits above 63 are lost, and not needed
    return (joined >> starts % 32 & mask).to(torch.int32)


def decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, columns: Tensor | None) -> Tensor:
    """Codes [o,i], scales and zeros [o,c] (or one row, or one number) -> F32 [o,i]: (code - zero) * scale.

    `columns` [i] is the scale of each input; None: inputs share them in c groups of equal size, in order.
    """
    values = codes.to(torch.float32)
    if zeros is not None:
        values -= _spread(zeros, values.shape[1], columns)
    return values.mul_(_spread(scales, values.shape[1], columns))


def _spread(scales: Tensor, inputs: int, columns: Tensor | None) -> Tensor:
    """[o,c] -> F32 [o,i], or what broadcasts to it."""
    scales = scales.to(torch.float32)
    if columns is not None:
        return scales[:, columns]
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(inputs // scales.shape[1], 1)


def columns_of(inputs: int, group: int | None) -> Tensor | None:
    """The scale [i] of each input, for `decode`, if the last group is smaller than the others; else None."""
    return None if group is None or inputs % group == 0 else torch.arange(inputs) // group


def row_blocks(rows: int, columns: int, *, step: int = 1) -> Iterator[slice]:
    """Slices of rows with about `BLOCK` elements each, which start at multiples of `step`."""
    step *= max(1, BLOCK // max(1, columns * step))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
