"""load: find a model on this machine and build its network. Offline, safetensors only, no code but transformers' own.

A name is a directory, or `owner/name` of something already in the local Hugging Face cache. Everything in the directory
is a stranger's: sizes are checked before anything is read or allocated, keys of the config that could run code or
change our attention are dropped, and what is missing or does not fit is refused with its reason.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcellar.errors import ModelNotFound, ModelRefused
from kvcellar.models import embedded

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_MOST_JSON = 64 << 20  # bytes of a config, an index or a template: far above any real one
_BOUNDS = {  # what a config may say before we build anything from it
    "num_hidden_layers": 1_000, "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "vocab_size": 1 << 23,
    "num_attention_heads": 4_096, "num_key_value_heads": 4_096, "head_dim": 8_192, "max_position_embeddings": 1 << 31,
}  # fmt: skip
_DROPPED = ("auto_map", "_attn_implementation", "_attn_implementation_internal", "_experts_implementation_internal")


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What the text room needs: a `tokenizers.Tokenizer`, special tokens by role, the chat template."""

    tokenizer: Any
    special: Mapping[str, str]  # "bos_token" -> its text, and so on
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A network with what came beside it. `without_text` says why there is no tokenizer, if there is none."""

    name: str
    path: Path | None
    model: PreTrainedModel
    end_ids: frozenset[int]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling, from generation_config.json
    parameters: int = 0
    text: TextAssets | None = None
    without_text: str = ""


def load(model: str | Path | PreTrainedModel | None, *, dtype: Dtype = "auto", device: str = "auto") -> Loaded:
    """Build the network of a directory, a name, or (None) the embedded model. Raises `ModelNotFound`, `ModelRefused`.

    A network that exists already is taken as it is, where and in what type it is.
    """
    if isinstance(model, PreTrainedModel):
        return Loaded(
            name=type(model).__name__,
            path=None,
            model=model,
            end_ids=_end_ids(model),
            defaults=_defaults(model),
            parameters=_count(model),
            without_text="a network came alone",
        )
    name, path = ("embedded", embedded.path()) if model in (None, "embedded") else find(model)
    config = _config(path)
    _check_weights(path)
    network = _build(path, config, _dtype(dtype, config))
    network.to(device=_device(device))  # pyright: ignore[reportCallIssue, reportArgumentType] - its stub is of a decorator
    text = _text(path)
    assets, why = (text, "") if isinstance(text, TextAssets) else (None, text)
    return Loaded(name, path, network, _end_ids(network), _defaults(network), _count(network), assets, why)


def find(model: str | Path) -> tuple[str, Path]:
    """(name, directory) of a model on this machine."""
    text = str(model)
    if not text or len(text) > 4096 or "\0" in text:
        raise ModelNotFound(f"{text[:80]!r} is neither a directory nor the name of a model")
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path.resolve()
    if path.exists():
        raise ModelRefused(f"{path} is a file; a model is a directory with config.json and safetensors weights")
    if not _NAME.fullmatch(text):
        raise ModelNotFound(f"there is no directory {text!r}, and it is not a name like owner/model")
    try:
        return text, Path(snapshot_download(text, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelNotFound(
            f"there is no directory {text!r}, and no model of that name in the local Hugging Face cache. "
            "Nothing is downloaded: fetch it first, or give a directory."
        ) from error


def _json(path: Path) -> Any:
    if path.stat().st_size > _MOST_JSON:
        raise ModelRefused(f"{path.name} has {path.stat().st_size} bytes; {_MOST_JSON} are allowed")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path.name} is not JSON: {error}") from error


def _config(path: Path) -> Any:
    """The transformers config, from a checked and cleaned copy of config.json."""
    if not (path / "config.json").is_file():
        raise ModelRefused(f"{path} has no config.json, so it is not a model directory")
    raw = _json(path / "config.json")
    if not isinstance(raw, dict):
        raise ModelRefused("config.json is not an object")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        own_code = " It brings its own code, which is never run." if "auto_map" in raw else ""
        raise ModelRefused(f"the installed transformers has no causal language model of type {model_type!r}.{own_code}")
    _check_numbers(raw)
    raw = {key: value for key, value in raw.items() if key not in _DROPPED}
    try:
        return AutoConfig.for_model(**raw)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelRefused(f"config.json does not fit {model_type}: {error}") from error


def _check_numbers(raw: Mapping[str, Any]) -> None:
    for key, most in _BOUNDS.items():
        value = raw.get(key)
        if value is None or isinstance(value, list | dict):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise ModelRefused(f"config.json says {key} is {value!r}; a whole number from 1 to {most} is needed")
    for value in raw.values():
        if isinstance(value, dict):
            _check_numbers(value)


def _check_weights(path: Path) -> None:
    """Every weight file is there, inside the directory, and a whole safetensors file."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = _json(index)
        names = set(shards["weight_map"].values()) if isinstance(shards, dict) and "weight_map" in shards else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ModelRefused("model.safetensors.index.json does not list weight files of its own directory")
    elif (path / "model.safetensors").is_file():
        names = {"model.safetensors"}
    else:
        pickled = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickled:
            raise ModelRefused(
                f"{path.name} has only pickled weights ({', '.join(pickled[:3])}), which can run code when they are "
                "read. Convert them to safetensors."
            )
        raise ModelRefused(f"{path} has no model.safetensors")
    for name in sorted(names):
        if not (path / name).is_file():
            raise ModelRefused(f"the weight file {name} is missing")
        try:
            with safe_open(path / name, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise ModelRefused(f"{name} is not a whole safetensors file: {error}") from error


def _dtype(dtype: Dtype, config: Any) -> torch.dtype:
    if dtype == "auto":
        stored = getattr(config, "dtype", None)
        return stored if isinstance(stored, torch.dtype) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelRefused(
            f"device {device!r} was asked for, and torch sees no CUDA device. Use device='cpu' or 'auto'."
        )
    return torch.device(device)


def _build(path: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    try:
        built: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise ModelRefused(f"transformers cannot build {path.name}: {error}") from error
    model, report = built
    for what in ("missing_keys", "mismatched_keys"):
        if report.get(what):
            raise ModelRefused(f"the weights do not fit the config: {what} {sorted(map(str, report[what]))[:3]}")
    return model


def _count(model: PreTrainedModel) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _end_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-text ids: of the generation config, else of the config."""
    for source in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _defaults(model: PreTrainedModel) -> dict[str, Any]:
    """Sampling that the model's authors advise, under our names. Without `do_sample` that is greedy in transformers."""
    config: GenerationConfig | None = model.generation_config
    if config is None or not config.do_sample:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


def _text(path: Path) -> TextAssets | str:
    """The tokenizer and its template, or why there is none."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return "the directory has no tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        return f"transformers cannot build its tokenizer: {error}"
    if not tokenizer.is_fast:
        return f"its tokenizer {type(tokenizer).__name__} has no fast form"
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {role: str(text) for role, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TextAssets(tokenizer.backend_tokenizer, special, template)
