"""compressed: weights in the formats of compressed-tensors, and what its `quantization_config` says about them.

A module X has `X.weight` or `X.weight_packed`, `X.weight_scale`, and perhaps `X.weight_zero_point`, `X.weight_g_idx`,
`X.weight_global_scale` and `X.weight_shape`. A stored shape is used only for the number of inputs in the last word; it
is compared with the network's like any other.

A model directory is not trusted, so a config is read into these classes or refused with `ModelRefused`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.models.quantize.formats.floats import eights, fours
from kvcellar.engine.models.quantize.formats.part import (
    SCALES,
    Format,
    Integers,
    Part,
    Read,
    block_of,
    check_pattern,
    dense_type,
    integer_part,
    stored_as,
)
from kvcellar.engine.models.quantize.rounding import unpack
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
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
_SCALE, _ZERO, _ORDER, _SHAPE = ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
_GLOBAL = ".weight_global_scale"
_SUFFIXES = (".weight", ".weight_packed", _SCALE, _ZERO, _ORDER, _SHAPE, _GLOBAL)
_MOST_GROUPS = 64  # config groups; real files have one or two


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

    def targeting(self, module: str) -> Scheme | None:
        """The scheme of a module by its name: exact names are before patterns, and patterns before class names."""
        for matches in (
            lambda target: target == module,
            lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
            lambda target: target == "Linear",
        ):
            for targets, scheme in self.groups:
                if any(map(matches, targets)):
                    return scheme
        return None


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


def _targets(name: str, raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(target, str) for target in raw):
        raise ModelRefused(f"config group {shown(name)} needs targets: a list of names")
    for target in raw:
        if target.startswith("re:"):
            check_pattern(target[3:])
    return tuple(raw)


class Compressed(Format):
    """The format of a directory with this `quantization_config`."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._quantisation = quantisation_of(raw)

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        """Of the only scheme that what is stored can be, or of the one that config.json names."""
        if not name.endswith(_SCALE):
            return None
        module = name.removesuffix(_SCALE)
        fitting: dict[Scheme, Part] = {}
        refused: dict[Scheme, str] = {}
        for scheme in dict.fromkeys(scheme for _, scheme in self._quantisation.groups):
            try:
                fitting[scheme] = _part(module, scheme, weights)
            except ModelRefused as error:
                refused[scheme] = str(error)
        chosen = next(iter(fitting)) if len(fitting) == 1 else None
        if len(fitting) > 1:
            chosen = self._quantisation.targeting(module)
        if chosen not in fitting:
            reasons = "; ".join(f"{one}: {why}" for one, why in refused.items()) or "no config group names it"
            raise ModelRefused(f"{reasons}. {READABLE}")
        return fitting[chosen]


def _part(module: str, scheme: Scheme, weights: WeightsFiles) -> Part:
    """Raises `ModelRefused` if what is stored of the module does not have the types and shapes of the scheme."""
    uses = tuple(name for suffix in _SUFFIXES if (name := f"{module}{suffix}") in weights.tensors)
    weight, codes, scales = (f"{module}{suffix}" for suffix in (".weight", ".weight_packed", _SCALE))
    form = f"compressed-tensors {scheme}"
    if scheme.format in (FLOATS, MXFP8):
        block = scheme.block or ((1, scheme.group) if scheme.group is not None else None)
        part = eights(weight, scales, weights, block, "compressed-tensors float-quantized")
    elif scheme.format == MXFP4:
        part = fours(weight, codes, scales, weights, 32, form)
    elif scheme.format == NVFP4:
        outer = f"{module}{_GLOBAL}"
        part = fours(weight, codes, scales, weights, 16, form, types=("F8_E4M3",), outer=outer, divided=True)
    else:
        return _integers(module, scheme, weights, uses)
    return replace(part, uses=uses, form=form)


# -- integers ----------------------------------------------------------------------------------------------------------


