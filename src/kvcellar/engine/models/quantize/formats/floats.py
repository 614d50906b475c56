"""floats: weights that are stored as floats of 8 or 4 bits, with one scale for each block of outputs and inputs.

The scale of a weight W of 8 bits is `W_scale_inv`, which multiplies, despite its name, or `W_scale`. gpt-oss has
experts as 4-bit floats in groups of 32 inputs, each with an exponent of 2: the experts W of a layer are `W_blocks` U8
[E,o,i/32,16] and `W_scales` U8 [E,o,i/32]; the network's tensor is [E,i,o].

The last block of a row or a column may be smaller than the others. Shapes: E experts (1 for a matrix), o outputs, i
inputs, R and C blocks of outputs and of inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.models.quantize.formats.part import (
    E2M1,
    EIGHT_BITS,
    EXPONENTS,
    LARGEST,
    SCALES,
    Format,
    Part,
    Read,
    Rows,
    as_floats,
    block_of,
    check_dimensions,
    check_scales,
    check_shape,
    dense_type,
    e2m1,
    stored_as,
)
from kvcellar.engine.models.quantize.rounding import columns_of, decode
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
from kvcellar.errors import ModelRefused, shown
from kvcellar.kernels.codes import Codes, CodesOf

_TWICE_E2M1 = tuple(int(2 * one) for one in E2M1)
Block = tuple[int, int]  # outputs and inputs that share a scale


@dataclass(frozen=True, slots=True)
class Blocked:
    """Codes and scales by their names. `outer` is the name of a number that all scales are multiplied with, or divided
    by (`divided`). `number` is what scales are stored as, if not as their type says."""

    codes: str
    scales: str
    shape: tuple[int, int, int]  # E, o, i
    block: Block
    bits: int
    outer: str | None = None
    divided: bool = False
    number: torch.dtype | None = None

    def rows(self, read: Read) -> Rows:
        experts, outputs, inputs = self.shape
        codes = _codes(read(self.codes), self.bits).reshape(experts, outputs, -1)
        scales = self._scales(read).reshape(experts, ceil(outputs / self.block[0]), -1)  # [E,R,C]
        columns = columns_of(inputs, self.block[1]) if scales.shape[2] > 1 else None

        def rows(expert: int, block: slice) -> Tensor:
            own = scales[expert]
            if len(own) > 1:
                own = own[torch.arange(block.start, block.stop, device="cpu") // self.block[0]]
            some = codes[expert, block]
            return decode(e2m1(some) if self.bits == 4 else some, own, None, columns)

        return rows

    def doubled(self, read: Read) -> CodesOf:
        """The 4-bit floats as codes, with a table of twice the numbers, which are integers."""
        experts, outputs, inputs = self.shape
        if rest := inputs % self.block[1]:
            return lambda _: f"its last scale is for {rest} of {self.block[1]} inputs"
        raw = _codes(read(self.codes), self.bits).reshape(experts, outputs, -1)
        scales = self._scales(read).reshape(experts, outputs, -1) / 2

        def codes(expert: int) -> Codes:
            values = torch.stack((raw[expert] & 15, raw[expert] >> 4), -1).flatten(1)  # [o,i]
            return Codes(values, _TWICE_E2M1, scales[expert])

        return codes

    def _scales(self, read: Read) -> Tensor:
        stored = read(self.scales)
        scales = as_floats(stored if self.number is None else stored.view(self.number))
        if self.outer is None:
            return scales
        factor = read(self.outer).to(torch.float32).reshape(())
        return scales / factor if self.divided else scales * factor

    def check(self, file: str, read: Read) -> None:
        """Raise `ModelRefused` for scales that no weights have."""
        if self.outer is not None:
            factor = float(read(self.outer).reshape(()))
            if not isfinite(factor) or factor == 0:
                raise ModelRefused(f"{file}: {self.outer} is {factor}, which scales cannot have. The file is damaged")
        check_scales(lambda _: self._scales(read), self.scales, file, LARGEST)


def _codes(raw: Tensor, bits: int) -> Tensor:
    """Codes of any stored type as bytes of two 4-bit floats, or as 8-bit floats."""
    if bits == 4:
        return raw.view(torch.uint8)
    return raw if raw.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else raw.view(torch.float8_e4m3fn)


def blocked_part(
    name: str, found: Blocked, weights: WeightsFiles, form: str, *, transposed: bool = False, stacked: bool = False
) -> Part:
    """The dense tensor `name` [o,i], or [E,o,i] (`stacked`), whose codes and scales have been checked."""
    stored, scales = weights.tensors[found.codes], weights.tensors[found.scales]
    experts, outputs, inputs = found.shape
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    dense = Stored(stored.file, (experts, *shape) if stacked else shape, dense_type(scales))
    uses = tuple(filter(None, (found.codes, found.scales, found.outer)))
    check: Callable[[Read], None] = lambda read: found.check(stored.file, read)  # noqa: E731
    codes = found.doubled if found.bits == 4 else None
    return Part(name, dense, uses, form, found.rows, check, codes, transposed)


def eights(name: str, scales: str, weights: WeightsFiles, block: Block | None, method: str) -> Part:
    """A weight [o,i] or [E,o,i] of 8-bit floats whose scales are one for all, one for each output, or one for each
    block; with `block`, one for all or for each block. Raises `ModelRefused`."""
    codes = stored_as(name, weights.tensors, *EIGHT_BITS)
    check_dimensions(name, codes, 2, 3)
    stored = stored_as(scales, weights.tensors, *SCALES, *EXPONENTS)
    *stack, outputs, inputs = codes.shape
    one, each = _shapes(stack, 1, 1), _shapes(stack, outputs, 1)
    if stored.shape in one:
        found, form = (outputs, inputs), "one scale"
    elif block is None:
        check_shape(scales, stored, *one, *each)
        found, form = (1, inputs), "one scale for an output"
    else:
        check_shape(scales, stored, *_shapes(stack, ceil(outputs / block[0]), ceil(inputs / block[1])))
        found, form = block, f"one scale for {block[0]} x {block[1]} weights"
    shape = (prod(stack), outputs, inputs)
    return blocked_part(name, Blocked(name, scales, shape, found, 8), weights, f"{method}, {form}", stacked=bool(stack))


def _shapes(stack: list[int], rows: int, columns: int) -> list[tuple[int, ...]]:
    """The shapes in which files have R x C scales."""
    shapes: list[tuple[int, ...]] = [(*stack, rows, columns)]
    if columns == 1:
        shapes.append((*stack, rows))
    if rows == columns == 1:
        shapes.append(tuple(stack))
    return shapes if stack else [*shapes, (rows, 1, columns, 1)]


def fours(
    name: str,
    codes: str,
    scales: str,
    weights: WeightsFiles,
    group: int,
    form: str,
    *,
    types: tuple[str, ...] = EXPONENTS,
    outer: str | None = None,
    divided: bool = False,
) -> Part:
    """A weight [o,i] of 4-bit floats, two in a byte, with a scale for each `group` inputs of an output. Raises
    `ModelRefused`."""
    stored = stored_as(codes, weights.tensors, "U8")
    check_dimensions(codes, stored, 2)
    outputs, inputs = stored.shape[0], 2 * stored.shape[1]
    own = stored_as(scales, weights.tensors, *types)
    check_shape(scales, own, (outputs, ceil(inputs / group)))
    if outer is not None:
        check_shape(outer, stored_as(outer, weights.tensors, "F32"), (), (1,))
    found = Blocked(codes, scales, (1, outputs, inputs), (1, group), 4, outer, divided)
    return blocked_part(name, found, weights, form)


_SCALES = ("_scale_inv", "_scale")
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "MIXED_PRECISION")
_MXFP4_GROUP = 32  # inputs
_ROTATED = ".pre_quant_scale"


class ScaledFloats(Format):
    """fp8, mxfp8 and fbgemm_fp8: every weight of 8-bit floats has a scale. `weight_block_size` is that of blocks."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._method = str(raw["quant_method"])
        block = raw.get("weight_block_size") or ([1, 32] if self._method == "mxfp8" else None)
        self._block: Block | None = None if block is None else block_of(block)

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        weight = _weight(name)
        if weight not in weights.tensors or weights.tensors[weight].dtype not in EIGHT_BITS:
            return None
        return eights(weight, name, weights, self._block, self._method)


