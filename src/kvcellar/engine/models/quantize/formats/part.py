"""part: one weight that is stored quantised: the tensors that it is computed from, and how, in blocks of rows.

A weight is computed in float32 when it is read, one block of rows after the other, and rounded once. Weights of
integers can also be read as codes, for products. Shapes: E experts (1 for a matrix), o outputs, i inputs, c scales of
an output, n rows of a block.

Always true: the types and shapes of the stored tensors were checked before a part was made of them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.models.quantize.rounding import decode
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
from kvcellar.errors import ModelRefused, shown
from kvcellar.kernels.codes import INT4, Coded, Codes, CodesOf, row_blocks

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def looked_up(raw: Tensor, table: Tensor, *, high_first: bool = False) -> Tensor:
    """Bytes U8 [...,w] that hold two codes of 4 bits each -> F32 [...,2w]: what `table` [16] has for them. The code in
    the lowest bits is the first one, or the second one (`high_first`).

    Both values of a byte are looked up at once, as the halves of a 64-bit number.
    """
    low, high = table.float().repeat(16), table.float().repeat_interleave(16)
    both = torch.stack((high, low) if high_first else (low, high), 1).view(torch.float64).flatten()  # [256]
    found = both.index_select(0, raw.reshape(-1).to(torch.int32))
    return found.view(torch.float32).view(*raw.shape[:-1], -1)


def e2m1(raw: Tensor) -> Tensor:
    """Bytes U8 [...,w] of two 4-bit floats each, the first one in the lowest bits -> F32 [...,2w]."""
    return looked_up(raw, torch.tensor(E2M1, device="cpu"))


def as_floats(scales: Tensor) -> Tensor:
    """F32 of scales: bytes and F8_E8M0 are exponents of 2, plus 127; 255 becomes infinite."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.to(torch.float32)
    exponents = scales.view(torch.uint8).to(torch.int32)
    lowest = torch.full_like(exponents, 1 << 22)  # 2^-127, which is subnormal
    return torch.where(exponents == 0, lowest, exponents << 23).view(torch.float32)


_FEWEST, _MOST = INT4[0], INT4[-1]  # of 4 bits


@dataclass(frozen=True, slots=True)
class Integers:
    """The weight is (integer - zero) * scale + bias.

    `stored` returns the integers of a block of rows, [n,i]; `half` is their middle, and the zero where there are no
    `zeros`. `scales` [o,c] or [1,c]; `zeros` and `biases` [o,c]. `columns` [i] is the scale of each input; None: groups
    of equal size, in order. Blocks start at multiples of `step`.
    """

    shape: tuple[int, int]
    stored: Callable[[slice], Tensor]
    half: int
    scales: Tensor
    zeros: Tensor | None = None
    biases: Tensor | None = None
    columns: Tensor | None = None
    step: int = 1

    def rows(self, _: int, block: slice) -> Tensor:
        """F32 [n,i]."""
        integers = self.stored(block)
        if self.zeros is None and self.half:
            integers = integers - self.half
        scales = self.scales[block] if len(self.scales) > 1 else self.scales
        dense = decode(integers, scales, None if self.zeros is None else self.zeros[block], self.columns)
        if self.biases is None:
            return dense
        biases = self.biases[block].float()
        return dense.unflatten(1, (biases.shape[1], -1)).add_(biases[..., None]).flatten(1)

    def codes(self) -> Codes | str:
        """The same weight as codes, or the reason why it has no such form."""
        order = None if self.columns is None else self._order(self.columns)
        if isinstance(order, str):
            return order
        values = torch.empty(self.shape, dtype=torch.int8, device="cpu")
        for block in row_blocks(*self.shape, step=self.step):
            some = (self.stored(block) - self.half).to(torch.int8)
            values[block] = some if order is None else some[:, order]
        low, high = torch.aminmax(values)
        small = int(low) >= _FEWEST and int(high) <= _MOST
        scales = self.scales.float().expand(self.shape[0], -1)
        return Codes(
            values.sub_(_FEWEST).view(torch.uint8) if small else values,
            INT4 if small else None,
            scales.contiguous(),
            self._mins(scales),
            order,
        )

    def _order(self, columns: Tensor) -> Tensor | str:
        """The inputs sorted by their groups, or why these are not of one size."""
        counts = columns.bincount(minlength=self.scales.shape[1])
        if len(counts.unique()) > 1:
            return f"its groups have from {int(counts.min())} to {int(counts.max())} inputs"
        order = columns.argsort(stable=True)
        return order

    def _mins(self, scales: Tensor) -> Tensor | None:
        """What is added to integers of a product, which are less by `half`."""
        if self.zeros is None or (self.biases is None and bool((self.zeros == self.half).all())):
            return None
        mins = (self.half - self.zeros.float()) * scales
        return (mins if self.biases is None else mins + self.biases.float()).contiguous()


LARGEST = 2.0**16  # of a scale; weights of real models are far below
SCALES = ("BF16", "F16", "F32")
EXPONENTS = ("U8", "F8_E8M0")  # scales that are powers of 2
EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
_MOST_BLOCK = 1 << 20  # outputs or inputs
_MOST_PATTERN = 512  # characters of a target
_UNBOUNDED = 4  # repetitions in a pattern: with more, matching a name could take minutes
Read = Callable[[str], Tensor]  # a stored tensor by its name
Rows = Callable[[int, slice], Tensor]  # of an expert: rows -> F32 [n,i]


