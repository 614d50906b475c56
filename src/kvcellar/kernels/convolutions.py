"""convolutions: oneDNN is called with few lengths of text.

It compiles a kernel, and two that reorder, for every length, and keeps them (see `packed`). So a convolution along the
text gets its input with zeros behind it, up to a length of `with_padding`, and what comes out for them is cut off. No
output of a causal convolution depends on what is behind it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcellar.kernels.packed import with_padding

CAUSAL = "causal_conv1d_fn"  # what mixers of transformers call it


def of_few_lengths(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A causal convolution of inputs [B,C,L], its first argument, that is made of `with_padding(L)` inputs on a CPU."""

    @wraps(theirs)
    def made(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        more = with_padding(x.shape[-1]) - x.shape[-1]
        if not more or x.device.type != "cpu" or kwargs.get("seq_idx") is not None:
            return theirs(x, *args, **kwargs)
        if len(x) == 1:
            return theirs(F.pad(x, (0, more)), *args, **kwargs)[..., : x.shape[-1]]
        out = torch.empty_like(x)
        for one, into in zip(x.split(1), out.split(1), strict=True):  # so that zeros behind all take no memory at once
            into.copy_(made(one, *args, **kwargs))
        return out

    return made
