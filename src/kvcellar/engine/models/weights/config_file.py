"""config_file: read config.json and other JSON files of a model directory, with limits on their size and numbers.
Neither torch nor transformers is needed, but to choose the fields of a config.

A model directory is not trusted: sizes are checked before anything is read or built, and fields that could name other
code or other files are dropped. Everything here raises `ModelRefused`, with the numbers and the remedy, if any.

In the files of sentence-transformers, `modules.json` lists what follows the network: a pooling, and perhaps a
normalisation. A model for which anything else is listed than what is computed here is not an embedding model, with the
reason.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelRefused
from kvcellar.events import Pooling, PoolingMode

MOST_JSON = 64 << 20  # bytes of a config or an index, far above any real one

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_SIZES = {  # whole numbers, if present, and the maximum of each
    **dict.fromkeys(DEPTHS, 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), 10_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "intermediate_size", "ffn_dim"), 1 << 20),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 1 << 24),
    "vocab_size": 1 << 31,
}
_COUNTS = (  # patterns of other names, and the maximum of each: so many modules may be built
    (re.compile(r"(n|num)_\w*(layer|head|block)s?|\w+_(layers|heads)"), 10_000),
    (re.compile(r"(n|num)_\w*experts?|\w+_experts"), 1 << 17),  # Doge has 16384 by default: rows of an embedding
)
_QUANTISED = ("quantization_config", "compression_config", "quantization")  # fields that describe stored weights
_DROPPED = frozenset({
    "auto_map", "transformers_weights", "attn_implementation", "experts_implementation",  # other code, other files
    "return_dict", "use_return_dict", "torchscript", "output_attentions", "output_hidden_states",  # other outputs
    *_QUANTISED,  # which are decoded
})  # fmt: skip


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of bounded size."""
    raw = _read(path)
    if not isinstance(raw, dict):
        raise ModelRefused(f"{path.name} holds a {type(raw).__name__}, not an object")
    return raw


def read_list(path: Path) -> list[Any]:
    """The list in a JSON file of bounded size."""
    raw = _read(path)
    if not isinstance(raw, list):
        raise ModelRefused(f"{path.name} holds a {type(raw).__name__}, not a list")
    return raw


def _read(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MOST_JSON:
            raise ModelRefused(f"{path.name} has {size} bytes; {MOST_JSON} are allowed")
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except OSError as error:
        raise ModelRefused(f"{path.name} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path.name} is not JSON: {error}") from error


def _number(found: dict[str, Any]) -> Any:
    """transformers writes a float that JSON cannot represent as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def text_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The fields of config.json, and those of the text model in it."""
    return [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]


def quantisations(config: Mapping[str, Any]) -> Iterator[Any]:
    """What config.json says of quantised weights, each time that it does."""
    for part in text_parts(config):
        yield from (part[key] for key in _QUANTISED if part.get(key))


def config_fields(path: Path) -> dict[str, Any]:
    """The fields of config.json that a transformers config may be built from."""
    from transformers.models.auto.modeling_auto import (  # imports torch
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if (path / "adapter_config.json").exists():
        raise ModelRefused(
            f"{path} holds an adapter (adapter_config.json). Load the model that it is for, and the adapter beside it "
            f"(adapters={{'name': directory}}), or remove adapter_config.json to serve the model without it."
        )
    if not (path / "config.json").is_file():
        raise ModelRefused(f"{path} has no config.json, so it is not a model directory")
    raw = read_object(path / "config.json")
    model_type = raw.get("model_type")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    if not isinstance(model_type, str) or model_type not in known:
        own_code = ". It has its own code (auto_map), which is never run" if "auto_map" in raw else ""
        raise ModelRefused(f"the installed transformers has no causal language model of type {model_type!r}{own_code}")
    _check_fields(raw, depth=0)
    return _cleaned(raw)


def has_vision(path: Path) -> bool:
    """Whether transformers has a network that reads images for the model of a directory."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return config_fields(path)["model_type"] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def _check_fields(raw: Mapping[str, Any], *, depth: int) -> None:
    if depth > 8:
        raise ModelRefused("config.json is nested deeper than any model's")
    for key, value in raw.items():
        if isinstance(value, dict):
            _check_fields(value, depth=depth + 1)
        elif isinstance(value, list):
            for part in (part for part in value if isinstance(part, dict)):
                _check_fields(part, depth=depth + 1)
        elif value is not None and not (key == "head_dim" and value == 0 == raw.get("qk_rope_head_dim")):  # no rotation
            _check_field(key, value)


def _check_field(key: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    most = _SIZES.get(key)
    if most is not None and not (whole and 0 < value <= most):
        raise ModelRefused(f"config.json: {key} is {value!r}; a whole number from 1 to {most} is needed")
    counted = [limit for name, limit in _COUNTS if name.fullmatch(key)] if most is None else []
    if whole and counted and not -1 <= value <= counted[0]:
        raise ModelRefused(f"config.json: {key} is {value}; at most {counted[0]} are supported")
    if whole and abs(value) > 1 << 53:
        raise ModelRefused(f"config.json: {key} is {value}, which is no valid size")


def _cleaned(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without private fields and those that could name other code, other files or other outputs."""
    kept = {key: value for key, value in raw.items() if not key.startswith("_") and key not in _DROPPED}
    return {key: _cleaned(value) if isinstance(value, dict) else value for key, value in kept.items()}


MODULES, POOLING = "modules.json", "1_Pooling"
NONE = f"its directory has no {MODULES} and no {POOLING}/config.json, which say how hidden states are pooled"
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}


def pooling_of(path: Path) -> Pooling | str:
    """How the model of a directory pools, or why it does not embed. Raises nothing."""
    try:
        return _pooling(path)
    except ModelRefused as refused:
        return str(refused)


def _pooling(path: Path) -> Pooling | str:
    folder, normalised = POOLING, False
    if (path / MODULES).is_file():
        kinds = {}
        for module in read_list(path / MODULES):
            kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
            kinds[kind] = module.get("path") if isinstance(module, dict) else None
        if unknown := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
            return f"its {MODULES} lists {unknown[0] or 'a module without a type'}, which is not computed here"
        if "Pooling" not in kinds:
            return f"its {MODULES} lists no pooling"
        folder, normalised = kinds["Pooling"], "Normalize" in kinds
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            return f"the pooling in its {MODULES} has no folder"
    elif not (path / POOLING / "config.json").is_file():
        return NONE
    if not (path / folder / "config.json").is_file():
        return f"its {MODULES} names {folder}/config.json, which is not there"
    mode = _mode(read_object(path / folder / "config.json"))
    if mode not in ("last", "mean"):
        return mode
    config = read_object(path / "config.json")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return "its attention sees later tokens, which is not computed here"
    return Pooling(mode, normalised, _sizes(config))


def _mode(fields: dict[str, Any]) -> Any:
    """The mode, or the reason why it cannot be used."""
    named = fields.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else [
        name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True
    ]  # fmt: skip
    if len(chosen) != 1 or chosen[0] not in _MODES:
        names = " and ".join(name.removeprefix("pooling_mode_") for name in chosen) or "nothing"
        return f"it pools by {names}; only the last token or the mean of all is computed here"
    if fields.get("include_prompt") is False:
        return "it leaves its prompt out of the pooling, which is not computed here"
    return _MODES[chosen[0]]


def _sizes(config: dict[str, Any]) -> frozenset[int] | None:
    """Of a Matryoshka model, as its config declares it."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        return frozenset(size for size in listed if isinstance(size, int) and size > 0)
    return None if config.get("is_matryoshka") is True else frozenset()
