"""score: the log-probabilities of tokens that are given, not drawn. R rows, V vocabulary."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcellar.engine.sample.draw import ranked
from kvcellar.errors import ScoresNotNumbers
from kvcellar.events import TokenLogprob
from kvcellar.kernels.uploads import uploaded

PARTS = 16  # in which rows are scored: a row takes up to 44 bytes for each token of the vocabulary


@torch.inference_mode()
def scored(logits: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprob]:
    """The log-probability of `tokens[r]` by the logits [R,V] of row r, and of the `most` most likely ones there: the
    same numbers as `draw` gives for drawn tokens. Raises `ScoresNotNumbers` where the logits are not numbers."""
    size = max(1, -(-len(logits) // PARTS))
    parts = range(0, len(logits), size)
    return [one for at in parts for one in _part(logits[at : at + size], tokens[at : at + size], most)]


def _part(logits: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprob]:
    scores, most = logits.float(), min(most, logits.shape[1])
    given = uploaded(tokens, torch.int64, logits.device)[:, None]  # [R,1]
    ids = torch.cat([given, ranked(scores, most)], 1) if most else given  # [R,1+most]
    sums = torch.logsumexp(scores.double(), 1, keepdim=True)
    values = (scores.gather(1, ids).double() - sums).float().double()  # summed in float64, rounded to float32
    ranks = (scores > scores.gather(1, given)).sum(1, keepdim=True) + 1
    table: list[list[float]] = torch.cat([values, ids.double(), ranks.double(), sums], 1).tolist()
    return [_scored(row, most) for row in table]


def _scored(row: list[float], most: int) -> TokenLogprob:
    *row, total = row
    values, ids = row[: 1 + most], [int(token) for token in row[1 + most : -1]]
    if not math.isfinite(total) or any(map(math.isnan, values)):
        raise ScoresNotNumbers(
            "the scores of a prompt's tokens hold NaN or infinity. The weights may be damaged; if not, load the model "
            "with dtype float32."
        )
    return TokenLogprob(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)), int(row[-1]))
