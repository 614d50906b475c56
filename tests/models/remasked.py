"""A judge whose masks are other than its own: the model's eager forward, of which each row sees what a test says."""

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> may the row see the key?


def remasked_logits(
    model: PreTrainedModel, tokens: Sequence[int], change: Callable[[Rule], Rule], positions: Sequence[int]
) -> Tensor:
    """[L,V] of one plain forward without a cache, with `change` of the rule of every mask that the model makes."""
    eager, made = ALL_MASK_ATTENTION_FUNCTIONS["eager"], 0

    def changed(*, mask_function: Rule, **rest: object) -> Tensor:
        nonlocal made
        made += 1
        return eager(mask_function=change(mask_function), **rest)

    assert model.config._attn_implementation == "eager"
    with mock.patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {"eager": changed}), torch.no_grad():
        out = model(
            input_ids=torch.tensor([list(tokens)]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            position_ids=torch.tensor([list(positions)]),
            use_cache=False,
        )
    assert made, "the model asked for no mask"
    return out.logits[0].float()
