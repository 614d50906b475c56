"""schemes: what a `quantization_config` of compressed-tensors says about stored weights, read and checked.

A model directory is not trusted, so a config is read into these classes or refused with `ModelRefused`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.errors import ModelRefused, shown

INTS, PACKED, FLOATS = "int-quantized", "pack-quantized", "float-quantized"
MXFP8, MXFP4, NVFP4 = "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_FORMATS = {  # formats, by the name and the type of numbers in a config
    (INTS, "int"): INTS, ("naive-quantized", "int"): INTS, (PACKED, "int"): PACKED,
    (FLOATS, "float"): FLOATS, ("naive-quantized", "float"): FLOATS,
    **{(form, "float"): form for form in (MXFP8, MXFP4, NVFP4)},
}  # fmt: skip
_GROUPS = {MXFP8: 32, MXFP4: 32, NVFP4: 16}  # inputs that share a scale
READABLE = f"compressed-tensors' formats that are read: {', '.join(sorted(set(_FORMATS.values())))}"
_BITS = {INTS: range(1, 9), PACKED: range(1, 9), FLOATS: (8,), MXFP8: (8,), MXFP4: (4,), NVFP4: (4,)}
_MOST_BLOCK = 1 << 20  # outputs or inputs
_MOST_GROUPS = 64  # config groups; real files have one or two
_MOST_PATTERN = 512  # characters of a target
_UNBOUNDED = 4  # repetitions in a pattern: with more, matching a name could take minutes


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one config group are stored. `group` is the inputs that share a scale: None is all of them;
    with `block`, so many outputs and inputs share one."""

    format: str
    bits: int
    group: int | None
    symmetric: bool
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        per = "an output" if self.group is None else f"{self.group} inputs of an output"
        per = per if self.block is None else f"{self.block[0]} outputs and {self.block[1]} inputs"
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


def quantisation_of(raw: Mapping[str, Any]) -> Quantisation:
    """The schemes of a `quantization_config`. Raises `ModelRefused`."""
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
    found = _FORMATS.get((form, weights.get("type", "int"))) if isinstance(form, str) else None
    if found is None:
        raise ModelRefused(
            f"config group {shown(name)} stores weights as {shown(form)} of type {shown(weights.get('type'))}. "
            f"{READABLE}"
        )
    return _targets(name, raw.get("targets")), _scheme(name, found, weights)


def _scheme(name: str, form: str, weights: Mapping[str, Any]) -> Scheme:
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in _BITS[form]:
        raise ModelRefused(f"config group {shown(name)} has numbers of {shown(bits)} bits as {form}. {READABLE}")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool) or (not symmetric and form not in (INTS, PACKED)):
        raise ModelRefused(f"config group {shown(name)}: symmetric is {shown(symmetric)}, which {form} cannot be")
    if form in _GROUPS:
        if size not in (None, _GROUPS[form]):
            raise ModelRefused(f"config group {shown(name)} has groups of {shown(size)} inputs; {form} has others")
        return Scheme(form, bits, _GROUPS[form], symmetric)
    if size == -1:
        size = None
    strategy = strategy or ("group" if size is not None else "channel")
    if strategy not in ("tensor", "channel", "group", *(["block"] if form == FLOATS else [])):
        raise ModelRefused(f"config group {shown(name)} has scales by {shown(strategy)}. {READABLE}")
    if strategy == "block":
        return Scheme(form, bits, None, symmetric, block_of(weights.get("block_structure")))
    if strategy == "group" and not (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        raise ModelRefused(f"config group {shown(name)} has groups of {shown(size)} inputs")
    return Scheme(form, bits, size if strategy == "group" else None, symmetric)


def block_of(raw: Any) -> tuple[int, int]:
    """Outputs and inputs of a block, of a config: [128, 128] or "128x128". Raises `ModelRefused`."""
    found = raw.split("x") if isinstance(raw, str) else raw
    if isinstance(found, list | tuple) and len(found) == 2:
        try:
            outputs, inputs = (int(one) if isinstance(one, str) else one for one in found)
        except ValueError:
            outputs = inputs = 0
        if type(outputs) is int and type(inputs) is int and 0 < outputs <= _MOST_BLOCK and 0 < inputs <= _MOST_BLOCK:
            return outputs, inputs
    raise ModelRefused(f"the config has blocks of {shown(raw)}; two sizes from 1 to {_MOST_BLOCK} are needed")


def _targets(name: str, raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(target, str) for target in raw):
        raise ModelRefused(f"config group {shown(name)} needs targets: a list of names")
    for target in raw:
        if target.startswith("re:"):
            check_pattern(target[3:])
    return tuple(raw)


def check_pattern(pattern: str) -> None:
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
