"""masks: scores of the tokens that the constraints of their rows do not allow become minus infinity.

Masks are computed on the host when the forward was queued and its scores are not needed yet: they depend on tokens that
are known. On a GPU they are ready before the scores are; on a CPU the forward has ended, and they cost what they take.
One copy brings those of all rows to a device, 32 tokens in a number.

R rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcellar.sample.matcher import WORD_BITS
from kvcellar.sample.sampler import Sampler


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
        for mask, row in zip(masks, rows, strict=True):
            scores[row].masked_fill_(_spread_on_host(mask, scores.shape[1]), -torch.inf)
        return
    of_rows = slice(None) if len(rows) == len(samplers) else torch.tensor(rows, device=scores.device)
    forbidden = _spread(bits.to(scores.device, non_blocking=True), scores.shape[1])
    scores[of_rows] = scores[of_rows].masked_fill(forbidden, -torch.inf)


def _spread_on_host(mask: np.ndarray, vocab: int) -> Tensor:
    """A bit of each token as a bool: [words] -> [V]. Ten times faster than shifts of torch."""
    return torch.from_numpy(np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little")).view(torch.bool)


def _spread(bits: Tensor, vocab: int) -> Tensor:
    """A bit of each token as a bool, on a device: [R,words] -> [R,V]"""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
