"""schemes: what a `quantization_config` of compressed-tensors says about stored weights, read and checked.

A model directory is not trusted, so a config is read into these classes or refused with `ModelRefused`. Other methods
than compressed-tensors, and its formats of floats, are refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.errors import ModelRefused, shown

INTS, PACKED = "int-quantized", "pack-quantized"
_FORMATS = {INTS: INTS, "naive-quantized": INTS, PACKED: PACKED}
_KEYS = ("quantization_config", "compression_config", "quantization")
READABLE = (
    f"Weights are read as float32, bfloat16, float16, or as compressed-tensors' {INTS} and {PACKED} (integers of 2, 4 "
    f"or 8 bits, per channel or in groups)"
)
_BITS = (2, 4, 8)  # those that divide a word of 32 bits; others cross words, and files differ in how
_MOST_GROUPS = 64  # config groups; real files have one or two
_MOST_PATTERN = 512  # characters of a target
_UNBOUNDED = 4  # repetitions in a pattern: with more, matching a name could take minutes


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one config group are stored. `group` is the inputs that share a scale: None is all of them."""

    format: str
    bits: int
    group: int | None
    symmetric: bool

    def __str__(self) -> str:
        per = "an output" if self.group is None else f"{self.group} inputs of an output"
        return f"{self.format}, {self.bits} bits, {'' if self.symmetric else 'asymmetric, '}one scale for {per}"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The schemes of a file, each with the targets that it is for."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All different ones."""
        return tuple(dict.fromkeys(scheme for _, scheme in self.groups))

    def targeting(self, module: str) -> Scheme | None:
        """The scheme of a module by its name: exact names are before patterns, and patterns before class names."""
        for matches in (_is_named, _is_matched, _is_class):
            for targets, scheme in self.groups:
                if any(matches(target, module) for target in targets):
                    return scheme
        return None


def _is_named(target: str, module: str) -> bool:
    return target == module


def _is_matched(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _is_class(target: str, module: str) -> bool:
    return target == "Linear"


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """What config.json says about quantised weights; None if they are not quantised. Raises `ModelRefused`."""
    found = list(_quantisations(config))
    if not found:
        return None
    if any(other != found[0] for other in found):
        raise ModelRefused("config.json describes quantised weights twice, in different ways. Remove one of them")
    raw = found[0]
    if not isinstance(raw, Mapping) or raw.get("quant_method") != "compressed-tensors":
        method = raw.get("quant_method", "MLX" if "bits" in raw else None) if isinstance(raw, Mapping) else raw
        named = method if isinstance(method, str) and method.isidentifier() else shown(method)
        raise ModelRefused(f"its weights are quantised ({named}). {READABLE}")
    return _read(raw)


def _quantisations(config: Mapping[str, Any]) -> Iterator[Any]:
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            yield from (part[key] for key in _KEYS if part.get(key))


def _read(raw: Mapping[str, Any]) -> Quantisation:
    for key in ("sparsity_config", "transform_config"):
        part = raw.get(key)
        if part and not (isinstance(part, Mapping) and part.get("format") == "dense"):
            raise ModelRefused(f"quantization_config has {key}, which is not supported. {READABLE}")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not 0 < len(groups) <= _MOST_GROUPS:
        raise ModelRefused(f"quantization_config needs config_groups: one to {_MOST_GROUPS} of them")
    return Quantisation(tuple(_group(str(name), group, raw.get("format")) for name, group in groups.items()))


def _group(name: str, raw: Any, form: Any) -> tuple[tuple[str, ...], Scheme]:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("weights"), Mapping):
        raise ModelRefused(f"config group {shown(name)} says nothing about weights. {READABLE}")
    form = raw.get("format") or form
    weights: Mapping[str, Any] = raw["weights"]
    if not isinstance(form, str) or form not in _FORMATS or weights.get("type", "int") != "int":
        raise ModelRefused(
            f"config group {shown(name)} stores weights as {shown(form)} of type {shown(weights.get('type'))}. "
            f"{READABLE}"
        )
    return _targets(name, raw.get("targets")), _scheme(name, _FORMATS[form], weights)


def _scheme(name: str, form: str, weights: Mapping[str, Any]) -> Scheme:
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if not isinstance(bits, int) or bits not in _BITS:
        raise ModelRefused(f"config group {shown(name)} has integers of {shown(bits)} bits. {READABLE}")
    if size == -1:
        size = None
    strategy = strategy or ("group" if size is not None else "channel")
    if strategy not in ("tensor", "channel", "group"):
        raise ModelRefused(f"config group {shown(name)} has scales by {shown(strategy)}. {READABLE}")
    if strategy == "group" and not (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        raise ModelRefused(f"config group {shown(name)} has groups of {shown(size)} inputs")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ModelRefused(f"config group {shown(name)}: symmetric is {shown(symmetric)}; true or false is needed")
    return Scheme(form, bits, size if strategy == "group" else None, symmetric)


def _targets(name: str, raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(target, str) for target in raw):
        raise ModelRefused(f"config group {shown(name)} needs targets: a list of names")
    for target in raw:
        if target.startswith("re:"):
            _check_pattern(target[3:])
    return tuple(raw)


def _check_pattern(pattern: str) -> None:
    """Raise `ModelRefused` for an invalid pattern, and for one whose matching could take very long."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelRefused(f"quantization_config: {shown(pattern)} is no regular expression: {error}") from error
    unbounded = len(re.findall(r"(?<!\\)[*+]|\{\d*,\d*\}", pattern))
    if len(pattern) > _MOST_PATTERN or unbounded > _UNBOUNDED or re.search(r"\)\s*[*+{]", pattern):
        raise ModelRefused(
            f"quantization_config: {shown(pattern)} is too complex a pattern for names; at most {_UNBOUNDED} "
            f"repetitions are supported, and none of a group"
        )