def _integers(module: str, scheme: Scheme, weights: WeightsFiles, uses: tuple[str, ...]) -> Part:
    tensors, packed = weights.tensors, scheme.format == PACKED
    name = f"{module}{'.weight_packed' if packed else '.weight'}"
    codes = stored_as(name, tensors, "I32" if packed else "I8")
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise ModelRefused(f"its codes are {list(codes.shape)}; two dimensions are needed")
    outputs, inputs = codes.shape[0], _inputs(module, scheme, codes, weights) if packed else codes.shape[1]
    scales = stored_as(f"{module}{_SCALE}", tensors, *SCALES)
    count = 1 if scheme.group is None else math.ceil(inputs / scheme.group)
    if scheme.group is not None and inputs % scheme.group:
        raise ModelRefused(f"its {inputs} inputs are not a multiple of {scheme.group}")
    if not _fits(scales.shape, outputs, count):
        raise ModelRefused(f"its scales are {list(scales.shape)} for {outputs} outputs of {count} scales each")
    if not scheme.symmetric:
        zeros = stored_as(f"{module}{_ZERO}", tensors, "I32" if packed else "I8").shape
        expected = (math.ceil(outputs * scheme.bits / 32), count)
        if zeros != expected if packed else not _fits(zeros, outputs, count):
            raise ModelRefused(f"its zero points are {list(zeros)} for {outputs} outputs of {count} each")
    ordered = scheme.group is not None and f"{module}{_ORDER}" in tensors
    if ordered and stored_as(f"{module}{_ORDER}", tensors, "I32", "I64").shape != (inputs,):
        raise ModelRefused(f"its group indices are not one for each of {inputs} inputs")
    dense = Stored(codes.file, (outputs, inputs), dense_type(scales))
    read_as = partial(_read_integers, module, scheme, (outputs, inputs), ordered)
    form = f"compressed-tensors {scheme}"
    order = (f"{module}{_ORDER}", count) if ordered else None
    return integer_part(f"{module}.weight", dense, uses, form, read_as, f"{module}{_SCALE}", order=order)


def _inputs(module: str, scheme: Scheme, codes: Stored, weights: WeightsFiles) -> int:
    """All that the words of an output hold, or as many as the stored shape says where that needs so many words."""
    words = codes.shape[1]
    shape = weights.tensors.get(f"{module}{_SHAPE}")
    if shape is not None and shape.shape == (2,) and shape.dtype in ("I64", "I32"):
        inputs = int(weights.slices[f"{module}{_SHAPE}"][...][1])
        if 0 < inputs <= 32 * words and math.ceil(inputs * scheme.bits / 32) == words:
            return inputs
    return words * 32 // scheme.bits


def _read_integers(module: str, scheme: Scheme, shape: tuple[int, int], ordered: bool, read: Read) -> Integers:
    packed, (outputs, inputs) = scheme.format == PACKED, shape
    codes = read(f"{module}{'.weight_packed' if packed else '.weight'}")
    zeros = None if scheme.symmetric else _zeros(read(f"{module}{_ZERO}"), scheme, outputs)
    columns = read(f"{module}{_ORDER}").to(torch.int64) if ordered else None

    def stored(block: slice) -> Tensor:
        return unpack(codes[block], scheme.bits)[:, :inputs] if packed else codes[block]

    half = 1 << scheme.bits - 1 if packed else 0
    return Integers(shape, stored, half, _rows(read(f"{module}{_SCALE}")), zeros, columns=columns)


def _zeros(zeros: Tensor, scheme: Scheme, outputs: int) -> Tensor:
    """Zero points [o,c], unsigned as the codes of the same layout."""
    if scheme.format != PACKED:
        return _rows(zeros).expand(outputs, -1)
    return unpack(zeros.T.contiguous(), scheme.bits).T[:outputs]


def _rows(scales: Tensor) -> Tensor:
    """[] or [1] -> [1,1]; [o] -> [o,1]; others as they are."""
    return scales.reshape(-1, 1) if scales.dim() < 2 else scales


def _fits(shape: tuple[int, ...], outputs: int, count: int) -> bool:
    """Whether these are `count` scales for each output, or one for all."""
    if count > 1:
        return shape == (outputs, count)
    return shape in ((outputs, 1), (outputs,), (1, 1), (1,), ())
