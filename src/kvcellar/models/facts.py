"""facts: numbers that a model says about itself, read with care: configs of 180 kinds agree on little."""

from collections.abc import Mapping
from typing import Any

from torch import Generator, Tensor, randint
from torch.nn import Embedding
from transformers import PreTrainedModel


def context_of(model: PreTrainedModel) -> int:
    """Positions that can be served: those that the model is made for, and no more than `context_reason` lets."""
    made = _made_for(model)
    return min([made, *(length for _, length in _changes(model, made))])


def context_reason(model: PreTrainedModel) -> str | None:
    """Why the context ends where it does, if not because the model is made for no more.

    RoPE kinds that change all frequencies once a sequence is longer than some length (longrope, dynamic) would make
    keys stored before that wrong.
    """
    context = context_of(model)
    for kind, length in _changes(model, _made_for(model)):
        if length == context:
            return (
                f"its {kind} rope has other frequencies in sequences of more than {length} tokens, and the keys stored "
                f"before that length would become wrong"
            )
    return None


def first_position(model: PreTrainedModel) -> int:
    """What the model calls its first position: learned tables that set a row aside for padding begin behind it."""
    tables = [
        m for name, m in model.named_modules() if name.endswith("position_embeddings") and isinstance(m, Embedding)
    ]
    return max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)


def padding_token(model: PreTrainedModel) -> int | None:
    """The token that is no text, where a table of positions sets a row aside for it: it is passed over when positions
    are counted. None where every token is text."""
    return first_position(model) - 1 if first_position(model) else None


def random_text(model: PreTrainedModel, tokens: int, draw: Generator) -> list[int]:
    """So many tokens that the model can read, the same on every machine."""
    ids = randint(0, embedding_rows(model), (tokens,), generator=draw, device=draw.device)
    padding = padding_token(model)
    return (ids if padding is None else ids.masked_fill(ids == padding, padding + 1)).tolist()


def embedding_rows(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])


def _made_for(model: PreTrainedModel) -> int:
    """Positions that its config names."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    sizes = [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]
    return (sizes[0] if sizes else 2**17) - first_position(model)


def _changes(model: PreTrainedModel, made: int) -> list[tuple[str, int]]:
    """Kinds of rope whose frequencies are others beyond a length of up to `made` positions, and that length."""
    config = model.config.get_text_config(decoder=True)
    of_all = getattr(config, "original_max_position_embeddings", None)
    found: list[tuple[str, int]] = []
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):
            found.append((kind, int(rope.get("original_max_position_embeddings") or of_all or made)))
    return [(kind, length) for kind, length in found if length <= made]


def _ropes(parameters: Any) -> list[Mapping[str, Any]]:
    if not isinstance(parameters, Mapping):
        return []
    return [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, Mapping)]
