"""edits: how the scores of rows are changed before they are weighed: in place, all rows of a step at once. The cost is
that of the tokens which are changed, not of the vocabulary.

R rows, V vocabulary, K tokens that are changed, of all rows together.
"""

from array import array
from collections.abc import Mapping

import torch
from torch import Tensor

from kvcellar.kernels.uploads import sent
from kvcellar.sample.sampler import Sampler


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
