"""draw: one token for every row of a step, at once, on the device of the logits.

The scores of a row are first edited (float32: biases, penalties, the boost of tokens that end the completion, forbidden
tokens), then become weights, which are filtered, and one token is drawn by its weight. An operation runs only for the
rows whose parameters ask for it; a batch of greedy rows is one `max`.

A weight is exp((score - best) / temperature), rounded to a whole number of 2**-40. Sums of whole numbers do not depend
on the order in which a device adds them, so a row draws the same token whatever rows are in its batch, which float sums
do not guarantee. A token less likely than 2**-41 times the best weighs nothing: it would be drawn less than once in
10**12.

On a CPU with a compiler, engines draw by `native_draws.py`, which this module defines and judges.

Where each operation is defined, in the order in which they are applied:

  biases                SequenceBiasLogitsProcessor of transformers, and logit_bias as OpenAI defines it
  repetition penalty    arXiv 1909.05858, as RepetitionPenaltyLogitsProcessor; prompt and completion
  presence, frequency   OpenAI's API reference, as vLLM's apply_penalties; the completion only
  boost of ends         ExponentialDecayLengthPenalty; its growth ends at 1e30, where transformers overflows
  forbidden tokens      NoRepeatNGram-, NoBadWords-, MinLength-, MinNewTokensLength-, SuppressTokens- and
                        SuppressTokensAtBeginLogitsProcessor; ends are also the request's own stop_token_ids
  constraint            `mask`: the tokens that the grammar of the request does not allow here
  filters               top-h, top-k, typical-p, top-p, min-p, epsilon, eta, as the warpers of transformers

The edits are in the order of transformers' `_get_logits_processor`, except that forbidden tokens are last.
The filters are, too, except for typical-p, which is last there, and between top-k and top-p in llama.cpp. vLLM applies
min-p before top-k and top-p: with top-k the same, as neither removes the best token; with top-p it keeps slightly less.
Ties: top-k keeps all that tie with the k-th, as in transformers; elsewhere the lowest id is first.

`repeat_last_n` (Ollama's name, penalty_last_n in llama.cpp) limits the penalties to the last n tokens of prompt and
completion. 0 switches them off. -1, our default, is the whole text, also what a context shift has removed; Ollama's
default is 64, and its -1 is the context.

Always true of the result:
  * a row's token depends on its logits, its `Sampler` and its position, never on the other rows;
  * no id outside the vocabulary, however wide the logits are;
  * a row whose scores are not numbers gets an error; the others are not affected.

Scores of the tokens that the constraints of their rows do not allow become minus infinity. Masks are computed on the
host when the forward was queued and its scores are not needed yet: they depend on tokens that are known. On a GPU they
are ready before the scores are; on a CPU the forward has ended, and they cost what they take. One copy brings those of
all rows to a device, 32 tokens in a number.

Scores are edited in place, all rows of a step at once. The cost is that of the tokens which are changed, not of the
vocabulary.

R rows, V vocabulary, W width of the logits, K tokens that are changed, of all rows together.
"""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcellar.engine.sample.couple import WEIGHT_BITS, Draft, keeps, residual
from kvcellar.engine.sample.matcher import WORD_BITS
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import ConstraintFailed, NoToken, ScoresNotNumbers
from kvcellar.events import TokenLogprob
from kvcellar.kernels.uploads import sent, uploaded
from kvcellar.sampling_params import SamplingParams


def boost_ends(scores: Tensor, boosts: Mapping[int, float], ends: list["array[int]"]) -> None:
    """Add its absolute value times `boosts[row]` to the score of each end, in place: negative scores rise too."""
    at = places([*boosts], ends, scores.device)
    each = torch.tensor([*boosts.values()], device="cpu", dtype=torch.float32)
    each = sent(each.repeat_interleave(torch.tensor([len(ids) for ids in ends], device="cpu")), scores.device)  # [K]
    there = scores[at]
    scores[at] = torch.where(there.isfinite(), there + there.abs() * each, there)


