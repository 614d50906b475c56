"""Chains and logits for tests of drafts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.sample.sampler import Sampler
from kvcellar.engine.speculate.chain import Chain
from kvcellar.sampling_params import SamplingParams

VOCAB = 6


def sampler(prompt: Sequence[int] = (), *, noise: int = 1, vocab: int = VOCAB, end: int = -1, **fields: Any) -> Sampler:
    """`noise` is the seed of the sampler; a request has one only with `seed`."""
    ends = frozenset() if end < 0 else frozenset({end})
    params = SamplingParams(**fields)
    return Sampler(params, seed=noise, index=0, prompt_ids=prompt, vocab_size=vocab, end_ids=ends)


def chain(
    sampling: Sampler, room: int, *, text: Sequence[int] = (0,), pos: int | None = None, number: int = 0
) -> Chain:
    place = len(text) if pos is None else pos
    return Chain((number, 0), text, sampling, place, room, namespace="", shared=0)


def random_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0, scale: float = 1.5) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


class Model:
    """A target or a draft model: the logits of the token after `last` are a row of a table."""

    def __init__(self, seed: int, vocab: int = VOCAB, scale: float = 1.5) -> None:
        self.table = random_logits(vocab, vocab, seed=seed, scale=scale)

    def near(self, share: float) -> "Model":
        """Another model whose logits differ from these by `share` of noise."""
        other = Model(0)
        other.table = self.table + share * random_logits(*self.table.shape, seed=99)
        return other

    def __call__(self, last: Sequence[int]) -> Tensor:
        return self.table[list(last)]
