"""integers: weights that are stored as integers, packed by GPTQ, AWQ and AutoRound, by torchao, by BitNet and by Gemma.

GPTQ packs words of 32 bits along inputs: `X.qweight` I32 [w,o], `X.qzeros` I32 [G,z], `X.scales` [G,o], and perhaps
`X.g_idx` [i], the group of each input. AWQ packs along outputs, eight in a word, in an order of its own: `X.qweight`
I32 [i,o/8], `X.qzeros` I32 [G,o/8], `X.scales` [G,o]. AutoRound writes either.

torchao: a weight `X.weight` is `X._weight_qdata`, `X._weight_scale` and perhaps `X._weight_zero_point`, as transformers
stores tensors of its classes; the file's metadata has its class and the outputs and inputs that share a scale, as JSON.

BitNet: `X.weight` U8 [o/4,i], four outputs of 2 bits in a byte, at distances of o/4, and `X.weight_scale` [1]. Gemma:
`X.weight` U8 or I8, packed along inputs, the first one in the lowest bits, and `X.weight_scale` [o,c]; embeddings are
`X.embedding_quantized` and `X.embedding_scale`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.models.quantize.formats.part import (
    EIGHT_BITS,
    LARGEST,
    SCALES,
    Format,
    Integers,
    Part,
    Read,
    block_of,
    check_dimensions,
    check_pattern,
    check_scales,
    check_shape,
    dense_type,
    integer_part,
    per,
    stored_as,
)
from kvcellar.engine.models.quantize.rounding import columns_of, unpack
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
from kvcellar.errors import ModelRefused, shown

_BITS = (2, 3, 4, 8)
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in AWQ's words of each of eight outputs
_PACKINGS = {  # of AutoRound
    "auto_round:auto_gptq": False,
    "auto_gptq": False,
    "auto_round:auto_awq": True,
    "auto_awq": True,
}


def auto_round(raw: Mapping[str, Any]) -> "Gptq | Awq":
    """The format of a directory by AutoRound. Raises `ModelRefused`."""
    packing = raw.get("packing_format", "auto_round:auto_gptq")
    if raw.get("data_type", "int") != "int" or not isinstance(packing, str) or packing not in _PACKINGS:
        raise ModelRefused(
            f"its weights are quantised by AutoRound, as {shown(packing)} of type {shown(raw.get('data_type'))}; read "
            f"are integers (int) as {', '.join(_PACKINGS)}"
        )
    return (Awq if _PACKINGS[packing] else Gptq)(raw)


@dataclass(frozen=True, slots=True)
class _Sizes:
    outputs: int
    inputs: int
    groups: int
    group: int | None
    bits: int


class Gptq(Format):
    """Integers of 2, 3, 4 or 8 bits. Files of version 1 store each zero point less 1."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        version = raw.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2") or raw.get("is_marlin_format"):
            raise ModelRefused(f"its weights are quantised by GPTQ, as {shown(version)}; read are gptq and gptq_v2")
        self._offset = 0 if version == "gptq_v2" else 1
        self._bits, self._group = _bits(raw, _BITS), _group(raw)
        self._mixed = bool(raw.get("dynamic") or raw.get("extra_config"))
        self._ordered = raw.get("desc_act") is True and self._group is not None

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        if not name.endswith(".qweight"):
            return None
        module, tensors = name.removesuffix(".qweight"), weights.tensors
        words = stored_as(name, tensors, "I32")
        check_dimensions(name, words, 2)
        scales, zeros = (f"{module}.{suffix}" for suffix in ("scales", "qzeros"))
        stored = stored_as(scales, tensors, *SCALES)
        check_dimensions(scales, stored, 2)
        sizes = self._sizes(name, words, stored, stored_as(zeros, tensors, "I32"))
        outputs, inputs = sizes.outputs, sizes.inputs
        check_shape(scales, stored, (sizes.groups, outputs))
        check_shape(zeros, tensors[zeros], (sizes.groups, ceil(outputs * sizes.bits / 32)))
        order = f"{module}.g_idx" if f"{module}.g_idx" in tensors or self._ordered else None
        if order is not None:
            check_shape(order, stored_as(order, tensors, "I32", "I64"), (inputs,))

        uses = tuple(filter(None, (name, scales, zeros, order)))
        form = f"GPTQ, {sizes.bits} bits, {per(sizes.group)}"
        dense = Stored(words.file, (outputs, inputs), dense_type(stored))
        read_as = partial(self._read, module, sizes, order)
        indices = None if order is None else (order, sizes.groups)
        return integer_part(f"{module}.weight", dense, uses, form, read_as, scales, order=indices)

    def _sizes(self, name: str, words: Stored, scales: Stored, zeros: Stored) -> _Sizes:
        """Bits and groups are the config's, or with different ones for some modules, those that the shapes mean."""
        groups, outputs = scales.shape
        bits, group = self._bits, self._group
        if self._mixed and len(zeros.shape) == 2:
            bits = zeros.shape[1] * 32 // outputs
            if bits not in _BITS:
                raise ModelRefused(f"its zero points are {list(zeros.shape)} for {outputs} outputs")
        if words.shape[0] * 32 % bits:
            raise ModelRefused(f"{name} is {list(words.shape)}, which integers of {bits} bits do not fill")
        inputs = words.shape[0] * 32 // bits
        if self._mixed:
            group = None if groups == 1 else ceil(inputs / groups)
        return _Sizes(outputs, inputs, 1 if group is None else ceil(inputs / group), group, bits)

    def _read(self, module: str, sizes: _Sizes, order: str | None, read: Read) -> Integers:
        words = read(f"{module}.qweight")
        scales = read(f"{module}.scales").T  # [o,G]
        zeros = unpack(read(f"{module}.qzeros"), sizes.bits)[:, : sizes.outputs].T + self._offset
        columns = columns_of(sizes.inputs, sizes.group) if order is None else read(order).to(torch.int64)

        def stored(block: slice) -> Tensor:
            return unpack(words[:, block].T.contiguous(), sizes.bits)

        shape = (sizes.outputs, sizes.inputs)
        return Integers(shape, stored, 1 << sizes.bits - 1, scales, zeros, columns=columns)


