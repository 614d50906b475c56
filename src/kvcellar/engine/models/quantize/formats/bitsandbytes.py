"""bitsandbytes: nf4 and fp4 with plain or nested scales, and 8-bit integers.

A weight W of 4 bits is `W` U8, two codes in a byte, the first one in the highest bits, over the whole matrix; with
`W.absmax`, `W.quant_map` [16], and `W.quant_state.bitsandbytes__nf4`, a JSON object. Nested scales are bytes:
`W.nested_quant_map` [256] times `W.nested_absmax`, plus an offset. A module X of 8 bits is `X.weight` I8 and `X.SCB`
[o].
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.models.quantize.formats.part import (
    LARGEST,
    Integers,
    Part,
    Read,
    Rows,
    check_dimensions,
    check_scales,
    check_shape,
    integer_part,
    looked_up,
    stored_as,
)
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
from kvcellar.errors import ModelRefused, shown

_KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_MOST_STATE = 1 << 12  # bytes of a state
_BLOCKS = tuple(1 << n for n in range(4, 17))  # weights that share a scale


class BitsAndBytes:
    """The format of a directory of this method: each weight says how it is stored."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        del raw  # 4 or 8 bits, types and nesting are known from the tensors

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        weight, described, _ = name.partition(_STATE)
        if described:
            stored_as(f"{weight}.absmax", weights.tensors, "F32", "U8")
        if name.endswith(".absmax"):
            return _four_bits(name.removesuffix(".absmax"), weights)
        return _eight_bits(name.removesuffix(".SCB"), weights) if name.endswith(".SCB") else None


def _eight_bits(module: str, weights: WeightsFiles) -> Part:
    weight, scales, about = (f"{module}.{suffix}" for suffix in ("weight", "SCB", "weight_format"))
    codes = stored_as(weight, weights.tensors, "I8")
    check_dimensions(weight, codes, 2)
    check_shape(scales, stored_as(scales, weights.tensors, "F32", "F16", "BF16"), codes.shape[:1])
    uses = (weight, scales)
    if about in weights.tensors:
        check_shape(about, stored_as(about, weights.tensors, "U8"), ())
        if int(weights.slices[about][...]):
            raise ModelRefused(f"{about} is not 0: its rows are stored in another order, which is not supported")
        uses = (*uses, about)

    def read_as(read: Read) -> Integers:
        integers, factors = read(weight), read(scales).float()[:, None] / 127
        return Integers((codes.shape[0], codes.shape[1]), lambda block: integers[block], 0, factors)

    dense = Stored(codes.file, codes.shape, "BF16")
    form = "bitsandbytes, 8 bits, one scale for an output"
    check = partial(check_scales, name=scales, file=codes.file, largest=127 * LARGEST)
    return integer_part(weight, dense, uses, form, read_as, check)


@dataclass(frozen=True, slots=True)
class _State:
    kind: str
    shape: tuple[int, int]
    block: int
    nested_block: int | None
    offset: float
    dtype: str

    @property
    def scales(self) -> int:
        return ceil(self.shape[0] * self.shape[1] / self.block)


def _four_bits(weight: str, weights: WeightsFiles) -> Part:
    tensors = weights.tensors
    names = [f"{weight}{_STATE}{kind}" for kind in _KINDS if f"{weight}{_STATE}{kind}" in tensors]
    if len(names) != 1:
        raise ModelRefused(f"there is no {weight}{_STATE}nf4, which describes it")
    nested = f"{weight}.nested_absmax" in tensors
    state = _state(names[0], weights, nested)
    codes = stored_as(weight, tensors, "U8")
    check_shape(weight, codes, (ceil(state.shape[0] * state.shape[1] / 2), 1))
    absmax, values = f"{weight}.absmax", f"{weight}.quant_map"
    check_shape(absmax, stored_as(absmax, tensors, "U8" if nested else "F32"), (state.scales,))
    check_shape(values, stored_as(values, tensors, "F32"), (16,))
    uses = (weight, absmax, values, names[0])
    if state.nested_block is not None:
        outer, inner = f"{weight}.nested_absmax", f"{weight}.nested_quant_map"
        check_shape(outer, stored_as(outer, tensors, "F32"), (ceil(state.scales / state.nested_block),))
        check_shape(inner, stored_as(inner, tensors, "F32"), (256,))
        uses = (*uses, outer, inner)

    def check(read: Read) -> None:
        check_scales(lambda _: _scales(weight, state, read), absmax, codes.file)
        check_scales(read, values, codes.file)

    form = f"bitsandbytes {state.kind}, one {'nested ' if nested else ''}scale for {state.block} weights"
    dense = Stored(codes.file, state.shape, state.dtype)
    return Part(weight, dense, uses, form, partial(_rows, weight, state), check)


def _state(name: str, weights: WeightsFiles, nested: bool) -> _State:
    """The JSON object in a tensor, whose numbers are compared with the shapes of others before they are used."""
    stored = stored_as(name, weights.tensors, "U8")
    if len(stored.shape) != 1 or stored.shape[0] > _MOST_STATE:
        raise ModelRefused(f"{name} is {list(stored.shape)}; at most {_MOST_STATE} bytes are allowed")
    try:
        raw = json.loads(bytes(weights.slices[name][...].tolist()))
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{name} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelRefused(f"{name} holds a {type(raw).__name__}, not an object")
    shape: Any = raw.get("shape")
    block: Any = raw.get("blocksize")
    offset: Any = raw.get("nested_offset", 0.0)
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
        raise ModelRefused(f"{name} has the shape {shown(shape)}; two sizes are needed")
    inner = raw.get("nested_blocksize") if nested else None
    for what, size in (("blocksize", block), *([("nested_blocksize", inner)] if nested else [])):
        if type(size) is not int or size not in _BLOCKS:
            raise ModelRefused(f"{name} has the {what} {shown(size)}; a power of 2 from {_BLOCKS[0]} is needed")
    if type(offset) not in (int, float) or not abs(offset) <= sys.float_info.max:  # exact for any integer
        raise ModelRefused(f"{name} has the nested_offset {shown(offset)}; a number that a float can hold is needed")
    dtype = {"float16": "F16", "float32": "F32"}.get(str(raw.get("dtype")), "BF16")
    return _State(name.removeprefix(name[:-3]), (shape[0], shape[1]), block, inner, float(offset), dtype)


def _scales(weight: str, state: _State, read: Read) -> Tensor:
    """F32, one for each block of the flat matrix."""
    scales = read(f"{weight}.absmax")
    if state.nested_block is None:
        return scales
    outer = read(f"{weight}.nested_absmax").repeat_interleave(state.nested_block)[: state.scales]
    return read(f"{weight}.nested_quant_map")[scales.to(torch.int64)] * outer + state.offset


def _rows(weight: str, state: _State, read: Read) -> Rows:
    codes, values, scales = read(weight).flatten(), read(f"{weight}.quant_map"), _scales(weight, state, read)
    inputs = state.shape[1]

    def rows(_: int, block: slice) -> Tensor:
        start, stop = block.start * inputs, block.stop * inputs  # of the flat matrix
        first = start // 2 * 2
        found = looked_up(codes[start // 2 : ceil(stop / 2)], values, high_first=True)[start - first : stop - first]
        own = scales[torch.arange(start, stop, device="cpu") // state.block]
        return (found * own).view(-1, inputs)

    return rows
