"""small: integers of few bits that networks were trained for: BitNet's of three values, Gemma's of 2, 4 and 8 bits;
and gpt-oss' floats of 4.

BitNet: `X.weight` U8 [o/4,i], four outputs of 2 bits in a byte, at distances of o/4, and `X.weight_scale` [1]. Gemma:
`X.weight` U8 or I8, packed along inputs, the first one in the lowest bits, and `X.weight_scale` [o,c]; embeddings are
`X.embedding_quantized` and `X.embedding_scale`.

gpt-oss: experts as 4-bit floats in groups of 32 inputs, each with an exponent of 2. The experts W of a layer are
`W_blocks` U8 [E,o,i/32,16] and `W_scales` U8 [E,o,i/32]; the network's tensor is [E,i,o].
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.quantize.formats.blocked import Blocked, blocked_part
from kvcellar.models.quantize.formats.integers import Integers
from kvcellar.models.quantize.formats.part import (
    LARGEST,
    SCALES,
    Part,
    Read,
    check_dimensions,
    check_scales,
    check_shape,
    integer_part,
    per,
    stored_as,
)
from kvcellar.models.quantize.schemes import check_pattern
from kvcellar.models.weights_files import Stored, WeightsFiles

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32


class Mxfp4:
    """The format of a directory of this method."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        del raw  # which has only names of modules that are not quantised, and those have no blocks

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        weight = name.removesuffix(_SCALES if name.endswith(_SCALES) else _BLOCKS)
        blocks, scales = f"{weight}{_BLOCKS}", f"{weight}{_SCALES}"
        if weight == name or (name == scales and blocks in weights.tensors):
            return None
        codes = stored_as(blocks, weights.tensors, "U8")
        check_dimensions(blocks, codes, 4)
        experts, outputs, groups, width = codes.shape
        check_shape(blocks, codes, (experts, outputs, groups, _GROUP // 2))
        check_shape(scales, stored_as(scales, weights.tensors, "U8"), (experts, outputs, groups))
        found = Blocked(blocks, scales, (experts, outputs, 2 * groups * width), (1, _GROUP), 4)
        return blocked_part(weight, found, weights, "mxfp4, one scale for 32 inputs", transposed=True, stacked=True)


_SCALE = ".weight_scale"


class BitNet:
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
        part = integer_part(weight, dense, (weight, name), "BitNet, one scale for all weights", read_as, check)
        return part if packed else replace(part, codes=None)


def _factor(scale: Tensor, *, divides: bool) -> Tensor:
    scale = scale.float().reshape(())
    return 1 / scale if divides else scale


class Gemma:
    """Integers of 2, 4 or 8 bits, different ones for some modules."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._bits = _bits(raw.get("num_bits", 4))
        own = raw.get("module_quant_configs") or {}
        if not isinstance(own, Mapping):
            raise ModelRefused(f"module_quant_configs is {shown(own)}; an object is needed")
        self._own: list[tuple[re.Pattern[str], int]] = []
        for pattern, about in own.items():
            check_pattern(pattern)
            bits = about.get("num_bits", self._bits) if isinstance(about, Mapping) else about
            self._own.append((re.compile(pattern), _bits(bits)))

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
        check = partial(check_scales, name=name, file=codes.file)
        return integer_part(f"{module}.weight", dense, (codes_name, name), form, read_as, check)


def _unpacked(raw: Tensor, bits: int) -> Tensor:
    """Bytes [n,w] -> signed codes [n, w * 8 / bits]."""
    if bits == 8:
        return raw
    unsigned = raw[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu") & (1 << bits) - 1
    return unsigned.flatten(-2).to(torch.int8) - (1 << bits - 1)


def _bits(found: Any) -> int:
    if type(found) is not int or found not in (2, 4, 8):
        raise ModelRefused(f"its weights are quantised (gemma) to {shown(found)} bits; read are 2, 4 and 8")
    return found
