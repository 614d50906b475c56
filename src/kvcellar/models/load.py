"""load: find a model on this machine and build its network. Offline, safetensors only, no code but transformers' own.

A name is a directory, or `owner/name` of something already in the local Hugging Face cache. Everything in the directory
is a stranger's: sizes are checked before anything is read or allocated, keys of the config that could run code or
change our attention are dropped, and what is missing or does not fit is refused with its reason.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from kvcellar.errors import BadRequest, ModelRefused, shown
from kvcellar.models import embedded
from kvcellar.models.advice import FIELDS, Advice, advice
from kvcellar.models.checks import config_fields, oversized_text, read_object
from kvcellar.models.facts import context_of
from kvcellar.models.find import find
from kvcellar.models.quiet import quiet
from kvcellar.models.shared_weights import sharing_weights
from kvcellar.models.weights import Weights, check_depth, check_shapes, fill, opened
from kvcellar.progress import report

log = logging.getLogger("kvcellar.models")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors calls them
_ALONE = "a network came alone"
_STRANGE = (  # what transformers raises on configs, weights and tokenizers that do not fit
    OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError, AttributeError, ArithmeticError,
    AssertionError, MemoryError, StrictDataclassError, SafetensorError,
)  # fmt: skip


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
    notes: tuple[str, ...] = ()  # what of its files is not used or not followed


def load(model: str | Path | PreTrainedModel | None, *, dtype: Dtype = "auto", device: str = "auto") -> Loaded:
    """Build the network of a directory, a name, or (None) the embedded model. Raises `ModelNotFound`, `ModelRefused`,
    and `BadRequest` for what is none of these.

    A network that exists already stays as it is, where and in what type it is: what is loaded is a copy of its modules
    that shares its weights.
    """
    if isinstance(model, PreTrainedModel):
        found = _advice(model).without("stop", _ALONE)
        _log_notes(type(model).__name__, found.notes)
        return Loaded(
            name=type(model).__name__,
            path=None,
            model=sharing_weights(model),
            end_ids=_end_ids(model),
            defaults=found.sampling,
            parameters=_count(model),
            without_text=_ALONE,
            notes=found.notes,
        )
    if model is not None and not isinstance(model, str | Path):
        raise BadRequest(f"model is a directory, a name, or a model of transformers, not {shown(model)}", "model")
    place = _device(device)
    name, path = ("embedded", embedded.path()) if model in (None, "embedded") else find(model)
    with quiet():
        fields = config_fields(path)
        rules = _rules(path, fields)
        advice(rules)  # refuses what cannot be followed before anything is built
        with opened(path) as weights:
            config = _config(fields, weights)
            report(f"building {config.model_type}")  # transformers imports its module now
            network, notes = _build(path, config, _dtype(dtype, config, weights), weights)
        network.generation_config = _generation(path, rules)
        network.to(device=place)  # pyright: ignore[reportCallIssue, reportArgumentType] - its stub is of a decorator
        text = _text(path, config)
    found = advice(rules, context=context_of(network))
    found = found.without("stop", text) if isinstance(text, str) else found
    notes = (*notes, *found.notes)
    _log_notes(name, notes)
    return Loaded(
        name=name,
        path=path,
        model=network,
        end_ids=_end_ids(network),
        defaults=found.sampling,
        parameters=_count(network),
        notes=notes,
        text=None if isinstance(text, str) else text,
        without_text=text if isinstance(text, str) else "",
    )


def _log_notes(name: str, notes: Iterable[str]) -> None:
    for note in notes:
        log.warning("%s: %s", name, note)


def _rules(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the generation config says: a file of its own, or else fields of old config files."""
    file = path / "generation_config.json"
    if file.is_file():
        return read_object(file)
    return {name: value for name, value in fields.items() if name in FIELDS}


def _config(fields: Mapping[str, Any], weights: Weights) -> Any:
    """The transformers config, checked against the weights; nothing is built yet."""
    check_depth(fields, weights)
    try:
        return AutoConfig.for_model(**fields)
    except _STRANGE as error:
        raise ModelRefused(f"config.json does not fit {fields['model_type']}: {error}") from error


def _generation(path: Path, rules: Mapping[str, Any]) -> GenerationConfig:
    """The same as transformers' object."""
    own = (path / "generation_config.json").is_file()
    try:
        return GenerationConfig.from_dict({**rules, **({} if own else {"_from_model_config": True})})
    except _STRANGE as error:
        raise ModelRefused(f"the generation config of {path.name} is none that transformers takes: {error}") from error


def _dtype(dtype: Dtype, config: Any, weights: Weights) -> torch.dtype:
    """The type that was asked for, else the config's, else that of the weights."""
    if dtype != "auto":
        return _DTYPES[dtype]
    said = config.dtype or config.get_text_config(decoder=True).dtype or _STORED.get(weights.dtype or "", weights.dtype)
    if not isinstance(said, torch.dtype) or said not in _DTYPES.values():
        raise ModelRefused(f"its weights are {said}; name a dtype to have them as float32, bfloat16 or float16")
    return said


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise BadRequest(f"there is no device {device!r}", "device") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ModelRefused(
            f"device {device!r} was asked for, and torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use device='cpu' or 'auto'."
        )
    return place


def _build(path: Path, config: Any, dtype: torch.dtype, weights: Weights) -> tuple[PreTrainedModel, list[str]]:
    """The network, and what a user may not expect of it."""
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except _STRANGE as error:
        raise ModelRefused(f"transformers cannot build a {config.model_type} from config.json: {error}") from error
    check_shapes(skeleton, weights)
    _check_room(_count(skeleton) * dtype.itemsize + sum(buffer.nbytes for buffer in skeleton.buffers()))
    try:
        return fill(skeleton, dtype, weights)
    except _STRANGE as error:
        weights.check_unchanged()  # then this is why
        raise ModelRefused(f"transformers cannot build {path.name}: {error}") from error


def _check_room(size: int) -> None:
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > most:
        raise ModelRefused(f"its weights and tables need {size} bytes; this machine has {most} bytes of memory in all")


def _count(model: PreTrainedModel) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _end_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-text ids: of the generation config, else of the config."""
    for source in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(one, int) for one in ids):
                raise ModelRefused(f"eos_token_id is {ids}; whole numbers are needed")
            return frozenset(one for one in ids if one >= 0)
    return frozenset()


def _advice(model: PreTrainedModel) -> Advice:
    """Of a network that was built elsewhere."""
    config: GenerationConfig | None = model.generation_config
    return Advice({}) if config is None else advice(vars(config), context=context_of(model))


def _text(path: Path, config: Any) -> TextAssets | str:
    """The tokenizer and its template, or why there is none."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return "the directory has no tokenizer"
    if (why := oversized_text(path)) is not None:
        return why
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, config=config, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing more special than this
        return f"transformers cannot build its tokenizer: {type(error).__name__}: {error}"
    if not tokenizer.is_fast:
        return f"its tokenizer {type(tokenizer).__name__} has no fast form"
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {role: str(text) for role, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TextAssets(tokenizer.backend_tokenizer, special, template)
