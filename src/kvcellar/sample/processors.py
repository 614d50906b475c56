"""processors: each thing a request may do to the scores of the next token, for all rows that want it at once.

Two kinds, in the order in which `draw` applies them:

  edits    on the model's scores, float32: biases, penalties, likelier ends, tokens that may not come
  filters  on weights: top-h, top-k, typical-p, top-p, min-p, epsilon, eta

A weight is exp((score - best) / temperature) as a whole number of 2**-40. Sums of whole numbers do not depend on the
order in which a device adds them, so a row gives the same token whatever rows stand beside it; float sums would not
promise that.
A token less likely than 2**-40 times the best weighs nothing: it would be drawn less than once in 10**12 tokens.

What each does, and where that is defined:

  repetition penalty    arXiv 1909.05858, as transformers' RepetitionPenaltyLogitsProcessor; prompt and answer
  presence, frequency   OpenAI's API reference, as vLLM's apply_penalties; the answer only
  biased sequences      transformers' SequenceBiasLogitsProcessor
  likelier ends         transformers' ExponentialDecayLengthPenalty; its growth ends at 1e30, where that one overflows
  what may not come     transformers' NoRepeatNGram-, NoBadWords-, MinLength-, MinNewTokensLength-, SuppressTokens- and
                        SuppressTokensAtBeginLogitsProcessor; ends are also the request's own stop_token_ids
  the filters           transformers' warpers of these names

`repeat_last_n` (Ollama's name, llama.cpp's penalty_last_n) limits what the penalties above see to the last n tokens of
prompt and answer. 0 switches them off. -1, our default, is the whole text, also what a context shift has forgotten;
Ollama's default is 64, and its -1 is the context.

Order of the edits: as in transformers' `_get_logits_processor`, but that what is forbidden comes last, all at once.
Order of the filters: top-h, top-k, top-p, min-p, epsilon, eta as in the same. vLLM takes min-p before top-k and
top-p; with top-k that is the same, since neither removes the best token, with top-p it keeps slightly fewer. typical-p
stands between top-k and top-p as in llama.cpp's default chain (transformers has it last).

Ties: top-k keeps all that tie with the k-th, as transformers; elsewhere the lowest id comes first.

R rows, V vocabulary.
"""

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcellar.sample.choice import Choice

WEIGHT_BITS = 40
MAX_VOCAB = 2**22  # sums of weights stay under 2**63, and a score with its id fits one int64
ENTROPY_OF = 100  # candidates of top-h, as in transformers
SHORTLISTS = (256, 4096)  # most nuclei are this small, and sorting everything costs ten times more


def edit(raw: Tensor, choices: Sequence[Choice]) -> Tensor:
    """`raw` [R,V] with biases, penalties and forbidden tokens applied, float32; `raw` itself if no row needs any."""
    biased = {row: biases for row, c in enumerate(choices) if (biases := c.biases())[0]}
    penalised = [row for row, c in enumerate(choices) if c.seen_ids]
    ending = {row: gain for row, c in enumerate(choices) if (gain := c.ends_gain())}
    forbidden = {row: ids for row, c in enumerate(choices) if (ids := c.forbidden())}
    if not (biased or penalised or ending or forbidden):
        return raw
    scores = raw.to(torch.float32, copy=True)
    if biased:
        at = _places([*biased], [ids for ids, _ in biased.values()], scores.device)
        scores[at] += _joined([values for _, values in biased.values()], torch.float64, scores.device).float()
    if penalised:
        _penalise(scores, penalised, [choices[row] for row in penalised])
    if ending:
        _hurry(scores, ending, [choices[row].end_array for row in ending])
    if forbidden:
        scores[_places([*forbidden], [*forbidden.values()], scores.device)] = -torch.inf
    return scores


def _hurry(scores: Tensor, gains: Mapping[int, float], ends: list["array[int]"]) -> None:
    """Add `gains` times its size to the score of each end, in place: so that it rises where it is negative, too."""
    at = _places([*gains], ends, scores.device)
    each = torch.tensor([*gains.values()], device="cpu", dtype=torch.float32)
    each = each.repeat_interleave(torch.tensor([len(ids) for ids in ends], device="cpu")).to(scores.device)  # [K]
    there = scores[at]
    scores[at] = torch.where(there.isfinite(), there + there.abs() * each, there)


def _penalise(scores: Tensor, rows: list[int], choices: list[Choice]) -> None:
    """Repetition, then frequency and presence, in place. Costs the tokens seen, not the vocabulary."""
    at = _places(rows, [c.seen_ids for c in choices], scores.device)
    counts = _joined([c.seen_counts for c in choices], torch.int64, scores.device).float()  # [K]
    penalties = torch.tensor(
        [(c.params.repetition_penalty, c.params.frequency_penalty, c.params.presence_penalty) for c in choices],
        dtype=torch.float32,
        device="cpu",
    )
    sizes = torch.tensor([len(c.seen_ids) for c in choices], device="cpu")
    repetition, frequency, presence = penalties.repeat_interleave(sizes, 0).to(scores.device).unbind(1)  # [K] each
    seen = scores[at]
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    scores[at] = seen - counts * frequency - (counts > 0) * presence


def _places(rows: list[int], ids: list["array[int]"], device: torch.device) -> tuple[Tensor, Tensor]:
    """(row [K], id [K]) of the listed ids."""
    sizes = torch.tensor([len(row) for row in ids], device="cpu")
    return torch.tensor(rows, device="cpu").repeat_interleave(sizes).to(device), _joined(ids, torch.int64, device)


def _joined(arrays: "list[array[int]] | list[array[float]]", dtype: torch.dtype, device: torch.device) -> Tensor:
    """The arrays one after the other, copied. None is empty."""
    return torch.cat([torch.frombuffer(values, dtype=dtype) for values in arrays]).to(device)


