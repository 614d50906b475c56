"""gptq: round the weights of a matrix one input after the other, and correct later inputs for the error so far.

The error that counts is that of the outputs: with H [i,i], the sum of x xᵀ over inputs x that the layer really reads,
the squared error of an output is d H dᵀ, d being the error of its weights. (Frantar et al., 2022)
"""

import torch
from torch import Tensor

from kvcellar.models.quantize.rules import GROUP, int4_groups, signed_scales

_BLOCK = 128  # inputs whose corrections are applied to later ones at once; a multiple of GROUP
_DAMPINGS = (0.01, 0.1, 1.0)  # shares of the mean of the diagonal, each tried where the one before is too small


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
