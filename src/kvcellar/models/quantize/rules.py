"""rules: round weights to integers with scales, without data.

Scales are rounded to bfloat16, as they are stored, before codes are chosen with them.
"""

import torch
from torch import Tensor

from kvcellar.models.quantize.layouts import row_blocks

GROUP = 32  # inputs that share a scale of 4-bit codes


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[o,i] -> codes I8 [o,i] from -127 to 127, scales BF16 [o,1]: the largest magnitude of an output becomes 127."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), 1, dtype=torch.bfloat16)
    for rows in row_blocks(*weight.shape):
        part = weight[rows].float()
        scales[rows] = scale = _usable(part.abs().amax(1, keepdim=True) / 127)
        codes[rows] = part.div(scale.float()).round_().clamp_(-127, 127)
    return codes, scales


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[o,i], i a multiple of `GROUP` -> codes I8 [o,i] from -8 to 7, scales BF16 [o,i/GROUP]."""
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, inputs // GROUP, dtype=torch.bfloat16)
    for rows in row_blocks(outputs, inputs):
        part = weight[rows].float().unflatten(1, (-1, GROUP))  # [n,i/32,32]
        scales[rows] = scale = signed_scales(part)
        codes[rows] = part.div(scale[..., None].float()).round_().clamp_(-8, 7).flatten(1)
    return codes, scales


def signed_scales(groups: Tensor) -> Tensor:
    """F32 [...,g] -> BF16 [...]: the element of largest magnitude becomes -8, so a scale has its opposite sign.

    One more code is used than with a scale for -7 to 7, at the side where it matters most.
    """
    largest = groups.abs().argmax(-1, keepdim=True)
    return _usable(groups.gather(-1, largest).squeeze(-1) / -8)


def _usable(scales: Tensor) -> Tensor:
    """As BF16; 1 where all weights are 0, or so small that their scale is."""
    rounded = scales.to(torch.bfloat16)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
