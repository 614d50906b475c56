"""facts: numbers that a model says about itself, read with care: configs of 180 kinds agree on little."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def context_of(model: PreTrainedModel) -> int:
    """Positions that the model is made for.

    RoPE kinds that change all frequencies once a sequence is longer than some length (longrope, dynamic) would make
    keys stored before that wrong, so the context ends there.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    sizes = [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]
    context = sizes[0] if sizes else 2**17
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            context = min(context, int(original or context))
    return context


def embedding_rows(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])


def _ropes(parameters: Any) -> list[Mapping[str, Any]]:
    if not isinstance(parameters, Mapping):
        return []
    return [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, Mapping)]
