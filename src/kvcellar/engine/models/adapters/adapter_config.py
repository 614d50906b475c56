"""adapter_config: which layers an adapter changes, and how, by its adapter_config.json as `peft` writes it.

Only LoRA is supported: y = W x + s B A x, with s = alpha / r, or alpha / sqrt(r). Every field is followed, is without
effect after training, or is refused with the reason. `peft` gives these fields their meaning.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

from kvcellar.engine.models.name_patterns import matched
from kvcellar.engine.models.weights.config_file import read_object
from kvcellar.errors import ModelRefused, shown

T = TypeVar("T")
CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
MOST_PATTERNS = 100_000
MOST_RANK = 1 << 20
Name = Annotated[str, Meta(min_length=1)]
Rank = Annotated[int, Meta(ge=1, le=MOST_RANK)]
Alpha = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # finite
Layer = Annotated[int, Meta(ge=0)]
LayerList = Annotated[str, Meta(pattern=r"^[\w.]*$")]


class Fields(Struct, kw_only=True):
    """The fields that are followed, as the file has them."""

    base_model_name_or_path: str | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8.0
    use_rslora: bool | None = None
    target_modules: Name | list[Name]
    exclude_modules: str | list[Name] | None = None
    layers_to_transform: Layer | list[Layer] | None = None
    layers_pattern: LayerList | list[LayerList] | None = None
    rank_pattern: Annotated[dict[str, Rank], Meta(max_length=MOST_PATTERNS)] | None = None
    alpha_pattern: Annotated[dict[str, Alpha], Meta(max_length=MOST_PATTERNS)] | None = None


_WITHOUT_EFFECT = frozenset({  # of training, of the form of the base weights, or of features that other fields select
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config",
})  # fmt: skip
_REFUSED = {  # fields that must not be set, and what they would do
    "use_dora": "it scales the layers' own weights (DoRA)",
    "lora_bias": "it has biases of its own",
    "modules_to_save": "it replaces whole modules of the model",
    "trainable_token_indices": "it changes embeddings",
    "target_parameters": "it changes parameters that are no linear layers",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it applies to a part of the text only (aLoRA)",
    "use_qalora": "it reads inputs in groups (QALoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "arrow_config": "it selects among other adapters (Arrow)",
    "megatron_config": "it is for layers of Megatron",
}
_OWN_INIT = ("gaussian", "orthogonal", "eva")  # initial values that leave the weights of the model as they are


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter's config says of the modules of a network, by their names."""

    base: str  # the model that it was made for, as its author named it
    rank: int
    alpha: float
    rslora: bool
    targets: frozenset[str] | None  # None: all linear layers but the output head
    excluded: frozenset[str]
    ranks: Mapping[str, int]  # those that are not `rank`
    alphas: Mapping[str, float]  # those that are not `alpha`

    def selects(self, module: str) -> bool:
        """Whether a module is to be changed, but for `ALL_LINEAR`, which depends on its kind."""
        return module not in self.excluded and (self.targets is None or module in self.targets)

    def rank_of(self, module: str) -> int:
        return self.ranks.get(module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of its matrices is multiplied by."""
        rank = self.rank_of(module)
        return self.alphas.get(module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def adapter_config(directory: Path, modules: Sequence[str]) -> AdapterConfig:
    """Of an adapter's directory, for a network that has these modules. Raises `ModelRefused`, naming the field."""
    if not (directory / CONFIG).is_file():
        raise ModelRefused(f"{directory} has no {CONFIG}, so it is no adapter in the form of peft")
    raw = read_object(directory / CONFIG)
    _check_kind(raw)
    try:
        fields = convert(raw, Fields)
    except ValidationError as error:
        raise ModelRefused(f"{CONFIG}: {error}") from error
    everywhere = isinstance(fields.target_modules, str) and fields.target_modules.lower() == ALL_LINEAR
    return AdapterConfig(
        base=fields.base_model_name_or_path or "",
        rank=fields.r,
        alpha=fields.lora_alpha,
        rslora=bool(fields.use_rslora),
        targets=None if everywhere else _targets(fields, modules),
        excluded=_named("exclude_modules", fields.exclude_modules or [], modules),
        ranks=_by_pattern("rank_pattern", fields.rank_pattern or {}, modules),
        alphas=_by_pattern("alpha_pattern", fields.alpha_pattern or {}, modules),
    )


def _targets(fields: Fields, modules: Sequence[str]) -> frozenset[str]:
    targets, layers = fields.target_modules, _listed(fields.layers_to_transform)
    if isinstance(targets, str) and layers:
        raise ModelRefused("layers_to_transform needs a list of target_modules, not a pattern")
    lists, found = list(filter(None, _listed(fields.layers_pattern))), _named("target_modules", targets, modules)
    return frozenset(one for one in found if not layers or one in targets or _layer(one, lists) in layers)


def _layer(module: str, lists: Sequence[str]) -> int | None:
    """The number of its layer, in one of these lists; without any, in any list."""
    before = r"(?:^|.*?\.)" if lists else r".*?\."
    found = re.match(rf"{before}(?:{'|'.join(map(re.escape, lists)) or '[^.]*'})\.(\d+)\.", module)
    return int(found[1]) if found is not None else None


def _named(field: str, value: str | list[str], modules: Sequence[str]) -> frozenset[str]:
    """Modules that a pattern matches, or of which a list has the name or its last parts."""
    if isinstance(value, str):
        return matched([value], modules, field)[0]
    names = frozenset(value)
    return frozenset(one for one in modules if not names.isdisjoint(_ends(one)))


def _ends(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _by_pattern(field: str, values: Mapping[str, T], modules: Sequence[str]) -> dict[str, T]:
    """The value of the first pattern that matches a module, or what follows a dot of its name."""
    found: dict[str, T] = {}
    for names, value in zip(matched(list(values), modules, field, ends=True), values.values(), strict=True):
        for name in names:
            found.setdefault(name, value)
    return found


def _listed(value: T | list[T] | None) -> list[T]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _check_kind(raw: Mapping[str, Any]) -> None:
    if (kind := raw.get("peft_type")) != "LORA":
        raise ModelRefused(f"peft_type is {shown(kind)}; only LORA is supported")
    if (task := raw.get("task_type")) not in (None, "CAUSAL_LM"):
        raise ModelRefused(f"task_type is {shown(task)}; only adapters for CAUSAL_LM are supported")
    if (bias := raw.get("bias", "none")) != "none":
        raise ModelRefused(f"bias is {shown(bias)}: it replaces biases of the model. Only none is supported")
    initial = raw.get("init_lora_weights", True)
    if not isinstance(initial, bool) and initial not in _OWN_INIT:
        raise ModelRefused(
            f"init_lora_weights is {shown(initial)}, which changes weights of the model. Convert the adapter with "
            f"peft: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for field, reason in _REFUSED.items():
        if raw.get(field):
            raise ModelRefused(f"{field} is set: {reason}, which is not supported")
    checked = {"peft_type", "task_type", "bias", "init_lora_weights"}
    known = checked.union(Fields.__struct_fields__, _WITHOUT_EFFECT, _REFUSED)
    if strange := sorted(name for name, value in raw.items() if value and name not in known):
        raise ModelRefused(f"{CONFIG} sets {shown(strange[0])}, which is unknown and could change what it computes")