class Awq(Format):
    """Integers of 4 bits with zero points, as `gemm` kernels read them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        version = raw.get("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise ModelRefused(f"its weights are quantised by AWQ, as {shown(version)}; read is gemm")
        _bits(raw, (4,))
        self._group = _group(raw)

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        if not name.endswith(".qweight"):
            return None
        module, tensors = name.removesuffix(".qweight"), weights.tensors
        words = stored_as(name, tensors, "I32")
        check_dimensions(name, words, 2)
        inputs, outputs = words.shape[0], 8 * words.shape[1]
        groups = 1 if self._group is None else ceil(inputs / self._group)
        scales, zeros = (f"{module}.{suffix}" for suffix in ("scales", "qzeros"))
        stored = stored_as(scales, tensors, *SCALES)
        check_shape(scales, stored, (groups, outputs))
        check_shape(zeros, stored_as(zeros, tensors, "I32"), (groups, words.shape[1]))
        form = f"AWQ, 4 bits, {per(self._group)}"
        dense = Stored(words.file, (outputs, inputs), dense_type(stored))
        read_as = partial(self._read, module, (outputs, inputs))
        return integer_part(f"{module}.weight", dense, (name, scales, zeros), form, read_as, scales, step=8)

    def _read(self, module: str, shape: tuple[int, int], read: Read) -> Integers:
        words, columns = read(f"{module}.qweight"), columns_of(shape[1], self._group)
        scales = read(f"{module}.scales").T  # [o,G]
        zeros = _outputs(read(f"{module}.qzeros")).T

        def stored(block: slice) -> Tensor:
            return _outputs(words[:, block.start // 8 : block.stop // 8]).T

        return Integers(shape, stored, 8, scales, zeros, columns=columns, step=8)


def _outputs(words: Tensor) -> Tensor:
    """AWQ's words [r,o/8] -> codes [r,o] in the order of outputs."""
    return unpack(words, 4).unflatten(1, (-1, 8))[..., _ORDER].flatten(1)


