"""part: one weight that is stored quantised: the tensors that it is computed from, and how, in blocks of rows.

A weight is computed in float32 when it is read, one block of rows after the other, and rounded once. Shapes: E experts
(1 for a matrix), o outputs, i inputs, n rows of a block.

Always true: the types and shapes of the stored tensors were checked before a part was made of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused
from kvcellar.kernels.codes import Coded, CodesOf
from kvcellar.models.quantize.formats.floats import as_floats
from kvcellar.models.quantize.formats.integers import Integers
from kvcellar.models.quantize.layouts import row_blocks
from kvcellar.models.weights_files import Stored, WeightsFiles

LARGEST = 2.0**16  # of a scale; weights of real models are far below
SCALES = ("BF16", "F16", "F32")
EXPONENTS = ("U8", "F8_E8M0")  # scales that are powers of 2
EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
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


class Format(Protocol):
    """How the quantised weights of a directory are stored."""

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        """The weight that the stored tensor `name` marks as quantised; None if it marks none. Raises `ModelRefused`
        with the reason if what is stored of this weight does not fit the format."""
        ...


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
    check: Callable[[Read], None],
    *,
    step: int = 1,
) -> Part:
    """A matrix of integers."""

    def codes(read: Read) -> CodesOf:
        return lambda _: read_as(read).codes()

    return Part(name, stored, uses, form, lambda read: read_as(read).rows, check, codes, step=step)


def dense_type(scales: Stored) -> str:
    """The type of a dense weight where the config names none. Scales in float32 say nothing about it."""
    return scales.dtype if scales.dtype in ("BF16", "F16") else "BF16"


def per(group: int | None) -> str:
    """How inputs share scales, for reports."""
    return "one scale for an output" if group is None else f"one scale for {group} inputs of an output"
