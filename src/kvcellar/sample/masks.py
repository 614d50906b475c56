"""masks: scores of the tokens that the constraints of their rows do not allow become minus infinity.

Masks are computed on the host when the forward was queued and its scores are not needed yet: they depend on tokens that
are known. On a GPU they are ready before the scores are; on a CPU the forward has ended, and they cost what they take.
One copy brings those of all rows to a device, 32 tokens in a number.

R rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcellar.sample.matcher import WORD_BITS
from kvcellar.sample.sampler import Sampler

MINUS_INFINITY = -(2**23)  # the bits of a float32 as an int32


def forbid_unmatched(scores: Tensor, samplers: Sequence[Sampler]) -> None:
    """Edit scores [R,V] float32 in place, in the rows of `samplers` that have a constraint."""
    rows = [row for row, sampler in enumerate(samplers) if sampler.matcher is not None]
    words = -(-scores.shape[1] // WORD_BITS)
    # From torch's pinned memory, which is used again once a queued copy has read it. [len(rows), words]
    bits = torch.empty(len(rows), words, dtype=torch.int32, device="cpu", pin_memory=scores.is_cuda)
    masks = bits.numpy()
    for mask, row in zip(masks, rows, strict=True):
        samplers[row].fill_mask(mask)
    np.invert(masks, out=masks)
    if scores.device.type == "cpu":
        penalties = torch.empty(scores.shape[1], dtype=torch.int32, device="cpu")
        for mask, row in zip(masks, rows, strict=True):
            scores[row].add_(_penalise(penalties, mask))
        return
    of_rows = slice(None) if len(rows) == len(samplers) else torch.tensor(rows, device=scores.device)
    forbidden = _spread(bits.to(scores.device, non_blocking=True), scores.shape[1])
    scores[of_rows] = scores[of_rows].masked_fill(forbidden, -torch.inf)


def _penalise(penalties: Tensor, mask: NDArray[np.int32]) -> Tensor:
    """`penalties` [V] overwritten with 0 or minus infinity for each token of a mask [words], as float32. To add them
    takes a quarter of the time of `masked_fill_`, which branches for each score."""
    bits = np.unpackbits(mask.view(np.uint8), count=len(penalties), bitorder="little")
    return penalties.copy_(torch.from_numpy(bits)).mul_(MINUS_INFINITY).view(torch.float32)


def _spread(bits: Tensor, vocab: int) -> Tensor:
    """A bit of each token as a bool, on a device: [R,words] -> [R,V]"""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
