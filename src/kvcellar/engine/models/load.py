"""load: find a model on this machine and build its network. Offline, safetensors only, no code but transformers' own.

A name is a directory, or `owner/name` of a model in the local Hugging Face cache. A model directory is not trusted:
sizes are checked before anything is read or allocated, config fields that could run code or change attention are
dropped, and what is missing or does not fit is refused with the reason.

A network that the caller built is served through a copy with its own modules and configs, on the same weights.
Attention, eval mode, mixers and packed layers are changed in the copy, so the caller's network can be called, saved,
copied and moved at any time, and there is nothing to restore when the copy is dropped.

The tokenizer and the chat template of a directory are read here, too.
"""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import Error, deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.tokenization_utils_base import get_fast_tokenizer_file

from kvcellar.engine.models.described import AsStored, Described, Served
from kvcellar.engine.models.generation_defaults import FIELDS, GenerationDefaults, generation_defaults
from kvcellar.engine.models.hf_globals import building, silence_transformers
from kvcellar.engine.models.input_limits import context_of, limits_of
from kvcellar.engine.models.quantize.kinds import DENSE
from kvcellar.engine.models.quantize.reading import decoded
from kvcellar.engine.models.quantize.served import Coding, coding_of, given, replaced, sources_with_codes
from kvcellar.engine.models.weights.config_file import config_fields, read_object
from kvcellar.engine.models.weights.find import locate
from kvcellar.engine.models.weights.placement import check_placement
from kvcellar.engine.models.weights.weights_files import WeightsFiles, check_depth, check_shapes, opened
from kvcellar.engine.models.weights.weights_loading import check_types, fill, sources_of, targets_of
from kvcellar.errors import BadRequest, ModelRefused, TokenizerFailed, panics_of, shown
from kvcellar.library.names import EMBEDDED
from kvcellar.progress import report
from kvcellar.repository import MOST_TEXT, TEXTS
from kvcellar.text.tokens import TextAssets
from kvcellar.text.trial import TokenizerTrial


@contextmanager
def trial_of(path: Path) -> Generator[TokenizerTrial]:
    """The trial of a model's tokenizer, which begins now, and ends with the block."""
    file = path / _tokenizer_file(path / "tokenizer_config.json") if _too_long(path) is None else None
    with closing(TokenizerTrial(file if file is not None and file.is_file() else None)) as trial:
        yield trial