def _bits(raw: Mapping[str, Any], known: tuple[int, ...]) -> int:
    found = raw.get("bits", raw.get("w_bit"))
    if isinstance(found, bool) or not isinstance(found, int) or found not in known:
        raise ModelRefused(
            f"its weights are quantised ({raw.get('quant_method')}) to {shown(found)} bits; read are "
            f"{', '.join(map(str, known))}"
        )
    return found


def _group(raw: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale; None is all of them."""
    found = raw.get("group_size", raw.get("q_group_size"))
    if isinstance(found, bool) or not isinstance(found, int) or (found != -1 and not 0 < found <= 1 << 20):
        raise ModelRefused(f"its weights are quantised in groups of {shown(found)} inputs; -1 or a size is needed")
    return None if found == -1 else found


_CODES = {"Int8Tensor": ("I8",), "IntxUnpackedToInt8Tensor": ("I8",), "Float8Tensor": EIGHT_BITS}
_DATA = "_qdata"
_MOST_ABOUT = 1 << 16  # characters of what the metadata says about one weight


class TorchAo(Format):
    """The format of a directory of this method: each weight says how it is stored."""

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        module, _, last = name.rpartition(".")
        if not (last.startswith("_") and last.endswith(_DATA)):
            return None
        weight, start = f"{module}.{last[1:].removesuffix(_DATA)}", name.removesuffix(_DATA)
        kind, block = _about(weight, weights)
        codes = stored_as(name, weights.tensors, *_CODES[kind])
        check_dimensions(name, codes, 2)
        outputs, inputs = codes.shape
        block = block or (1, inputs)
        grid = ceil(outputs / block[0]), ceil(inputs / block[1])
        scales, zeros = f"{start}_scale", f"{start}_zero_point"
        stored = stored_as(scales, weights.tensors, *SCALES)
        check_shape(scales, stored, grid, *([(outputs,)] if grid == (outputs, 1) else []))
        has_zeros = zeros in weights.tensors
        if has_zeros:
            check_shape(zeros, stored_as(zeros, weights.tensors, "I8"), stored.shape)

        def read_as(read: Read) -> Integers:
            values, rows = read(name), torch.arange(outputs, device="cpu") // block[0]
            factors = read(scales).reshape(grid)[rows]  # [o,c]
            offsets = read(zeros).reshape(grid)[rows] if has_zeros else None
            columns = columns_of(inputs, block[1])
            return Integers((outputs, inputs), lambda some: values[some], 0, factors, offsets, columns=columns)

        uses = (name, scales, *([zeros] if has_zeros else []))
        form = f"torchao {kind}, one scale for {block[0]} x {block[1]} weights"
        dense = Stored(codes.file, (outputs, inputs), dense_type(stored))
        part = integer_part(weight, dense, uses, form, read_as, scales)
        return part if codes.dtype == "I8" else replace(part, codes=None)


def _about(weight: str, weights: WeightsFiles) -> tuple[str, tuple[int, int] | None]:
    """Class and block of a weight, of the metadata of any file. Raises `ModelRefused`."""
    raw = next((found[weight] for found in weights.metadata.values() if weight in found), None)
    try:
        about = json.loads(raw) if raw is not None and len(raw) <= _MOST_ABOUT else None
    except (ValueError, RecursionError):
        about = None
    kind = about.get("_type") if isinstance(about, dict) else None
    if not isinstance(about, dict) or not isinstance(kind, str) or kind not in _CODES:
        raise ModelRefused(f"the file's metadata describes it as {shown(kind)}; read are {', '.join(_CODES)}")
    data = about.get("_data")
    block = data.get("block_size") if isinstance(data, dict) else None
    return kind, None if block is None else block_of(block)


_SCALE = ".weight_scale"


class BitNet(Format):
    """Three values and one scale, which divides (`bitlinear`) or multiplies (`autobitlinear`)."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        kind, mode = raw.get("linear_class", "bitlinear"), raw.get("quantization_mode", "offline")
        if kind not in ("bitlinear", "autobitlinear") or mode != "offline" or raw.get("use_rms_norm"):
            raise ModelRefused(
                f"its weights are quantised by BitNet as {shown(kind)}, {shown(mode)}, use_rms_norm "
                f"{shown(raw.get('use_rms_norm', False))}; read are bitlinear and autobitlinear, offline, without norms"
            )
        self._divides = kind == "bitlinear"

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        if not name.endswith(_SCALE):
            return None
        weight = f"{name.removesuffix(_SCALE)}.weight"
        codes = stored_as(weight, weights.tensors, *(["U8"] if self._divides else ["U8", *SCALES]))
        check_dimensions(weight, codes, 2)
        check_shape(name, stored_as(name, weights.tensors, *SCALES), (1,), ())
        packed, (quarter, inputs) = codes.dtype == "U8", codes.shape

        def read_as(read: Read) -> Integers:
            values, scale = read(weight), _factor(read(name), divides=self._divides).reshape(1, 1)

            def ternary(block: slice) -> Tensor:
                at = torch.arange(block.start, block.stop, device="cpu")
                shifts = (2 * (at // quarter)).to(torch.uint8)
                return (values[at % quarter] >> shifts[:, None] & 3).to(torch.int8)

            if packed:
                return Integers((4 * quarter, inputs), ternary, 1, scale)
            return Integers((quarter, inputs), lambda block: values[block].float(), 0, scale)

        def check(read: Read) -> None:
            check_scales(lambda _: _factor(read(name), divides=self._divides), name, codes.file, LARGEST)

        dense = Stored(codes.file, (4 * quarter if packed else quarter, inputs), "BF16")
        part = integer_part(weight, dense, (weight, name), "BitNet, one scale for all weights", read_as)
        return replace(part, check=check, codes=part.codes if packed else None)


def _factor(scale: Tensor, *, divides: bool) -> Tensor:
    scale = scale.float().reshape(())
    return 1 / scale if divides else scale


class Gemma(Format):
    """Integers of 2, 4 or 8 bits, different ones for some modules."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._bits = _gemma_bits(raw.get("num_bits", 4))
        own = raw.get("module_quant_configs") or {}
        if not isinstance(own, Mapping):
            raise ModelRefused(f"module_quant_configs is {shown(own)}; an object is needed")
        self._own: list[tuple[re.Pattern[str], int]] = []
        for pattern, about in own.items():
            check_pattern(pattern)
            bits = about.get("num_bits", self._bits) if isinstance(about, Mapping) else about
            self._own.append((re.compile(pattern), _gemma_bits(bits)))

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        module, _, last = name.rpartition(".")
        stored = {"weight_scale": "weight", "embedding_scale": "embedding_quantized"}.get(last)
        if stored is None:
            return None
        bits = next((bits for pattern, bits in self._own if pattern.search(module)), self._bits)
        codes_name = f"{module}.{stored}"
        codes = stored_as(codes_name, weights.tensors, "I8" if bits == 8 else "U8")
        check_dimensions(codes_name, codes, 2)
        outputs, inputs = codes.shape[0], codes.shape[1] * 8 // bits
        scales = stored_as(name, weights.tensors, *SCALES)
        check_dimensions(name, scales, 2)
        if scales.shape[0] != outputs or inputs % scales.shape[1]:
            raise ModelRefused(f"{name} is {list(scales.shape)} for {outputs} outputs of {inputs} inputs")

        def read_as(read: Read) -> Integers:
            values = read(codes_name)
            return Integers((outputs, inputs), lambda block: _unpacked(values[block], bits), 0, read(name))

        group = None if scales.shape[1] == 1 else inputs // scales.shape[1]
        dense = Stored(codes.file, (outputs, inputs), "BF16")
        form = f"Gemma, {bits} bits, {per(group)}"
        return integer_part(f"{module}.weight", dense, (codes_name, name), form, read_as, name)


def _unpacked(raw: Tensor, bits: int) -> Tensor:
    """Bytes [n,w] -> signed codes [n, w * 8 / bits]."""
    if bits == 8:
        return raw
    unsigned = raw[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu") & (1 << bits) - 1
    return unsigned.flatten(-2).to(torch.int8) - (1 << bits - 1)


def _gemma_bits(found: Any) -> int:
    if type(found) is not int or found not in (2, 4, 8):
        raise ModelRefused(f"its weights are quantised (gemma) to {shown(found)} bits; read are 2, 4 and 8")
    return found