def weigh(scores: Tensor, best: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """How far below the best each score lies, float64, and its weight, int64: both [R,V]. `best` and temperature: [R].

    The best is subtracted before dividing, so that no temperature can overflow. A row whose best is not finite (the
    caller reports it) weighs everything alike.
    """
    best = best.double()[:, None]
    below = scores.double().sub_(best).div_(temperature[:, None]).masked_fill_(~best.isfinite(), 0.0)
    return below, below.exp().mul_(2.0**WEIGHT_BITS).long()


def ranked(scores: Tensor, width: int) -> Tensor:
    """The ids of the `width` highest scores, best first, the lowest id first among equals. [R,V] -> [R,width]"""
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0: minus zero equals zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats as integers of the same order
    last_id = scores.shape[1] - 1
    keys = ordered * MAX_VOCAB + (last_id - torch.arange(last_id + 1, device=scores.device))
    top = keys.topk(width).values if width in SHORTLISTS or width < SHORTLISTS[0] else keys.sort(descending=True).values
    return last_id - top % MAX_VOCAB


def keep_top_k(weights: Tensor, scores: Tensor, k: Tensor, largest_k: int) -> Tensor:
    """Only the k [R] best, and those equal to the k-th."""
    edge = scores.topk(largest_k).values.gather(1, k[:, None].long() - 1)
    return torch.where(scores >= edge, weights, 0)


def keep_typical(weights: Tensor, below: Tensor, mass: Tensor) -> Tensor:
    """Those whose surprise is nearest to the expected surprise, until they make up `mass` [R] (arXiv 2202.00666)."""
    total = weights.sum(1, keepdim=True)
    surprise = torch.where(weights > 0, -below, 0.0)  # without the constant log of the sum, which cancels out
    expected = (weights * surprise).long().sum(1, keepdim=True).double() / total
    distance = torch.where(weights > 0, (surprise - expected).abs(), torch.inf)
    near, order = distance.sort(dim=1, stable=True)
    sums = weights.gather(1, order).cumsum(1)
    last = (sums < _part(mass, total)).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return torch.where(distance <= near.gather(1, last), weights, 0)


def keep_top_p(weights: Tensor, scores: Tensor, mass: Tensor) -> Tensor:
    """The best, until they make up `mass` [R]. Reads back one flag for each short list tried, to learn if it did."""
    vocab = weights.shape[1]
    kept, rows = torch.empty_like(weights), torch.arange(len(weights), device=weights.device)
    for width in (*(short for short in SHORTLISTS if short < vocab), vocab):
        found, enough = _nucleus(weights[rows], scores[rows], mass[rows], width)
        kept[rows] = found
        rows = rows[~enough]
        if not len(rows):
            break
    return kept


def _nucleus(weights: Tensor, scores: Tensor, mass: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The nucleus among the `width` best, and for which rows [R] it lies within them."""
    limit = _part(mass, weights.sum(1, keepdim=True))
    order = ranked(scores, width)
    sorted_weights = weights.gather(1, order)
    sums = sorted_weights.cumsum(1)
    inside = torch.where(sums - sorted_weights < limit, sorted_weights, 0)
    return torch.zeros_like(weights).scatter_(1, order, inside), sums[:, -1] >= limit[:, 0]


def keep_min_p(weights: Tensor, share: Tensor) -> Tensor:
    """Those that have at least `share` [R] of the best one's probability."""
    return torch.where(weights >= share[:, None] * weights.amax(1, keepdim=True), weights, 0)


def keep_top_h(weights: Tensor, scores: Tensor, share: Tensor) -> Tensor:
    """Of the `ENTROPY_OF` best, the first whose entropy adds up to at most `share` [R] of that of them all, and the
    best in any case."""
    order = ranked(scores, min(ENTROPY_OF, scores.shape[1]))
    chances = weights.gather(1, order).double()
    chances /= chances.sum(1, keepdim=True)
    terms = (torch.special.entr(chances) * 2.0**WEIGHT_BITS).round().long()  # whole numbers, as weights are
    sums = terms.cumsum(1)
    inside = sums <= share[:, None] * sums[:, -1:]
    inside[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, weights.gather(1, order).masked_fill_(~inside, 0))


def keep_epsilon(weights: Tensor, least: Tensor) -> Tensor:
    """Those that have at least the probability `least` [R], and the best in any case."""
    enough = weights >= least[:, None] * weights.sum(1, keepdim=True)
    return torch.where(enough | (weights == weights.amax(1, keepdim=True)), weights, 0)


def keep_eta(weights: Tensor, below: Tensor, epsilon: Tensor) -> Tensor:
    """The same for min(epsilon, sqrt(epsilon) * exp(-entropy)) [R]."""
    total = weights.sum(1, keepdim=True)
    surprise = torch.where(weights > 0, -below, 0.0)
    entropy = (weights * surprise).long().sum(1).double() / total[:, 0] + (total[:, 0] * 2.0**-WEIGHT_BITS).log()
    return keep_epsilon(weights, torch.minimum(epsilon, epsilon.sqrt() * (-entropy).exp()))


def pick(weights: Tensor, chance: Tensor) -> Tensor:
    """The token of each row where the running sum, in order of ids, passes `chance` [R] of the total. -> [R] int64.

    In order of ids rather than of weights: that needs no sort, and a small change of the scores moves each border by as
    little, whereas two near-equal tokens that swap places would move it by a whole token.
    """
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    target = torch.minimum((chance[:, None] * total).long(), total - 1)
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def _part(mass: Tensor, total: Tensor) -> Tensor:
    """The least whole weight [R,1] that is at least `mass` [R] of `total` [R,1]."""
    return (mass[:, None] * total).ceil().long()