def text_assets(path: Path, config: Any, trial: TokenizerTrial) -> TextAssets | str:
    """The tokenizer and its template, or why there is none. Raises `ModelRefused` for unsafe files."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return "the directory has no tokenizer"
    if (why := _too_long(path)) is not None:
        return why
    try:
        trial.check_file()
    except TokenizerFailed as error:
        return f"transformers cannot build its tokenizer: {error}"
    try:
        with panics_of("the reader of its tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                path, config=config, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises plain Exception
        return f"transformers cannot build its tokenizer: {type(error).__name__}: {error}"
    if not tokenizer.is_fast:
        return f"its tokenizer {type(tokenizer).__name__} has no fast form"
    trial.check(tokenizer.backend_tokenizer)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {role: str(text) for role, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TextAssets(tokenizer.backend_tokenizer, special, template, tokenizer.response_template)


def _too_long(path: Path) -> str | None:
    for file in (*path.iterdir(), *(path / "additional_chat_templates").glob("*")):
        if file.suffix in TEXTS and file.is_file() and file.stat().st_size > MOST_TEXT:
            return f"{file.name} has {file.stat().st_size} bytes; {MOST_TEXT} are allowed"
    return None


def _tokenizer_file(config: Path) -> str:
    """The name of the file that transformers reads, which the config of a tokenizer may choose by their version."""
    try:
        return get_fast_tokenizer_file(json.loads(config.read_bytes())["fast_tokenizer_files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "tokenizer.json"  # it chooses none, or transformers fails on it in the same way


Network = TypeVar("Network", bound=nn.Module)


def sharing_weights(model: Network) -> Network:
    """A copy whose parameters and buffers share the storage of the original's. Raises `ModelRefused`.

    The copy has its own parameter objects, without gradients. Moving or casting the original replaces its tensors, so
    it does not affect the copy. Writing into a weight does.
    """
    held = [vars(module) | module._parameters | module._buffers for module in model.modules()]
    shared = {id(t): _shared(t) for tensors in held for t in tensors.values() if isinstance(t, Tensor)}
    try:
        return deepcopy(model, shared)  # a memo: objects in it are taken as copied
    except (Error, TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot be served: its modules cannot be copied: {error}. Load it from a directory"
        ) from error


def _shared(tensor: Tensor) -> Tensor:
    """A subclass of Parameter stays the same object, since `detach` may lose its other attributes."""
    return nn.Parameter(tensor.detach(), requires_grad=False) if type(tensor) is nn.Parameter else tensor


log = logging.getLogger("kvcellar.engine.models")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # names in safetensors
_BUILD_ERRORS = (  # what transformers raises for configs and weights that do not fit
    OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError, AttributeError, ArithmeticError,
    AssertionError, MemoryError, StrictDataclassError, SafetensorError,
)  # fmt: skip


@contextmanager
def refusing(what: str, weights: WeightsFiles | None = None) -> Generator[None]:
    """Within the block, what transformers raises is `ModelRefused`, which begins with `what`, unless a file of
    `weights` has changed, which is the cause then."""
    try:
        yield
    except _BUILD_ERRORS as error:
        if weights is not None:
            weights.check_unchanged()
        raise ModelRefused(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True)
class Loaded(Described):
    """A network and what belongs to it. `sources`: how its parameters are stored, by each name that they have; None:
    otherwise than as they are."""

    model: PreTrainedModel = field(kw_only=True)
    sources: Mapping[str, AsStored | None] = field(default_factory=dict[str, AsStored | None])


def load(
    model: str | Path | PreTrainedModel | None,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    weights: str = DENSE,
    check: Callable[[Loaded], bool] | None = None,
) -> Loaded:
    """Build the network of a directory, a name, or (None) the embedded model. Raises `ModelNotFound`, `ModelRefused`,
    and `BadRequest` for any other type. `check` is called with the model before its weights are read, which are on the
    meta device then; where it returns False, that model is returned. `weights` is one of `WEIGHTS` in
    `quantize/kinds.py`.

    A network that is given stays as it is, on its device and in its dtype: what is loaded is a copy of its modules that
    shares its weights.
    """
    if isinstance(model, PreTrainedModel):
        return _given(model, weights)
    if model is not None and not isinstance(model, str | Path):
        raise BadRequest(f"model is a directory, a name, or a model of transformers, not {shown(model)}", "model")
    place = _device(device)
    name, path = locate(EMBEDDED if model is None else model)
    with silence_transformers():
        fields = config_fields(path)
        generation = _generation_fields(path, fields)
        generation_defaults(generation)  # refuses invalid values before anything is built
        with opened(path) as files, trial_of(path) as trial:
            stored = decoded(files)
            config = config_of(fields, stored)
            report(f"building {config.model_type}")  # transformers imports its module now
            kind = _dtype(dtype, config, stored)
            skeleton = skeleton_of(config, kind)
            skeleton.generation_config = _generation_config(path, generation)
            defaults = generation_defaults(generation, context=context_of(skeleton))
            text = text_assets(path, config, trial)
            check_shapes(skeleton, stored)
            if check is not None:
                check_types(skeleton, stored, targets_of(skeleton, stored))
                outline = _loaded(name, path, skeleton, defaults, text)
                if not check(outline):
                    return outline
            coding = coding_of(skeleton, stored, weights, place, os.environ)
            network, notes = _filled(path, skeleton, kind, stored, coding if isinstance(coding, Coding) else None)
            network.generation_config = skeleton.generation_config
            if isinstance(coding, str):
                notes.append(f"its quantised weights are decoded when they are loaded: {coding}")
            loaded = _loaded(name, path, network, defaults, text, notes, stored.forms)
            sources = sources_of(network, stored)
            if isinstance(coding, Coding):
                loaded = replace(loaded, served=_replaced(path, network, coding, stored))
                sources = sources_with_codes(sources, network, stored, coding)
            loaded = replace(loaded, sources=sources)
        network.to(device=place)  # pyright: ignore[reportCallIssue, reportArgumentType] - its stub is of a decorator
    return _noted(loaded)


def text_of(path: Path) -> TextAssets | str:
    """The tokenizer and its template, as `load` finds them, or why there is none. Builds no network. Raises
    `ModelRefused`."""
    with silence_transformers(), opened(path) as files, trial_of(path) as trial:
        return text_assets(path, config_of(config_fields(path), decoded(files)), trial)


def is_network(model: object) -> TypeGuard[PreTrainedModel]:
    """Whether it is a model of transformers."""
    return isinstance(model, PreTrainedModel)


def _given(model: PreTrainedModel, weights: str) -> Loaded:
    """A network that was built by the caller."""
    check_placement(model)
    config: GenerationConfig | None = model.generation_config
    defaults = generation_defaults({} if config is None else vars(config), context=context_of(model))
    text = "the network was given without a tokenizer"
    loaded = _loaded(type(model).__name__, None, sharing_weights(model), defaults, text)
    return _noted(replace(loaded, served=given(loaded.model, weights, os.environ)))


def _loaded(
    name: str,
    path: Path | None,
    network: PreTrainedModel,
    defaults: GenerationDefaults,
    text: TextAssets | str,
    notes: Sequence[str] = (),
    forms: Mapping[str, str] | None = None,
) -> Loaded:
    """`text` is the reason if there is no tokenizer, `forms` are those of the weights files."""
    why = text if isinstance(text, str) else ""
    defaults = defaults.without("stop", why) if why else defaults
    assets = None if isinstance(text, str) else text
    stored = Counter((forms or {}).values())
    end_ids, parameters, notes = _end_ids(network), _count(network), (*notes, *defaults.notes)
    with refusing(f"{type(network).__name__} cannot be served"):
        limits = limits_of(network)
    about = (name, path, limits, end_ids, defaults.sampling, defaults.because)
    return Loaded(*about, parameters, assets, why, notes, stored=stored, model=network)


def _noted(loaded: Loaded) -> Loaded:
    """Log what of its files is not followed."""
    for note in loaded.notes:
        log.warning("%s: %s", loaded.name, note)
    return loaded


def _generation_fields(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of generation_config.json, or else of config.json, where old models have them."""
    file = path / "generation_config.json"
    if file.is_file():
        return read_object(file)
    return {name: value for name, value in fields.items() if name in FIELDS}


