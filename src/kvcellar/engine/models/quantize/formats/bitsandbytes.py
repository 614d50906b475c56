"""bitsandbytes: nf4 and fp4 with plain or nested scales, and 8-bit integers.

A weight W of 4 bits is `W` U8, two codes in a byte, the first one in the highest bits, over the whole matrix; with
`W.absmax`, `W.quant_map` [16], and `W.quant_state.bitsandbytes__nf4`, a JSON object. Nested scales are bytes:
`W.nested_quant_map` [256] times `W.nested_absmax`, plus an offset. A module X of 8 bits is `X.weight` I8 and `X.SCB`
[o].
"""

from functools import partial
from math import ceil
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from kvcellar.engine.models.quantize.formats.part import (
    LARGEST,
    Format,
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
from kvcellar.errors import ModelRefused

_KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_MOST_STATE = 1 << 12  # bytes of a state


class BitsAndBytes(Format):
    """The format of a directory of this method: each weight says how it is stored."""

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
    return integer_part(weight, dense, uses, form, read_as, scales, largest=127 * LARGEST)


Block = Literal[16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]  # weights that share a scale
Size = Annotated[int, Meta(gt=0, lt=1 << 31)]


class _State(Struct):
    """What a file has about a weight. Its numbers are compared with the shapes of others before they are used."""

    shape: tuple[Size, Size]
    blocksize: Block
    dtype: Any = None
    nested_blocksize: Block | None = None
    nested_offset: float = 0.0

    @property
    def scales(self) -> int:
        return ceil(self.shape[0] * self.shape[1] / self.blocksize)


def _four_bits(weight: str, weights: WeightsFiles) -> Part:
    tensors = weights.tensors
    names = [f"{weight}{_STATE}{kind}" for kind in _KINDS if f"{weight}{_STATE}{kind}" in tensors]
    if len(names) != 1:
        raise ModelRefused(f"there is no {weight}{_STATE}nf4, which describes it")
    nested = f"{weight}.nested_absmax" in tensors
    state, kind = _state(names[0], weights, nested), names[0].removeprefix(f"{weight}{_STATE}")
    codes = stored_as(weight, tensors, "U8")
    check_shape(weight, codes, (ceil(state.shape[0] * state.shape[1] / 2), 1))
    absmax, values = f"{weight}.absmax", f"{weight}.quant_map"
    check_shape(absmax, stored_as(absmax, tensors, "U8" if nested else "F32"), (state.scales,))
    check_shape(values, stored_as(values, tensors, "F32"), (16,))
    uses = (weight, absmax, values, names[0])
    if nested:
        assert state.nested_blocksize is not None
        outer, inner = f"{weight}.nested_absmax", f"{weight}.nested_quant_map"
        check_shape(outer, stored_as(outer, tensors, "F32"), (ceil(state.scales / state.nested_blocksize),))
        check_shape(inner, stored_as(inner, tensors, "F32"), (256,))
        uses = (*uses, outer, inner)

    def check(read: Read) -> None:
        check_scales(lambda _: _scales(weight, state, read), absmax, codes.file)
        check_scales(read, values, codes.file)

    form = f"bitsandbytes {kind}, one {'nested ' if nested else ''}scale for {state.blocksize} weights"
    dense = Stored(codes.file, state.shape, {"float16": "F16", "float32": "F32"}.get(str(state.dtype), "BF16"))
    return Part(weight, dense, uses, form, partial(_rows, weight, state), check)


def _state(name: str, weights: WeightsFiles, nested: bool) -> _State:
    """The JSON object in a tensor."""
    stored = stored_as(name, weights.tensors, "U8")
    if len(stored.shape) != 1 or stored.shape[0] > _MOST_STATE:
        raise ModelRefused(f"{name} is {list(stored.shape)}; at most {_MOST_STATE} bytes are allowed")
    try:
        found = msgspec.json.decode(bytes(weights.slices[name][...].tolist()), type=_State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelRefused(f"{name} is not as it should be: {error}") from error
    if nested and found.nested_blocksize is None:
        raise ModelRefused(f"{name} has no nested_blocksize, and its scales are nested")
    return found


def _scales(weight: str, state: _State, read: Read) -> Tensor:
    """F32, one for each block of the flat matrix."""
    scales = read(f"{weight}.absmax")
    if scales.dtype is not torch.uint8:
        return scales
    assert state.nested_blocksize is not None
    outer = read(f"{weight}.nested_absmax").repeat_interleave(state.nested_blocksize)[: state.scales]
    return read(f"{weight}.nested_quant_map")[scales.to(torch.int64)] * outer + state.nested_offset


def _rows(weight: str, state: _State, read: Read) -> Rows:
    codes, values, scales = read(weight).flatten(), read(f"{weight}.quant_map"), _scales(weight, state, read)
    inputs = state.shape[1]

    def rows(_: int, block: slice) -> Tensor:
        start, stop = block.start * inputs, block.stop * inputs  # of the flat matrix
        first = start // 2 * 2
        found = looked_up(codes[start // 2 : ceil(stop / 2)], values, high_first=True)[start - first : stop - first]
        own = scales[torch.arange(start, stop, device="cpu") // state.blocksize]
        return (found * own).view(-1, inputs)

    return rows