class ModelOpt(Format):
    """8-bit floats, and 4-bit floats in groups of 16 (nvfp4), perhaps both in one directory."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        algorithm = raw.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:
            raise ModelRefused(
                f"its weights are quantised by ModelOpt as {shown(algorithm)}; read are {', '.join(_ALGORITHMS)}"
            )

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        if name.endswith(_ROTATED):
            raise ModelRefused("inputs are scaled before they are multiplied (pre_quant_scale), which is not supported")
        weight = _weight(name)
        if not name.endswith(".weight_scale") or weight not in weights.tensors:
            return None
        if weights.tensors[weight].dtype == "U8":
            outer = f"{weight}_scale_2"
            return fours(
                weight, weight, name, weights, 16, "ModelOpt nvfp4, one scale for 16 inputs of an output",
                types=("F8_E4M3",), outer=outer,
            )  # fmt: skip
        scales = weights.tensors[name]
        block = (128, 128) if len(scales.shape) == 4 else None  # which is known by four dimensions
        return eights(weight, name, weights, (1, 32) if scales.dtype == "U8" else block, "ModelOpt fp8")


def _weight(scale: str) -> str:
    """The name of the weight of a scale; empty for names of others."""
    return next((scale.removesuffix(suffix) for suffix in _SCALES if scale.endswith(suffix)), "")


class Mxfp4(Format):
    """The format of a directory of this method."""

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        weight = name.removesuffix("_scales" if name.endswith("_scales") else "_blocks")
        blocks, scales = f"{weight}_blocks", f"{weight}_scales"
        if weight == name or (name == scales and blocks in weights.tensors):
            return None
        codes = stored_as(blocks, weights.tensors, "U8")
        check_dimensions(blocks, codes, 4)
        experts, outputs, groups, width = codes.shape
        check_shape(blocks, codes, (experts, outputs, groups, _MXFP4_GROUP // 2))
        check_shape(scales, stored_as(scales, weights.tensors, "U8"), (experts, outputs, groups))
        found = Blocked(blocks, scales, (experts, outputs, 2 * groups * width), (1, _MXFP4_GROUP), 4)
        return blocked_part(weight, found, weights, "mxfp4, one scale for 32 inputs", transposed=True, stacked=True)