def penalise(scores: Tensor, rows: list[int], samplers: list[Sampler]) -> None:
    """Repetition, then frequency and presence, in place. Costs the tokens seen, not the vocabulary."""
    penalties = torch.tensor(
        [
            (one.params.repetition_penalty, one.params.frequency_penalty, one.params.presence_penalty)
            for one in samplers
        ],
        dtype=torch.float32,
        device="cpu",
    )
    some = [index for index, one in enumerate(samplers) if one.seen_ids]
    own = _own(scores, [rows[i] for i in some], [samplers[i] for i in some], penalties[some]) if some else None
    factors = sent(penalties[:, :1].contiguous(), scores.device)  # [R,1]
    for row, sampler, factor in zip(rows, samplers, factors, strict=True):
        if ids := sampler.prompt_seen():
            there = sent(torch.frombuffer(ids, dtype=torch.int64), scores.device)
            scores[row].index_copy_(0, there, _repeated(scores[row].index_select(0, there), factor))
    if own is not None:  # of these, those that the prompt has, too, are penalised once
        at, penalised = own
        scores[at] = penalised


def _own(
    scores: Tensor, rows: list[int], samplers: list[Sampler], penalties: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Where the tokens of completions are, and their scores [K] after penalties [R,3]. Changes nothing."""
    at = places(rows, [one.seen_ids for one in samplers], scores.device)
    counts = joined([one.seen_counts for one in samplers], torch.int64, scores.device).float()  # [K]
    sizes = torch.tensor([len(one.seen_ids) for one in samplers], device="cpu")
    repetition, frequency, presence = sent(penalties.repeat_interleave(sizes, 0), scores.device).unbind(1)  # [K] each
    return at, _repeated(scores[at], repetition) - counts * frequency - (counts > 0) * presence


def _repeated(seen: Tensor, repetition: Tensor) -> Tensor:
    return torch.where(seen < 0, seen * repetition, seen / repetition)


def places(rows: list[int], ids: list["array[int]"], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index (rows [K], ids [K]) of `ids[i]` in row `rows[i]`, for all i."""
    sizes = torch.tensor([len(row) for row in ids], device="cpu")
    of_rows = torch.tensor(rows, device="cpu").repeat_interleave(sizes)
    return sent(of_rows, device), joined(ids, torch.int64, device)


def joined(arrays: "list[array[int]] | list[array[float]]", dtype: torch.dtype, device: torch.device) -> Tensor:
    """The arrays concatenated, copied. None of them is empty."""
    return sent(torch.cat([torch.frombuffer(values, dtype=dtype) for values in arrays]), device)


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
    of_rows = slice(None) if len(rows) == len(samplers) else torch.tensor(rows, device=scores.device)
    forbidden = _spread(bits.to(scores.device, non_blocking=True), scores.shape[1])
    scores[of_rows] = scores[of_rows].masked_fill(forbidden, -torch.inf)


def _spread(bits: Tensor, vocab: int) -> Tensor:
    """A bit of each token as a bool, on a device: [R,words] -> [R,V]"""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()


MOST_WEIGHTS = 2**24  # that are computed at once: 128 MiB, and twice as much for what they are computed from
MAX_VOCAB = 2**22  # sums of weights stay under 2**63, and a score with its id fits one int64
ENTROPY_OF = 100  # candidates of top-h, as in transformers
FEW = 256  # that are ranked without sorting everything
PARTS = 16  # in which rows of a prompt are scored: a row takes up to 44 bytes for each token of the vocabulary


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token of one row. With an `error`, or if the mask of its constraint was `late`, there is none, and
    `token_id` is -1."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: NoToken | None = None
    late: bool = False


def draw(
    logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int], drafts: Sequence[Draft | None] = ()
) -> list[Drawn]:
    """Draw the token at `positions[r]` of `samplers[r]` from `logits[r]`. Logits are [R,W], W >= V, and not changed.

    Where `drafts[r]` has weights, the draw is coupled with the draft: it has the distribution of a draw without, and is
    the draft with the highest probability that this allows. Other drafts change nothing.

    Temperatures below 1e-5 are greedy: the highest score, the lowest id among equals. Log-probabilities are of the
    model's own distribution: log-softmax of the logits as passed, before biases, penalties, temperature and filters.
    Raises `ValueError` if shapes or vocabularies disagree; the error of a single row is in its `Drawn`.
    """
    if not samplers:
        return []
    raw = own_columns(logits, samplers)
    if len(positions) != len(samplers):
        raise ValueError(f"{len(samplers)} samplers, {len(positions)} positions")
    scores = edit(raw, samplers)
    best, tokens = scores.max(1)  # [R]; the lowest id among equals; NaN wins
    sampled = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
    most = max(1, MOST_WEIGHTS // raw.shape[1])
    for part in (sampled[start : start + most] for start in range(0, len(sampled), most)):
        at = _rows(part, len(samplers), raw.device)
        some = [(samplers[row], positions[row], drafts[row] if drafts else None) for row in part]
        tokens[at] = _sample(scores[at].float(), best[at], some)
    wanting = [row for row, sampler in enumerate(samplers) if sampler.params.logprobs is not None]
    table: list[list[float]]
    if not wanting and raw.device.type == "cpu":
        table = [list(row) for row in zip(tokens.tolist(), best.tolist(), strict=True)]
    else:
        columns = [tokens.double()[:, None], best.double()[:, None]]
        columns += [_logprobs(raw, tokens, samplers, wanting)] if wanting else []
        table = torch.cat(columns, 1).tolist()  # the one transfer to the host
    return [drawn_of(row, sampler, pos) for row, sampler, pos in zip(table, samplers, positions, strict=True)]


@dataclass(frozen=True, slots=True)
class Proposed:
    """A draft of one row, and what it was drawn from [V] int64, unless the row is greedy. None can be drawn where the
    score is not finite."""

    token_id: int
    score: float
    weights: Tensor | None = None


class Draws:
    """How an engine draws: by torch, on the device of the logits."""

    def clear(self) -> None:
        """Free memory that is kept for the next draw."""

    def draw(
        self, logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int], drafts: Sequence[Draft | None] = ()
    ) -> list[Drawn]:
        return draw(logits, samplers, positions, drafts)

    def propose(self, logits: Tensor, samplers: Sequence[Sampler], chances: Sequence[float]) -> list[Proposed]:
        """A draft for each row of logits [R,W], by the noise `chances[r]`."""
        scores = edit(own_columns(logits, samplers), samplers)
        best, tokens = scores.max(1)
        sampled = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
        weights: dict[int, Tensor] = {}
        if sampled:
            rows = torch.tensor(sampled, device=scores.device)
            drawn_from = weights_of(scores[rows].float(), best[rows], [samplers[row].params for row in sampled])
            tokens[rows] = pick(drawn_from, _floats([chances[row] for row in sampled], scores.device))
            weights = dict(zip(sampled, drawn_from, strict=True))
        table: list[list[float]] = torch.stack([tokens.double(), best.double()], 1).tolist()
        return [Proposed(int(token), score, weights.get(row)) for row, (token, score) in enumerate(table)]

    def score(self, logits: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprob]:
        """The log-probability of `tokens[r]` by the logits [R,V] of row r, its rank, and the `most` most likely tokens
        there: the same numbers as `draw` gives for drawn tokens. Raises `ScoresNotNumbers` where the logits are not
        numbers."""
        size = max(1, -(-len(logits) // PARTS))
        parts = range(0, len(logits), size)
        return [one for at in parts for one in _scored(logits[at : at + size], tokens[at : at + size], most)]


BY_TORCH = Draws()


def _scored(logits: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprob]:
    scores, most = logits.float(), min(most, logits.shape[1])
    given = uploaded(tokens, torch.int64, logits.device)[:, None]  # [R,1]
    ids = torch.cat([given, ranked(scores, most)], 1) if most else given  # [R,1+most]
    sums = torch.logsumexp(scores.double(), 1, keepdim=True)
    values = (scores.gather(1, ids).double() - sums).float().double()  # summed in float64, rounded to float32
    ranks = (scores > scores.gather(1, given)).sum(1, keepdim=True) + 1
    table: list[list[float]] = torch.cat([sums, ranks.double(), values, ids[:, 1:].double()], 1).tolist()
    return [
        scored_of(token, total, int(rank), row[: 1 + most], row[1 + most :])
        for token, (total, rank, *row) in zip(tokens, table, strict=True)
    ]


def scored_of(token: int, total: float, rank: int, values: Sequence[float], top: Sequence[float]) -> TokenLogprob:
    """`values`: the log-probability of the token, then of the most likely ones; `total`: the log of all."""
    if not math.isfinite(total) or any(map(math.isnan, values)):
        raise ScoresNotNumbers(
            "the scores of a prompt's tokens hold NaN or infinity. The weights may be damaged; if not, load the model "
            "with dtype float32."
        )
    return TokenLogprob(token, values[0], tuple(zip(map(int, top), values[1:], strict=True)), rank)


def own_columns(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """The columns [R,V] that are tokens: a padded output layer has more."""
    vocab = samplers[0].vocab_size
    if any(sampler.vocab_size != vocab for sampler in samplers):
        raise ValueError(f"samplers of different vocabularies in one draw: {sorted({s.vocab_size for s in samplers})}")
    if logits.ndim != 2 or logits.shape[0] != len(samplers):
        raise ValueError(f"{len(samplers)} samplers, logits {tuple(logits.shape)}")
    if not 0 < vocab <= min(logits.shape[1], MAX_VOCAB):
        raise ValueError(f"a vocabulary of {vocab}; logits have {logits.shape[1]}, the most is {MAX_VOCAB}")
    return logits[:, :vocab]


def _rows(some: list[int], count: int, device: torch.device) -> "Tensor | slice":
    """An index of these rows; a slice, which copies nothing, if they are all rows."""
    return slice(None) if len(some) == count else uploaded(some, torch.int64, device)


def _sample(scores: Tensor, best: Tensor, rows: Sequence[tuple[Sampler, int, Draft | None]]) -> Tensor:
    """Draw from scores [R,V] float32 of rows that are not greedy: sampler, position and draft of each. -> [R] int64"""
    weights = weights_of(scores, best, [sampler.params for sampler, _, _ in rows])
    chance = _floats([sampler.uniform(pos) for sampler, pos, _ in rows], scores.device)
    tokens = pick(weights, chance)
    if coupled := [row for row, (_, _, draft) in enumerate(rows) if draft is not None and draft.weights is not None]:
        at = _rows(coupled, len(rows), scores.device)
        tokens[at] = coupled_tokens(weights[at], [rows[row] for row in coupled])
    return tokens


def coupled_tokens(weights: Tensor, rows: Sequence[tuple[Sampler, int, Draft | None]]) -> Tensor:
    """Draw from weights [R,V], coupled with the drafts of the rows, which have weights. -> [R] int64"""
    drafts = [draft for _, _, draft in rows if draft is not None]
    tokens = uploaded([draft.token_id for draft in drafts], torch.int64, weights.device)
    drawn_from = torch.stack([draft.weights.to(weights.device) for draft in drafts if draft.weights is not None])
    accept, chance = (
        _floats([sampler.uniform(pos, purpose) for sampler, pos, _ in rows], weights.device)
        for purpose in ("accept", "draw")
    )
    kept = keeps(weights, drawn_from, tokens, accept)
    return torch.where(kept, tokens, pick(residual(weights, drawn_from), chance))


def weights_of(scores: Tensor, best: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What is drawn from: the weights of edited scores [R,V] float32 after temperature and filters. -> [R,V] int64"""
    knobs = uploaded([_knobs(p) for p in params], torch.float64, scores.device)
    temperature, top_h, top_k, typical_p, top_p, min_p, epsilon, eta = knobs.unbind(1)
    below, weights = weigh(scores, best, temperature)
    vocab = scores.shape[1]

    def run(wanted: Callable[[SamplingParams], bool], keep: Callable[["Tensor | slice"], Tensor]) -> None:
        rows = [row for row, p in enumerate(params) if wanted(p)]
        if rows:
            at = _rows(rows, len(params), scores.device)
            weights[at] = keep(at)

    run(lambda p: p.top_h is not None, lambda at: keep_top_h(weights[at], scores[at], top_h[at]))
    largest_k = max((p.top_k for p in params if p.top_k < vocab), default=0)
    run(
        lambda p: 0 < p.top_k < vocab,
        lambda at: keep_top_k(weights[at], scores[at], top_k[at], largest_k),
    )
    run(lambda p: p.typical_p < 1, lambda at: keep_typical(weights[at], below[at], typical_p[at]))
    run(lambda p: p.top_p < 1, lambda at: keep_top_p(weights[at], scores[at], top_p[at]))
    run(lambda p: p.min_p > 0, lambda at: keep_min_p(weights[at], min_p[at]))
    run(lambda p: 0 < p.epsilon_cutoff < 1, lambda at: keep_epsilon(weights[at], epsilon[at]))
    run(lambda p: 0 < p.eta_cutoff < 1, lambda at: keep_eta(weights[at], below[at], eta[at]))
    return weights


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return uploaded(values, torch.float64, device)


def _knobs(p: SamplingParams) -> tuple[float, ...]:
    """In the order in which they are applied."""
    top_h = 1.0 if p.top_h is None else p.top_h
    return p.temperature, top_h, p.top_k, p.typical_p, p.top_p, p.min_p, p.epsilon_cutoff, p.eta_cutoff


def _logprobs(raw: Tensor, tokens: Tensor, samplers: Sequence[Sampler], wanting: list[int]) -> Tensor:
    """For the rows of `wanting`: logprob of the token, n ids, n logprobs. -> [R,1+2n] float64, other rows zero"""
    at = _rows(wanting, len(samplers), raw.device)
    most = max(samplers[row].params.logprobs or 0 for row in wanting)
    most = min(most, raw.shape[1])
    scores = raw[at].float()
    ids = torch.cat([tokens[at][:, None], ranked(scores, most)], 1) if most else tokens[at][:, None]
    sums = torch.logsumexp(scores.double(), 1, keepdim=True)
    values = (scores.gather(1, ids).double() - sums).float().double()  # summed in float64, rounded to float32
    table = torch.zeros(len(samplers), 1 + 2 * most, dtype=torch.float64, device=raw.device)
    table[at] = torch.cat([values[:, :1], ids[:, 1:].double(), values[:, 1:]], 1)
    return table


def drawn_of(row: Sequence[float], sampler: Sampler, pos: int) -> Drawn:
    """Read a row of the table: token, best score, then log-probabilities if any row asked for them."""
    token, best, *rest = row
    if sampler.late:
        return Drawn(-1, late=True)
    if not math.isfinite(best):
        return Drawn(-1, error=_no_token(best, sampler, pos))
    asked = sampler.params.logprobs
    if asked is None:
        return Drawn(int(token))
    if not math.isfinite(rest[0]):  # as a score of a token that cannot be drawn is no number
        return Drawn(-1, error=_no_token(abs(rest[0]), sampler, pos))
    most = len(rest) // 2
    ids, values = rest[1 : 1 + most], rest[1 + most :]
    top = tuple((int(i), value) for i, value in zip(ids[:asked], values[:asked], strict=True))
    return Drawn(int(token), TokenLogprob(int(token), rest[0], top))


def _no_token(best: float, sampler: Sampler, pos: int) -> NoToken:
    """The reason why no token can be drawn, where the best score is NaN or infinite."""
    where = f"no token can be drawn at pos {pos} of choice {sampler.index}"
    if sampler.matcher is not None and sampler.matcher.error is not None:
        return ConstraintFailed(f"{where}: its constraint cannot be followed further: {sampler.matcher.error}")
    if best == -math.inf:
        less = "Ask for less of min_tokens, suppress_tokens, bad_words_ids or no_repeat_ngram_size, or check the model."
        return NoToken(f"{where}: all {sampler.vocab_size} tokens are forbidden. {less}")
    kind = "NaN" if math.isnan(best) else "infinity"
    advice = "The weights may be damaged; if not, load the model with dtype float32."
    return ScoresNotNumbers(f"{where}: the scores hold {kind}. {advice}")


def edit(raw: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """`raw` [R,V] with biases, penalties and forbidden tokens applied, float32; `raw` itself if no row needs any."""
    biased = {row: biases for row, one in enumerate(samplers) if (biases := one.biases())[0]}
    penalised = [row for row, one in enumerate(samplers) if one.seen_ids or one.prompt_seen()]
    ending = {row: boost for row, one in enumerate(samplers) if (boost := one.end_boost())}
    forbidden = {row: ids for row, one in enumerate(samplers) if (ids := one.forbidden())}
    constrained = any(one.matcher is not None for one in samplers)
    if not (biased or penalised or ending or forbidden or constrained):
        return raw
    scores = raw.to(torch.float32, copy=True)
    if biased:
        at = places([*biased], [ids for ids, _ in biased.values()], scores.device)
        scores[at] += joined([values for _, values in biased.values()], torch.float64, scores.device).float()
    if penalised:
        penalise(scores, penalised, [samplers[row] for row in penalised])
    if ending:
        boost_ends(scores, ending, [samplers[row].end_array for row in ending])
    if forbidden:
        scores[places([*forbidden], [*forbidden.values()], scores.device)] = -torch.inf
    if constrained:
        forbid_unmatched(scores, samplers)
    return scores


def weigh(scores: Tensor, best: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Each score minus the best, float64, and its weight, int64: both [R,V]. `best` and temperature: [R].

    The best is subtracted before the division, so that no temperature can overflow. In a row whose best is not finite
    (an error is returned for it) all weights are equal.
    """
    best = best.double()[:, None]
    below = scores.double().sub_(best).div_(temperature[:, None]).masked_fill_(~best.isfinite(), 0.0)
    return below, below.exp().mul_(2.0**WEIGHT_BITS).round_().long()


def ranked(scores: Tensor, width: int) -> Tensor:
    """The ids of the `width` highest scores, best first, the lowest id first among equals. [R,V] -> [R,width]"""
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0: minus zero equals zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats as integers of the same order
    last_id = scores.shape[1] - 1
    keys = ordered * MAX_VOCAB + (last_id - torch.arange(last_id + 1, device=scores.device))
    top = keys.topk(width).values if width < FEW else keys.sort(descending=True).values
    return last_id - top[:, :width] % MAX_VOCAB


def keep_top_k(weights: Tensor, scores: Tensor, k: Tensor, largest_k: int) -> Tensor:
    """Keep the k [R] best, and those equal to the k-th."""
    edge = scores.topk(largest_k).values.gather(1, k[:, None].long() - 1)
    return torch.where(scores >= edge, weights, 0)


def keep_typical(weights: Tensor, below: Tensor, mass: Tensor) -> Tensor:
    """Keep those whose surprise is nearest to the entropy, until they have `mass` [R] together (arXiv 2202.00666)."""
    total = weights.sum(1, keepdim=True)
    surprise = torch.where(weights > 0, -below, 0.0)  # without the constant log of the sum, which cancels out
    expected = (weights * surprise).long().sum(1, keepdim=True).double() / total
    distance = torch.where(weights > 0, (surprise - expected).abs(), torch.inf)
    near, order = distance.sort(dim=1, stable=True)
    sums = weights.gather(1, order).cumsum(1)
    last = (sums < _part(mass, total)).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return torch.where(distance <= near.gather(1, last), weights, 0)


def keep_top_p(weights: Tensor, scores: Tensor, mass: Tensor) -> Tensor:
    """Keep the best, until they have `mass` [R] together."""
    order = ranked(scores, weights.shape[1])
    sorted_weights = weights.gather(1, order)
    before = sorted_weights.cumsum(1) - sorted_weights
    inside = torch.where(before < _part(mass, weights.sum(1, keepdim=True)), sorted_weights, 0)
    return torch.zeros_like(weights).scatter_(1, order, inside)


def keep_min_p(weights: Tensor, share: Tensor) -> Tensor:
    """Keep those with at least `share` [R] of the highest probability."""
    return torch.where(weights >= share[:, None] * weights.amax(1, keepdim=True), weights, 0)


def keep_top_h(weights: Tensor, scores: Tensor, share: Tensor) -> Tensor:
    """Keep the best, and of the `ENTROPY_OF` best the first whose terms of the entropy sum to at most `share` [R] of
    it."""
    order = ranked(scores, min(ENTROPY_OF, scores.shape[1]))
    chances = weights.gather(1, order).double()
    chances /= chances.sum(1, keepdim=True)
    terms = (torch.special.entr(chances) * 2.0**WEIGHT_BITS).round().long()  # whole numbers, as weights are
    sums = terms.cumsum(1)
    inside = sums <= share[:, None] * sums[:, -1:]
    inside[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, weights.gather(1, order).masked_fill_(~inside, 0))


def keep_epsilon(weights: Tensor, least: Tensor) -> Tensor:
    """Keep the best, and those with at least the probability `least` [R]."""
    enough = weights >= least[:, None] * weights.sum(1, keepdim=True)
    return torch.where(enough | (weights == weights.amax(1, keepdim=True)), weights, 0)


def keep_eta(weights: Tensor, below: Tensor, epsilon: Tensor) -> Tensor:
    """`keep_epsilon` with min(epsilon, sqrt(epsilon) * exp(-entropy)) [R]."""
    total = weights.sum(1, keepdim=True)
    surprise = torch.where(weights > 0, -below, 0.0)
    entropy = (weights * surprise).long().sum(1).double() / total[:, 0] + (total[:, 0] * 2.0**-WEIGHT_BITS).log()
    return keep_epsilon(weights, torch.minimum(epsilon, epsilon.sqrt() * (-entropy).exp()))


def pick(weights: Tensor, chance: Tensor) -> Tensor:
    """The token of each row where the running sum, in order of ids, passes `chance` [R] of the total. -> [R] int64.

    In order of ids rather than of weights: that needs no sort, and a small change of the scores changes each sum by as
    little, whereas two near-equal tokens that swap places would change it by a whole token's weight.
    """
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    target = torch.minimum((chance[:, None] * total).long(), total - 1)
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def _part(mass: Tensor, total: Tensor) -> Tensor:
    """`mass` [R] of `total` [R,1], rounded up to a whole weight [R,1]."""
    return (mass[:, None] * total).ceil().long()