@dataclass(frozen=True, slots=True)
class Part:
    """One weight. `stored` is the dense tensor `name` that it stands for: [o,i] or [E,o,i]; `transposed`: [E,i,o].

    `rows` reads the codes, and returns what decodes blocks of `step` rows, or a multiple of it; `codes` does so
    for products, and returns what returns those of an expert, or the reason why they are not multiplied (None: those
    of its format never are). `check` raises
    `ModelRefused` for values that no weights have. `form` describes the storage, for reports.
    """

    name: str
    stored: Stored
    uses: tuple[str, ...]  # all stored tensors that describe the weight
    form: str
    rows: Callable[[Read], Rows]
    check: Callable[[Read], None]
    codes: Callable[[Read], CodesOf] | None = None
    transposed: bool = False
    step: int = 1


class Format(ABC):
    """How the quantised weights of a directory are stored, by the description `raw` in its config."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        del raw  # each weight says how it is stored

    @abstractmethod
    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        """The weight that the stored tensor `name` marks as quantised; None if it marks none. Raises `ModelRefused`
        with the reason if what is stored of this weight does not fit the format."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decodes one weight when it is indexed."""

    part: Part
    slices: Mapping[str, Any]
    dtype: torch.dtype = torch.float32

    def rounded(self, dtype: torch.dtype) -> "Decoded":
        """The same weight in the type of the network if it has several experts, which are not held in float32 all at
        once; a matrix stays in float32, and is rounded by the reader."""
        return replace(self, dtype=dtype) if len(self.part.stored.shape) > 2 else self

    def __getitem__(self, index: Any) -> Tensor:
        dense = torch.empty(self.part.stored.shape, dtype=self.dtype, device="cpu")
        matrices = dense.view(-1, *dense.shape[-2:])
        if self.part.transposed:
            matrices = matrices.transpose(1, 2)  # [E,o,i]
        rows = self.part.rows(self.read)
        for expert, matrix in enumerate(matrices):
            for block in row_blocks(*matrix.shape, step=self.part.step):
                matrix[block] = rows(expert, block)
        return dense[index]

    def read(self, name: str) -> Tensor:
        return self.slices[name][...]


class DecodedCodes(Decoded, Coded):
    """Decodes one weight, or returns its codes."""

    def experts(self) -> CodesOf:
        assert self.part.codes is not None
        return self.part.codes(self.read)


def shown_part(part: Part, slices: Mapping[str, Any]) -> Decoded:
    """What stands for the weight in place of its stored tensors."""
    return (Decoded if part.codes is None else DecodedCodes)(part, slices)


# -- checks ------------------------------------------------------------------------------------------------------------


def stored_as(name: str, tensors: Mapping[str, Stored], *types: str) -> Stored:
    """The stored tensor of this name. Raises `ModelRefused` if there is none, or it has another type."""
    stored = tensors.get(name)
    if stored is None:
        raise ModelRefused(f"there is no {name}")
    if stored.dtype not in types:
        raise ModelRefused(f"{name} is {stored.dtype}, not {' or '.join(types)}")
    return stored


def check_shape(name: str, stored: Stored, *shapes: tuple[int, ...]) -> None:
    """Raise `ModelRefused` unless the tensor has one of these shapes."""
    if stored.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelRefused(f"{name} is {list(stored.shape)}; {expected} is needed")


def check_dimensions(name: str, stored: Stored, *counts: int) -> None:
    """Raise `ModelRefused` unless the tensor has so many dimensions, none of which is 0."""
    if len(stored.shape) not in counts or 0 in stored.shape:
        expected = " or ".join({2: "two", 3: "three", 4: "four"}[count] for count in counts)
        raise ModelRefused(f"{name} is {list(stored.shape)}; {expected} dimensions are needed")


def check_scales(read: Read, name: str, file: str, largest: float = LARGEST) -> None:
    """Raise `ModelRefused` for scales that no weights have."""
    found = float(as_floats(read(name)).abs().max())  # NaN if any is
    if not found <= largest:
        raise ModelRefused(
            f"{file}: {name} has a scale of {found}; at most {largest:.0f} is allowed. The file is damaged"
        )


def check_indices(read: Read, name: str, file: str, count: int) -> None:
    """Raise `ModelRefused` for indices of groups that are out of range."""
    order = read(name)
    low, high = int(order.min()), int(order.max())
    if low < 0 or high >= count:
        raise ModelRefused(
            f"{file}: {name} has indices from {low} to {high}; there are {count} groups. The file is damaged"
        )


def integer_part(
    name: str,
    stored: Stored,
    uses: tuple[str, ...],
    form: str,
    read_as: Callable[[Read], Integers],
    *scales: str,
    largest: float = LARGEST,
    order: tuple[str, int] | None = None,
    step: int = 1,
) -> Part:
    """A matrix of integers. `scales` are stored tensors of numbers up to `largest`, `order` is one of so many indices
    of groups."""

    def check(read: Read) -> None:
        for one in scales:
            check_scales(read, one, stored.file, largest)
        if order is not None:
            check_indices(read, order[0], stored.file, order[1])

    def codes(read: Read) -> CodesOf:
        return lambda _: read_as(read).codes()

    return Part(name, stored, uses, form, lambda read: read_as(read).rows, check, codes, step=step)


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


def dense_type(scales: Stored) -> str:
    """The type of a dense weight where the config names none. Scales in float32 say nothing about it."""
    return scales.dtype if scales.dtype in ("BF16", "F16") else "BF16"


def per(group: int | None) -> str:
    """How inputs share scales, for reports."""
    return "one scale for an output" if group is None else f"one scale for {group} inputs of an output"
