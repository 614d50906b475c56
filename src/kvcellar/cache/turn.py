"""turn: rotate stored keys to other positions. RoPE rotates pairs of elements by angles proportional to the position.

A key stored at position p and rotated by d positions equals the key of the same token computed at p + d, because the
angles of successive rotations add up (RoFormer, arXiv 2104.09864, section 3.2). Angles and products are float32 or
wider; each rotation rounds a key of lower precision once.
"""

import torch
from torch import Tensor

from kvcellar.shapes import Rotation


def turn(x: Tensor, rotation: Rotation, by: int) -> Tensor:
    """x [n,heads,size], rotated by `by` positions, which may be negative. A new tensor of the same dtype."""
    pairs = len(rotation.frequencies)
    # Angles in float64: at by = 100 000 a float32 product is off by more than a bfloat16 rounding.
    angle = torch.tensor(rotation.frequencies, dtype=torch.float64, device=x.device) * by  # [pairs]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    out = x.to(wide, copy=True)
    left, right = _pairs(out, rotation, pairs)
    a, b = left.clone(), right.clone()
    left.copy_(a * cos - b * sin)
    right.copy_(b * cos + a * sin)
    return out.to(x.dtype)


def _pairs(x: Tensor, rotation: Rotation, pairs: int) -> tuple[Tensor, Tensor]:
    """Views [n,heads,pairs] of the two elements of every pair."""
    start, end = rotation.start, rotation.start + 2 * pairs
    if rotation.interleaved:
        return x[..., start:end:2], x[..., start + 1 : end : 2]
    return x[..., start : start + pairs], x[..., start + pairs : end]
