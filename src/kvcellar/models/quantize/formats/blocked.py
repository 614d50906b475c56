"""blocked: weights that are stored as floats of 8 or 4 bits, with one scale for each block of outputs and inputs.

The last block of a row or a column may be smaller than the others. Shapes: E experts (1 for a matrix), o outputs, i
inputs, R and C blocks of outputs and of inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite, prod

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused
from kvcellar.kernels.codes import Codes, CodesOf
from kvcellar.models.quantize.formats.floats import E2M1, as_floats, e2m1
from kvcellar.models.quantize.formats.part import (
    EIGHT_BITS,
    EXPONENTS,
    LARGEST,
    SCALES,
    Part,
    Read,
    Rows,
    check_dimensions,
    check_scales,
    check_shape,
    dense_type,
    stored_as,
)
from kvcellar.models.quantize.layouts import columns_of, decode
from kvcellar.models.weights_files import Stored, WeightsFiles

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
