"""compressed: weights in the formats of compressed-tensors.

A module X has `X.weight` or `X.weight_packed`, `X.weight_scale`, and perhaps `X.weight_zero_point`, `X.weight_g_idx`,
`X.weight_global_scale` and `X.weight_shape`. A stored shape is used only for the number of inputs in the last word; it
is compared with the network's like any other.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused
from kvcellar.models.quantize.formats.blocked import eights, fours
from kvcellar.models.quantize.formats.integers import Integers
from kvcellar.models.quantize.formats.part import (
    SCALES,
    Part,
    Read,
    check_indices,
    check_scales,
    dense_type,
    integer_part,
    stored_as,
)
from kvcellar.models.quantize.layouts import unpack
from kvcellar.models.quantize.schemes import FLOATS, MXFP4, MXFP8, NVFP4, PACKED, READABLE, Quantisation, Scheme
from kvcellar.models.weights_files import Stored, WeightsFiles

_SCALE, _ZERO, _ORDER, _SHAPE = ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
_GLOBAL = ".weight_global_scale"
_SUFFIXES = (".weight", ".weight_packed", _SCALE, _ZERO, _ORDER, _SHAPE, _GLOBAL)


class Compressed:
    """The format of a directory with this `quantization_config`."""

    def __init__(self, quantisation: Quantisation) -> None:
        self._quantisation = quantisation

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        """Of the only scheme that what is stored can be, or of the one that config.json names."""
        if not name.endswith(_SCALE):
            return None
        module = name.removesuffix(_SCALE)
        fitting: dict[Scheme, Part] = {}
        refused: dict[Scheme, str] = {}
        for scheme in self._quantisation.schemes:
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
    check = partial(_check, module, codes.file, ordered, count)
    return integer_part(f"{module}.weight", dense, uses, form, read_as, check)


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


def _check(module: str, file: str, ordered: bool, count: int, read: Read) -> None:
    check_scales(read, f"{module}{_SCALE}", file)
    if ordered:
        check_indices(read, f"{module}{_ORDER}", file, count)
