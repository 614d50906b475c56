"""input_limits: which positions and token ids a model accepts, from its config and its embedding tables."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Generator, Tensor, randint
from torch.nn import Embedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PLACEHOLDERS = (  # names of the id of a placeholder in configs
    "image_token_id", "image_token_index", "img_token_id", "media_placeholder_token_id", "image_patch_id",
    "vision_token_id", "im_patch_id",
    "video_token_id",  # of networks of videos only: an image is a still one
)  # fmt: skip
IMAGE_MASK = "image_embeds_position_mask"  # the argument of networks that are told which rows are of images


@dataclass(frozen=True, slots=True)
class Limits:
    """What a network accepts. `context_reason` is why the context is shorter than its config says; `padding` is the
    token that cannot be part of a text, if there is one."""

    architecture: str  # its class
    vocab_size: int
    context: int
    context_reason: str | None
    padding: int | None


def limits_of(model: "PreTrainedModel") -> Limits:
    name, reason = type(model).__name__, context_reason(model)
    return Limits(name, vocabulary_of(model), context_of(model), reason, padding_token(model))


def context_of(model: "PreTrainedModel") -> int:
    """Positions that can be served: those of its config, limited to where its RoPE frequencies stay the same."""
    configured = _configured_context(model)
    return min([configured, *(length for _, length in _frequency_changes(model, configured))])


def context_reason(model: "PreTrainedModel") -> str | None:
    """Why the context is shorter than the config says; None if it is not.

    Some kinds of RoPE (longrope, dynamic) change all frequencies once a sequence exceeds some length, which makes the
    keys stored before that wrong.
    """
    context = context_of(model)
    for kind, length in _frequency_changes(model, _configured_context(model)):
        if length == context:
            return (
                f"its {kind} rope has other frequencies in sequences of more than {length} tokens, and the keys stored "
                f"before that length would become wrong"
            )
    return None


def first_position(model: "PreTrainedModel") -> int:
    """The model's number for position 0: learned tables that reserve a row for padding begin behind that row, and so do
    computed ones that count the tokens which are not padding."""
    tables: list[Any] = [
        m
        for name, m in model.named_modules()
        if (name.endswith("position_embeddings") and isinstance(m, Embedding))
        or callable(getattr(m, "create_position_ids_from_input_ids", None))
    ]
    return max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)


def padding_token(model: "PreTrainedModel") -> int | None:
    """The token that a model with such a table skips when it counts positions, so it cannot be part of a text; None if
    every token can."""
    return first_position(model) - 1 if first_position(model) else None


def random_tokens(model: "PreTrainedModel", tokens: int, draw: Generator) -> list[int]:
    """So many token ids that the model accepts, the same on every machine."""
    ids = randint(0, embedding_rows(model), (tokens,), generator=draw, device=draw.device)
    never = {padding_token(model), placeholder_of(model)}
    return [
        token if token not in never else next(one for one in range(3) if one not in never) for token in ids.tolist()
    ]


def placeholder_of(model: "PreTrainedModel") -> int | None:
    """The token that stands for a row of an image; None: its config names none. Where a network is told which rows are
    of images, it reads no tokens there, and the last one it knows is as good as any."""
    named = (one for name in PLACEHOLDERS if isinstance(one := getattr(model.config, name, None), int))
    found = next(named, (getattr(model.config, "vocabulary_map", None) or {}).get("<image>"))
    told = IMAGE_MASK in inspect.signature(model.forward).parameters
    return embedding_rows(model) - 1 if found is None and told else found


def embedding_rows(model: "PreTrainedModel") -> int:
    """The number of token ids that the model accepts."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])


def vocabulary_of(model: "PreTrainedModel") -> int:
    """Ids that can be read: rows of the embedding, and no more than the config's vocabulary."""
    rows = embedding_rows(model)
    named = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return min(rows, named) if isinstance(named, int) else rows


def _configured_context(model: "PreTrainedModel") -> int:
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    sizes = [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]
    return (sizes[0] if sizes else 2**17) - first_position(model)


def _frequency_changes(model: "PreTrainedModel", most: int) -> list[tuple[str, int]]:
    """Kinds of RoPE whose frequencies change beyond some length, with that length, if it is at most `most`."""
    config = model.config.get_text_config(decoder=True)
    default = getattr(config, "original_max_position_embeddings", None)
    found: list[tuple[str, int]] = []
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):
            found.append((kind, int(rope.get("original_max_position_embeddings") or default or most)))
    return [(kind, length) for kind, length in found if length <= most]


def _ropes(parameters: Any) -> list[Mapping[str, Any]]:
    """The parameters for all layers, or those of each kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    return [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, Mapping)]
