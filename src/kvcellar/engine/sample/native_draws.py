"""native_draws: the draw of `draw.py` on CPUs, by a compiled kernel: one pass for each row, no sort of a vocabulary.

Always true: a token is the one that `draw.py` draws, unless an exponential that is rounded differently moves a sum of
weights, which are whole numbers of 2**-40, across the noise or across the edge of a filter.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcellar.engine.sample.couple import Draft
from kvcellar.engine.sample.draw import Drawn, Draws, Proposed, coupled_tokens, drawn_of, own_columns, scored_of
from kvcellar.engine.sample.matcher import WORD_BITS
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.events import TokenLogprob
from kvcellar.kernels.sampling import TYPES, SampleKernel

COUPLED = 2**19  # weights that are coupled at once: they stay in the caches of a CPU


class NativeDraws(Draws):
    """Draws from logits on the CPU."""

    def __init__(self, kernel: SampleKernel) -> None:
        self._kernel = kernel

    def clear(self) -> None:
        self._kernel.clear()

    def draw(
        self, logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int], drafts: Sequence[Draft | None] = ()
    ) -> list[Drawn]:
        if not samplers:
            return []
        if len(positions) != len(samplers):
            raise ValueError(f"{len(samplers)} samplers, {len(positions)} positions")
        raw = own_columns(logits, samplers)
        couples = any(one is not None and one.weights is not None for one in drafts)
        most = max(1, COUPLED // raw.shape[1]) if couples else len(samplers)
        parts = (slice(start, start + most) for start in range(0, len(samplers), most))
        return [one for at in parts for one in self._part(raw[at], samplers[at], positions[at], drafts[at])]

    def _part(
        self, raw: Tensor, samplers: Sequence[Sampler], positions: Sequence[int], drafts: Sequence[Draft | None]
    ) -> list[Drawn]:
        chances = [0.0 if one.greedy else one.uniform(pos) for one, pos in zip(samplers, positions, strict=True)]
        coupled = [
            row
            for row, (sampler, draft) in enumerate(zip(samplers, drafts, strict=bool(drafts)))
            if draft is not None and draft.weights is not None and not sampler.greedy
        ]
        rows, weights, tops = self._drawn(raw, samplers, chances, coupled, logprobs=True)
        tokens: list[int] = [row.token for row in rows]
        if coupled and (at := [row for row in coupled if tokens[row] >= 0]):
            some = [(samplers[row], positions[row], drafts[row]) for row in at]
            drawn_from = torch.stack([weights[row] for row in at])
            for row, token in zip(at, coupled_tokens(drawn_from, some).tolist(), strict=True):
                tokens[row] = token
                rows[row].value = float(np.float32(float(raw[row, token]) - rows[row].log_sum))
        found: list[Drawn] = []
        for at, (row, sampler, pos) in enumerate(zip(rows, samplers, positions, strict=True)):
            ids, values = tops.get(at, ((), ()))
            found.append(drawn_of((tokens[at], row.best, row.value, *ids, *values), sampler, pos))
        return found

    def propose(self, logits: Tensor, samplers: Sequence[Sampler], chances: Sequence[float]) -> list[Proposed]:
        sampled = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
        rows, weights, _ = self._drawn(own_columns(logits, samplers), samplers, chances, sampled, logprobs=False)
        return [Proposed(row.token, row.best, weights.get(at)) for at, row in enumerate(rows)]

    def score(self, logits: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprob]:
        raw, most = _readable(logits), min(most, logits.shape[1])
        rows, found = self._kernel.rows(raw), []
        ids, values = torch.zeros(len(rows), most, dtype=torch.int64), torch.zeros(len(rows), most, dtype=torch.float64)
        for at, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            row.logprobs, row.scores, row.token = most, 1, token
            row.top, row.values = ids[at].data_ptr(), values[at].data_ptr()
        self._kernel.draw(rows, raw.shape[1], raw.dtype)
        for row, top, each in zip(rows, ids.tolist(), values.tolist(), strict=True):
            found.append(scored_of(row.token, row.log_sum, row.rank, [row.value, *each], top))
        return found

    def _drawn(
        self,
        raw: Tensor,
        samplers: Sequence[Sampler],
        chances: Sequence[float],
        weighed: Sequence[int],
        *,
        logprobs: bool,
    ) -> tuple[Any, dict[int, Tensor], dict[int, tuple["array[int]", "array[float]"]]]:
        """The rows of the kernel after the draw; the weights [V] of the rows `weighed`; ids and values of the best
        logits of rows that ask for them."""
        raw = _readable(raw)
        vocab = raw.shape[1]
        rows = self._kernel.rows(raw)
        weights = dict(zip(weighed, torch.empty(len(weighed), vocab, dtype=torch.int64), strict=True))
        tops: dict[int, tuple[array[int], array[float]]] = {}
        used: list[Any] = []  # arrays that rows have the addresses of
        for at, (row, sampler, chance) in enumerate(zip(rows, samplers, chances, strict=True)):
            _edits(row, sampler, vocab, used)
            p = sampler.params
            row.greedy, row.chance, row.logprobs = sampler.greedy, chance, -1
            if not sampler.greedy:
                row.temperature, row.top_h = p.temperature, p.top_h or 0.0
                row.top_k, row.typical_p, row.top_p, row.min_p = p.top_k, p.typical_p, p.top_p, p.min_p
                row.epsilon, row.eta = p.epsilon_cutoff, p.eta_cutoff
            if at in weights:
                row.weights = weights[at].data_ptr()
            if logprobs and p.logprobs is not None:
                row.logprobs = min(p.logprobs, vocab)
                tops[at] = array("q", bytes(8 * row.logprobs)), array("d", bytes(8 * row.logprobs))
                row.top, row.values = (each.buffer_info()[0] for each in tops[at])
        self._kernel.draw(rows, vocab, raw.dtype)
        return rows, weights, tops


def _readable(logits: Tensor) -> Tensor:
    """As the kernel reads them."""
    logits = logits if logits.dtype in TYPES else logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _edits(row: Any, sampler: Sampler, vocab: int, used: list[Any]) -> None:
    """Fill in which scores change, and how."""
    ids, values = sampler.biases()
    if ids:
        (row.biased, row.n_biased), row.biases = ids.buffer_info(), values.buffer_info()[0]
        used += (ids, values)
    if sampler.penalised:
        p, prompt = sampler.params, sampler.prompt_seen()
        row.repetition, row.frequency = p.repetition_penalty, p.frequency_penalty
        row.presence = p.presence_penalty
        row.prompt, row.n_prompt = prompt.buffer_info()
        row.seen, row.n_seen = sampler.seen_ids.buffer_info()
        row.counts = sampler.seen_counts.buffer_info()[0]
        used.append(prompt)
    if boost := sampler.end_boost():
        row.boost, (row.ends, row.n_ends) = boost, sampler.end_array.buffer_info()
    if forbidden := sampler.forbidden():
        row.forbidden, row.n_forbidden = forbidden.buffer_info()
        used.append(forbidden)
    if sampler.matcher is not None:
        mask = np.empty(-(-vocab // WORD_BITS), np.int32)
        sampler.fill_mask(mask)
        row.mask = mask.ctypes.data
        used.append(mask)
