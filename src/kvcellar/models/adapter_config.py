"""adapter_config: which layers an adapter changes, and how, by its adapter_config.json as `peft` writes it.

Only LoRA is supported: y = W x + s B A x, with s = alpha / r, or alpha / sqrt(r). Every field is followed, is without
effect after training, or is refused with the reason. `peft` gives these fields their meaning.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.config_file import read_object
from kvcellar.models.name_patterns import Effort, NamePattern

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
MOST_PATTERNS = 100_000
MOST_RANK = 1 << 20
_FOLLOWED = frozenset({
    "peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern",
    "alpha_pattern", "use_rslora", "layers_to_transform", "layers_pattern", "init_lora_weights", "task_type",
})  # fmt: skip
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
    """What an adapter's config says of the layers of a model."""

    base: str  # the model that it was made for, as its author named it
    rank: int
    alpha: float
    rslora: bool
    targets: frozenset[str] | NamePattern | None  # None: all linear layers but the output head
    excluded: frozenset[str] | NamePattern
    layers: frozenset[int] | None  # numbers of the layers that are changed; None: all
    layer_lists: tuple[str, ...]  # names of the lists that layers are numbered in; none: any
    ranks: Sequence[tuple[NamePattern, int]]
    alphas: Sequence[tuple[NamePattern, float]]

    def selects(self, module: str) -> bool:
        """Whether a module is to be changed, but for `ALL_LINEAR`, which depends on its kind."""
        if _named(self.excluded, module):
            return False
        if self.targets is None or isinstance(self.targets, NamePattern) or module in self.targets:
            return self.targets is None or _named(self.targets, module)
        return _named(self.targets, module) and (self.layers is None or self._layer(module) in self.layers)

    def _layer(self, module: str) -> int | None:
        lists = "|".join(map(re.escape, self.layer_lists)) or r"[^.]*"
        before = r"(?:^|.*?\.)" if self.layer_lists else r".*?\."
        found = re.match(rf"{before}(?:{lists})\.(\d+)\.", module)
        return int(found[1]) if found is not None else None

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.matches(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of its matrices is multiplied by."""
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.matches(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _named(names: frozenset[str] | NamePattern, module: str) -> bool:
    if isinstance(names, NamePattern):
        return names.fullmatch(module)
    parts = module.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


def adapter_config(directory: Path) -> AdapterConfig:
    """Of an adapter's directory. Raises `ModelRefused`, naming the field."""
    if not (directory / CONFIG).is_file():
        raise ModelRefused(f"{directory} has no {CONFIG}, so it is no adapter in the form of peft")
    raw = read_object(directory / CONFIG)
    _check_kind(raw)
    targets = raw.get("target_modules")
    everywhere = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    layers, effort = _layers(raw), Effort()
    if isinstance(targets, str) and layers is not None:
        raise ModelRefused("layers_to_transform needs a list of target_modules, not a pattern")
    return AdapterConfig(
        base=str(raw.get("base_model_name_or_path") or ""),
        rank=_rank("r", raw.get("r", 8)),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha", 8)),
        rslora=bool(raw.get("use_rslora")),
        targets=None if everywhere else _modules("target_modules", targets, effort),
        excluded=_modules("exclude_modules", raw.get("exclude_modules") or [], effort),
        layers=layers,
        layer_lists=_layer_lists(raw.get("layers_pattern") or []),
        ranks=[(pattern, _rank("rank_pattern", rank)) for pattern, rank in _patterns(raw, "rank_pattern", effort)],
        alphas=[
            (pattern, _alpha("alpha_pattern", alpha)) for pattern, alpha in _patterns(raw, "alpha_pattern", effort)
        ],
    )


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
    known = _FOLLOWED | _WITHOUT_EFFECT | _REFUSED.keys() | {"bias"}
    if strange := sorted(name for name, value in raw.items() if value and name not in known):
        raise ModelRefused(f"{CONFIG} sets {shown(strange[0])}, which is unknown and could change what it computes")


def _modules(field: str, value: Any, effort: Effort) -> frozenset[str] | NamePattern:
    if isinstance(value, str) and value:
        return NamePattern(value, field, effort)
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ModelRefused(f"{field} is {shown(value)}; a list of names or a pattern is needed")
    return frozenset(value)


def _layers(raw: Mapping[str, Any]) -> frozenset[int] | None:
    value = raw.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers: Any = [value] if _is_whole(value) else value
    if not isinstance(layers, list) or not all(_is_whole(one) and one >= 0 for one in layers):
        raise ModelRefused(f"layers_to_transform is {shown(value)}; numbers of layers are needed")
    return frozenset(layers)


def _layer_lists(value: Any) -> tuple[str, ...]:
    lists = [value] if isinstance(value, str) else value
    if not isinstance(lists, list) or not all(isinstance(one, str) and re.fullmatch(r"[\w.]+", one) for one in lists):
        raise ModelRefused(f"layers_pattern is {shown(value)}; names of lists of layers are needed, like layers")
    return tuple(lists)


def _patterns(raw: Mapping[str, Any], field: str, effort: Effort) -> list[tuple[NamePattern, Any]]:
    value = raw.get(field) or {}
    if not isinstance(value, dict) or len(value) > MOST_PATTERNS:
        raise ModelRefused(f"{field} is {shown(value)}; a value for each of up to {MOST_PATTERNS} patterns is needed")
    return [(NamePattern(str(pattern), field, effort), one) for pattern, one in value.items()]


def _rank(field: str, value: Any) -> int:
    if not _is_whole(value) or not 0 < value <= MOST_RANK:
        raise ModelRefused(f"{field} has the rank {shown(value)}; a whole number from 1 to {MOST_RANK} is needed")
    return value


def _alpha(field: str, value: Any) -> float:
    if not (_is_whole(value) or isinstance(value, float)) or not math.isfinite(value):
        raise ModelRefused(f"{field} has the value {shown(value)}; a finite number is needed")
    return float(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
