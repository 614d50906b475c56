"""draw: one token for every row of a step, at once, on the device of the logits.

Order: biases, repetition / frequency / presence penalties, likelier ends, tokens that may not come, temperature, top-h,
top-k, typical-p, top-p, min-p, epsilon, eta, draw. A stage that no row asks for does not run; a batch of greedy rows is
one `max`.

Always true of what comes out:
  * a row's answer depends on its logits, its `Choice` and its pos: never on the other rows;
  * no id outside the vocabulary, however wide the logits are;
  * a row whose scores are not numbers gets an error; the others do not notice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.errors import NoToken
from kvcellar.events import TokenLogprob
from kvcellar.sample import processors
from kvcellar.sample.choice import Choice
from kvcellar.sample.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one row drew. With an `error` there is no token, and `token_id` is -1."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: NoToken | None = None


def draw(logits: Tensor, choices: Sequence[Choice], positions: Sequence[int]) -> list[Drawn]:
    """Draw the token at `positions[r]` of `choices[r]` from `logits[r]`: [R,W], W at least the vocabulary. Not changed.

    Temperatures below 1e-5 are greedy: the highest score, the lowest id among equals. Log-probabilities are of the
    model's own distribution: log-softmax of the logits as they came, before bias, penalties, temperature and filters.
    Raises `ValueError` if shapes or vocabularies disagree; what is wrong with a row is in its `Drawn`.
    """
    if not choices:
        return []
    raw = _own_columns(logits, choices, positions)
    scores = processors.edit(raw, choices)
    best, tokens = scores.max(1)  # [R]; the lowest id among equals; NaN wins
    sampled = [row for row, choice in enumerate(choices) if not choice.greedy]
    if sampled:
        at = _rows(sampled, len(choices), raw.device)
        some = [choices[row] for row in sampled]
        tokens[at] = _sample(scores[at].float(), best[at], some, [positions[row] for row in sampled])
    columns = [tokens.double()[:, None], best.double()[:, None]]
    wanting = [row for row, choice in enumerate(choices) if choice.params.logprobs is not None]
    if wanting:
        columns.append(_logprobs(raw, tokens, choices, wanting))
    table: list[list[float]] = torch.cat(columns, 1).tolist()  # the one transfer to the host
    return [_drawn(line, choice, pos) for line, choice, pos in zip(table, choices, positions, strict=True)]


def _own_columns(logits: Tensor, choices: Sequence[Choice], positions: Sequence[int]) -> Tensor:
    """The columns [R,V] that are tokens; a padded output layer has more."""
    vocab = choices[0].vocab_size
    if any(choice.vocab_size != vocab for choice in choices):
        raise ValueError(f"choices of different vocabularies in one draw: {sorted({c.vocab_size for c in choices})}")
    if logits.ndim != 2 or logits.shape[0] != len(choices) or len(positions) != len(choices):
        raise ValueError(f"{len(choices)} choices, {len(positions)} positions, logits {tuple(logits.shape)}")
    if not 0 < vocab <= min(logits.shape[1], processors.MAX_VOCAB):
        raise ValueError(f"a vocabulary of {vocab}; logits have {logits.shape[1]}, the most is {processors.MAX_VOCAB}")
    return logits[:, :vocab]


def _rows(some: list[int], count: int, device: torch.device) -> "Tensor | slice":
    """Where these rows are; all of them need no index."""
    return slice(None) if len(some) == count else torch.tensor(some, device=device)


def _sample(scores: Tensor, best: Tensor, choices: list[Choice], positions: list[int]) -> Tensor:
    """Draw from scores [R,V] float32, all rows of which sample. -> [R] int64"""
    params = [choice.params for choice in choices]
    chances = [choice.uniform(pos) for choice, pos in zip(choices, positions, strict=True)]
    knobs = torch.tensor(
        [(*_knobs(p), u) for p, u in zip(params, chances, strict=True)],
        dtype=torch.float64,
        device=scores.device,
    )
    temperature, top_h, top_k, typical_p, top_p, min_p, epsilon, eta, chance = knobs.unbind(1)
    below, weights = processors.weigh(scores, best, temperature)
    vocab = scores.shape[1]

    def run(wants: Callable[[SamplingParams], bool], stage: Callable[["Tensor | slice"], Tensor]) -> None:
        rows = [row for row, p in enumerate(params) if wants(p)]
        if rows:
            at = _rows(rows, len(params), scores.device)
            weights[at] = stage(at)

    run(lambda p: p.top_h is not None, lambda at: processors.keep_top_h(weights[at], scores[at], top_h[at]))
    largest_k = max((p.top_k for p in params if p.top_k < vocab), default=0)
    run(
        lambda p: 0 < p.top_k < vocab,
        lambda at: processors.keep_top_k(weights[at], scores[at], top_k[at], largest_k),
    )
    run(lambda p: p.typical_p < 1, lambda at: processors.keep_typical(weights[at], below[at], typical_p[at]))
    run(lambda p: p.top_p < 1, lambda at: processors.keep_top_p(weights[at], scores[at], top_p[at]))
    run(lambda p: p.min_p > 0, lambda at: processors.keep_min_p(weights[at], min_p[at]))
    run(lambda p: 0 < p.epsilon_cutoff < 1, lambda at: processors.keep_epsilon(weights[at], epsilon[at]))
    run(lambda p: 0 < p.eta_cutoff < 1, lambda at: processors.keep_eta(weights[at], below[at], eta[at]))
    return processors.pick(weights, chance)


def _knobs(p: SamplingParams) -> tuple[float, ...]:
    """In the order in which they are applied."""
    top_h = 1.0 if p.top_h is None else p.top_h
    return p.temperature, top_h, p.top_k, p.typical_p, p.top_p, p.min_p, p.epsilon_cutoff, p.eta_cutoff


def _logprobs(raw: Tensor, tokens: Tensor, choices: Sequence[Choice], wanting: list[int]) -> Tensor:
    """For the rows that want it: logprob of the token, n ids, n logprobs. -> [R,1+2n] float64, zero elsewhere"""
    at = _rows(wanting, len(choices), raw.device)
    most = max(choices[row].params.logprobs or 0 for row in wanting)
    most = min(most, raw.shape[1])
    scores = raw[at].float()
    ids = torch.cat([tokens[at][:, None], processors.ranked(scores, most)], 1) if most else tokens[at][:, None]
    sums = torch.logsumexp(scores.double(), 1, keepdim=True)
    values = (scores.gather(1, ids).double() - sums).float().double()  # summed in float64, told in float32
    table = torch.zeros(len(choices), 1 + 2 * most, dtype=torch.float64, device=raw.device)
    table[at] = torch.cat([values[:, :1], ids[:, 1:].double(), values[:, 1:]], 1)
    return table


def _drawn(line: list[float], choice: Choice, pos: int) -> Drawn:
    """Read one line of the table: token, best score, then log-probabilities if any row wanted them."""
    token, best, *rest = line
    if not math.isfinite(best):
        return Drawn(-1, error=NoToken(_why(best, choice, pos)))
    asked = choice.params.logprobs
    if asked is None:
        return Drawn(int(token))
    most = len(rest) // 2
    ids, values = rest[1 : 1 + most], rest[1 + most :]
    top = tuple((int(i), value) for i, value in zip(ids[:asked], values[:asked], strict=True))
    return Drawn(int(token), TokenLogprob(int(token), rest[0], top))


def _why(best: float, choice: Choice, pos: int) -> str:
    """Say why no token can be drawn when the best score is NaN or infinite."""
    where = f"no token can be drawn at pos {pos} of choice {choice.choice}"
    if best == -math.inf:
        return (
            f"{where}: all {choice.vocab_size} tokens are forbidden. Ask for less of "
            f"min_tokens, suppress_tokens, bad_words_ids or no_repeat_ngram_size, or check the model."
        )
    kind = "NaN" if math.isnan(best) else "infinity"
    return f"{where}: the scores hold {kind}. The weights may be damaged; if not, load the model with dtype float32."
