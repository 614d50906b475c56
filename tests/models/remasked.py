"""Reference logits with changed masks: the model's eager forward, in which a test decides what each row sees."""

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> whether the row sees the key


def remasked_logits(
    model: PreTrainedModel, tokens: Sequence[int], change: Callable[[Rule], Rule], positions: Sequence[int]
) -> Tensor:
    """[L,V] of one forward without a cache, with `change(rule)` in place of each mask rule of the model."""
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
    assert made, "the model made no mask"
    return out.logits[0].float()
