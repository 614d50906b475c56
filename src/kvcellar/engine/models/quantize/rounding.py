"""rounding: codes of weights: how they are rounded to integers with scales, packed, and decoded.

Shapes: o outputs, i inputs, c scales of an output, w words of 32 bits. A word holds 32 // b codes of b bits, the first
one in its lowest bits; a packed code is unsigned: its value plus 2^(b-1). This is how compressed-tensors packs them.

Scales are rounded to bfloat16, as they are stored, before codes are chosen with them.

GPTQ rounds the weights of a matrix one input after the other, and corrects later inputs for the error so far. The error
that counts is that of the outputs: with H [i,i], the sum of x xᵀ over inputs x that the layer really reads,
the squared error of an output is d H dᵀ, d being the error of its weights. (Frantar et al., 2022)
"""

from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.models.quantize.kinds import AUTO, INT8
from kvcellar.engine.models.weights.weights_files import is_finite
from kvcellar.errors import ModelRefused
from kvcellar.kernels.codes import INT4, Coded, Codes, row_blocks
from kvcellar.kernels.quantised import unfit

GROUP = 32  # inputs that share a scale of 4-bit codes
_HALF = 8  # what is added to integers of 4 bits
_BLOCK = 128  # inputs whose corrections are applied to later ones at once; a multiple of GROUP
_DAMPINGS = (0.01, 0.1, 1.0)  # shares of the mean of the diagonal, each tried where the one before is too small


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


def int4_gptq(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor] | None:
    """Codes I8 [o,i] and scales BF16 [o,i/GROUP], as `int4_groups`; None if H cannot be used, or its outputs would have
    a larger error than those of `int4_groups`."""
    factor = _factor(hessian)
    if factor is None:
        return None
    codes, scales = _rounded(weight.float(), factor)
    plain = int4_groups(weight)
    return (codes, scales) if _error(weight, codes, scales, hessian) < _error(weight, *plain, hessian) else None


def _factor(hessian: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse of H with a damped diagonal."""
    mean = float(hessian.diagonal().mean())
    if not 0 < mean < torch.finfo(torch.float32).max:  # NaN too
        return None
    for share in _DAMPINGS:
        damped = hessian + share * mean * torch.eye(len(hessian))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(upper.isfinite().all()):
            return upper
    return None


def _rounded(weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """F32 [o,i], which is not kept -> codes and scales. A group's scale is chosen when its first input is reached."""
    outputs, inputs = weight.shape
    left = weight.clone()
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, inputs // GROUP, dtype=torch.bfloat16)
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        block, errors = left[:, start:end].T.contiguous(), torch.empty(end - start, outputs)  # [b,o]
        own = factor[start:end, start:end]
        scale = torch.empty(0)
        for at in range(end - start):
            if at % GROUP == 0:
                group = (start + at) // GROUP
                scales[:, group] = signed_scales(block[at : at + GROUP].T)
                scale = scales[:, group].float()
            code = block[at].div(scale).round_().clamp_(-8, 7)
            codes[:, start + at] = code
            errors[at] = block[at].sub(code.mul_(scale)).div_(own[at, at])
            block[at + 1 :].addr_(own[at, at + 1 :], errors[at], alpha=-1)
        left[:, end:] -= errors.T @ factor[start:end, end:]
    return codes, scales


def _error(weight: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor) -> float:
    """The squared error of all outputs."""
    wrong = weight.float() - (codes.unflatten(1, (-1, GROUP)) * scales[..., None].float()).flatten(1)
    return float(((wrong @ hessian) * wrong).sum(dtype=torch.float64))


# -- codes that are served ---------------------------------------------------------------------------------------------


def codes_of(name: str, part: Any, kind: str) -> Codes | str:
    """The codes of a stored weight, or why it has none that are served: those of the file, or it is rounded to `kind`
    without data. Raises `ModelRefused` for values that are not finite."""
    if isinstance(part, Coded):
        codes = part.codes()
        return codes if isinstance(codes, str) else unfit(codes) or codes
    if kind == AUTO:
        return "it is not stored quantised"
    weight: Tensor = part[...]
    check_finite(name, weight)
    if kind == INT8:
        return eight_bits(weight)
    values, scales = int4_groups(weight)
    return Codes((values + _HALF).view(torch.uint8), INT4, scales)


def eight_bits(weight: Tensor) -> Codes:
    values, scales = int8_rows(weight)
    return Codes(values, None, scales)


def check_finite(name: str, weight: Tensor) -> None:
    """Raise `ModelRefused` for values that are not finite."""
    if not is_finite(weight):
        raise ModelRefused(
            f"{name} holds NaN or infinity as {weight.dtype}. The weights are damaged; if not, load them with dtype "
            "float32"
        )
