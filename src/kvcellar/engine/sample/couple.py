"""couple: a draw that is likely to be a given draft, and still has the distribution of a draw without it.

Speculative sampling, arXiv 2211.17192 and 2302.01318: a draft x that was drawn from q is kept with probability
min(1, p(x)/q(x)); otherwise a token is drawn from max(p - q, 0). The result has distribution p, and is the draft with
probability sum(min(p, q)), the most that is possible. R rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_BITS = 40  # the largest weight of a row is 2**40


@dataclass(frozen=True, slots=True)
class Draft:
    """A token that may be the next. `weights` [V] int64 is what it was drawn from, by noise of its own; None: it was
    not drawn, or by the noise that also draws the token itself."""

    token_id: int
    weights: Tensor | None = None


def keeps(weights: Tensor, drawn_from: Tensor, tokens: Tensor, accept: Tensor) -> Tensor:
    """Whether the drafts `tokens` [R], drawn from weights [R,V], are kept where the weights are others [R,V], by the
    noise `accept` [R]. -> [R] bool"""
    p, q = (_shares(each).gather(1, tokens[:, None])[:, 0] for each in (weights, drawn_from))
    return accept * q < p


def residual(weights: Tensor, drawn_from: Tensor) -> Tensor:
    """The weights that a token is drawn from where the draft is not kept: max(p - q, 0). [R,V] each

    Where that is zero throughout, p equals q, and a draft that rounding rejects is replaced by a draw from p.
    """
    left = (_shares(weights) - _shares(drawn_from)).clamp_(min=0)
    most = left.amax(1, keepdim=True)
    return torch.where(most > 0, (left / most).mul_(2.0**WEIGHT_BITS).long(), weights)


def _shares(weights: Tensor) -> Tensor:
    """Weights as probabilities, float64. The sum is of whole numbers, so no row depends on the others."""
    return weights.double() / weights.sum(1, keepdim=True)
