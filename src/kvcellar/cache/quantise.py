"""quantise: K/V in fewer bits. Vectors in, codes and scales out, and back.

A scale belongs to `BLOCK` neighbouring elements of one vector (all of them where it is shorter). It is the smallest
float16 that is no less than the largest element divided by the largest code, so no element is ever clipped:

    int8, int4   |x - x'| <= scale / 2
    fp8 (e4m3)   |x - x'| <= max(|x| / 16, scale / 1024)

and x' is x where x is a code times the scale; a group of zeros has scale 0. A group with an infinity, a NaN, or an
element too large for any scale (65504 times the largest code) reads back as NaN, all of it: it is never answered as
ordinary numbers.

Rotating by a Hadamard matrix before quantising (QuaRot, arXiv 2404.00456, section 3) spreads an element that stands out
over all the others of its block. The matrix is its own inverse, and products of two rotated vectors stay as they were.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcellar.shapes import BLOCK, Kind

LARGEST: dict[Kind, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
SMALLEST_SCALE = 2.0**-24  # the least float16 above zero
INT4_ZERO = 8  # is added to a code, so that it is not negative


def quantise(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """x [...,size] -> codes [...,bytes] (uint8; int8 for int8) and scales [...,groups] (float16)."""
    size = x.shape[-1]
    groups = _grouped(x.float())  # [...,groups,BLOCK]
    scales = _rounded_up(groups.abs().amax(-1) / LARGEST[kind])
    ratio = groups / scales.float().clamp(min=SMALLEST_SCALE)[..., None]
    ratio = ratio.nan_to_num(0.0).flatten(-2)[..., :size]  # a scale that is not finite says all there is to say
    if kind == "fp8":
        return ratio.to(torch.float8_e4m3fn).view(torch.uint8), scales
    codes = ratio.round_().to(torch.int8)
    return (codes if kind == "int8" else _pack(codes)), scales


def dequantise(codes: Tensor, scales: Tensor, kind: Kind, size: int) -> Tensor:
    """The vectors [...,size] in float32, of codes and scales as `quantise` made them."""
    if kind == "fp8":
        values = _widen(codes)
    else:
        values = (codes if kind == "int8" else _unpack(codes, size)).float()
    if scales.shape[-1] == 1:
        return values.mul_(scales.float())
    return values.mul_(scales.float().repeat_interleave(BLOCK, -1)[..., :size])


def rotate(x: Tensor) -> Tensor:
    """x [...,size] times `hadamard`, in float32, by sums and differences: no bit depends on what else is rotated."""
    blocks: list[Tensor] = []
    for block in x.float().split(_blocks(x.shape[-1]), -1):
        width, half = block.shape[-1], 1
        while half < width:
            left, right = block.unflatten(-1, (-1, 2, half)).unbind(-2)
            block = torch.stack([left + right, left - right], -2).flatten(-3)
            half *= 2
        blocks.append(block * width**-0.5)
    return torch.cat(blocks, -1)


def hadamard(size: int, device: torch.device) -> Tensor:
    """[size,size], symmetric and orthogonal: the matrix of `rotate`, which is faster where the last bit is free."""
    return rotate(torch.eye(size, device=device))


def _blocks(size: int) -> list[int]:
    """The largest powers of two that fill `size`."""
    return [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]


def _grouped(x: Tensor) -> Tensor:
    """[...,groups,BLOCK], the last group filled up with zeros; one group [...,1,size] if the vector is shorter."""
    size = x.shape[-1]
    if size <= BLOCK:
        return x.unsqueeze(-2)
    return F.pad(x, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))


def _rounded_up(x: Tensor) -> Tensor:
    """The smallest float16 that is no less than x >= 0; infinite if there is none."""
    near = x.half()
    return (near.view(torch.int16) + (near.float() < x)).to(torch.int16).view(torch.float16)


def _pack(codes: Tensor) -> Tensor:
    """Two a byte: the first half of the elements in the low bits, the second half (a zero added if odd) in the high."""
    half = (codes.shape[-1] + 1) // 2
    filled = F.pad(codes, (0, 2 * half - codes.shape[-1]))
    shifted = (filled + INT4_ZERO).to(torch.uint8)
    return shifted[..., :half] | shifted[..., half:] << 4


def _widen(codes: Tensor) -> Tensor:
    """Bytes of finite e4m3 numbers in float32: on CPUs five times as fast as torch's own conversion.

    Sign, exponent and fraction go where a float16 has them. Its exponents begin eight lower, so what stands there is
    the number divided by 2**8, subnormal or not.
    """
    wide = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    return wide.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


def _unpack(packed: Tensor, size: int) -> Tensor:
    both = torch.cat([packed & 15, packed >> 4], -1)[..., :size]
    return both.to(torch.int8) - INT4_ZERO
