"""quantise: convert K/V vectors to codes of fewer bits with scales, and back.

Each group of `BLOCK` neighbouring elements of a vector (all of them if it is shorter) has one scale: the smallest
float16 >= largest absolute element / largest code, so no element is clipped:

    int8, int4   |x - x'| <= scale / 2
    fp8 (e4m3)   |x - x'| <= max(|x| / 16, scale / 1024)

and x' = x if x is a code times the scale; a group of zeros has scale 0. A group with an infinity, a NaN, or an element
too large for any scale (more than 65504 times the largest code) is dequantised to NaN in all its elements.

A Hadamard rotation before quantising (QuaRot, arXiv 2404.00456, section 3) spreads outliers over all elements of their
block. The matrix is its own inverse, and the rotation preserves dot products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcellar.memory.shapes import BLOCK, Kind

LARGEST: dict[Kind, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
INT4_ZERO = 8  # added to each code, so that it is not negative


def quantise(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """x [...,size] -> codes [...,bytes] (uint8; int8 for int8) and scales [...,groups] (float16)."""
    size = x.shape[-1]
    groups = _grouped(x.float())  # [...,groups,BLOCK]
    scales = _rounded_up(groups.abs().amax(-1) / LARGEST[kind])
    ratio = groups / scales.float().clamp(min=SMALLEST_SCALE)[..., None]
    ratio = ratio.nan_to_num(0.0).flatten(-2)[..., :size]  # codes do not matter if the scale is not finite
    if kind == "fp8":
        return ratio.to(torch.float8_e4m3fn).view(torch.uint8), scales
    codes = ratio.round_().to(torch.int8)
    return (codes if kind == "int8" else _pack(codes)), scales


def dequantise(codes: Tensor, scales: Tensor, kind: Kind, size: int) -> Tensor:
    """Codes and scales of `quantise` -> vectors [...,size] in float32."""
    if kind == "fp8":
        values = _widen(codes)
    else:
        values = (codes if kind == "int8" else _unpack(codes, size)).float()
    if scales.shape[-1] == 1:
        return values.mul_(scales.float())
    return values.mul_(scales.float().repeat_interleave(BLOCK, -1)[..., :size])


def rotate(x: Tensor) -> Tensor:
    """x [...,size] times `hadamard`, in float32, by sums and differences: bitwise independent of the batch."""
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
    """[size,size], the symmetric orthogonal matrix of `rotate`. A product with it is faster; rounding may differ."""
    return rotate(torch.eye(size, device=device))


def _blocks(size: int) -> list[int]:
    """`size` as a sum of powers of two, the largest first."""
    return [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]


def _grouped(x: Tensor) -> Tensor:
    """[...,groups,BLOCK], the last group padded with zeros; one group [...,1,size] if the vector is shorter."""
    size = x.shape[-1]
    if size <= BLOCK:
        return x.unsqueeze(-2)
    return F.pad(x, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))


def _rounded_up(x: Tensor) -> Tensor:
    """The smallest float16 that is >= x, where x >= 0; infinite if there is none."""
    near = x.half()
    return (near.view(torch.int16) + (near.float() < x)).to(torch.int16).view(torch.float16)


def _pack(codes: Tensor) -> Tensor:
    """Two codes per byte: the first half of the elements in the low bits, the second half (zero-padded) in the high."""
    half = (codes.shape[-1] + 1) // 2
    filled = F.pad(codes, (0, 2 * half - codes.shape[-1]))
    shifted = (filled + INT4_ZERO).to(torch.uint8)
    return shifted[..., :half] | shifted[..., half:] << 4


def _widen(codes: Tensor) -> Tensor:
    """Convert bytes of finite e4m3 numbers to float32: on CPUs five times as fast as torch's own conversion.

    Sign, exponent and fraction are shifted to their places in a float16. The exponent bias of float16 is larger by 8,
    so the result is the number divided by 2**8, also for subnormals.
    """
    wide = codes.view(torch.int8).to(torch.int16)  # sign-extended: the sign fills the upper byte
    return wide.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


def _unpack(packed: Tensor, size: int) -> Tensor:
    both = torch.cat([packed & 15, packed >> 4], -1)[..., :size]
    return both.to(torch.int8) - INT4_ZERO