def _generation_config(path: Path, fields: Mapping[str, Any]) -> GenerationConfig:
    """The object that transformers' `generate` reads."""
    own = (path / "generation_config.json").is_file()
    with refusing(f"transformers does not accept the generation config of {path.name}"):
        return GenerationConfig.from_dict({**fields, **({} if own else {"_from_model_config": True})})


def config_of(fields: Mapping[str, Any], weights: WeightsFiles) -> Any:
    """The transformers config, checked against the weights; nothing is built yet."""
    check_depth(fields, weights)
    with refusing(f"config.json does not fit {fields['model_type']}"):
        return AutoConfig.for_model(**fields)


def _dtype(dtype: Dtype, config: Any, weights: WeightsFiles) -> torch.dtype:
    """The requested dtype, else the config's, else that of the weights."""
    if dtype != "auto":
        return _DTYPES[dtype]
    found = (
        config.dtype or config.get_text_config(decoder=True).dtype or _STORED.get(weights.dtype or "", weights.dtype)
    )
    if not isinstance(found, torch.dtype) or found not in _DTYPES.values():
        raise ModelRefused(f"its weights are {found}; name a dtype to have them as float32, bfloat16 or float16")
    return found


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise BadRequest(f"there is no device {device!r}", "device") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ModelRefused(
            f"device {device!r} was requested, and torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use device='cpu' or 'auto'."
        )
    return place


def skeleton_of(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The network without weights, on the meta device."""
    what = f"transformers cannot build a {config.model_type} from config.json"
    with refusing(what), building(), torch.device("meta"):
        sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        return kind.from_config(config, dtype=dtype, trust_remote_code=False)


def _filled(
    path: Path, skeleton: PreTrainedModel, dtype: torch.dtype, weights: WeightsFiles, coding: Coding | None
) -> tuple[PreTrainedModel, list[str]]:
    """The network with its weights but those of `coding`, and notes on what of the files is not used as stored."""
    later = coding.later if coding is not None else set[str]()
    coded = sum(math.prod(weights.tensors[name].shape) for name in later)
    plain = (_count(skeleton) - coded) * dtype.itemsize
    check_memory(plain + coded // 2 + sum(buffer.nbytes for buffer in skeleton.buffers()))  # codes have 4 bits or more
    with refusing(f"transformers cannot build {path.name}", weights):
        return fill(skeleton, dtype, weights, later=later)


def _replaced(path: Path, network: PreTrainedModel, coding: Coding, weights: WeightsFiles) -> Served:
    with refusing(f"the quantised weights of {path.name} cannot be read", weights):
        served = replaced(network, coding)
    weights.check_unchanged()
    return served


def check_memory(size: int) -> None:
    """Raise `ModelRefused` if this machine could never hold so many bytes."""
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
