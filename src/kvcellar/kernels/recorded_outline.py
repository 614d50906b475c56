"""recorded_outline: what holds for a program whatever its sizes: the dimension of rows of each value, which values are
late, and which operators compute the same in every step."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.kernels.program import Argument, Number, Op, Program, Value
from kvcellar.kernels.recorded_calls import is_torch
from kvcellar.kernels.recorded_lowering import ON_ELEMENTS, operator
from kvcellar.kernels.recorded_repeats import Views, repeatable

_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = frozenset({"Min", "Max"})


@dataclass(frozen=True, slots=True)
class Outline:
    """A program and its constants, by storage. `rows`: of each value, the one dimension whose size is an expression.
    `late`: values whose sizes are not known before a run. `folded`: indices of operators whose results depend on
    constants and sizes only, and are written by no other operator. `repeatable`: as in `recorded_repeats.py`."""

    program: Program
    constants: Mapping[int, Tensor]
    rows: tuple[tuple[int, str] | None, ...]
    late: tuple[bool, ...]
    folded: frozenset[int]
    repeatable: Mapping[int, Views]


def outlined(program: Program, constants: Mapping[int, Tensor], symbols: Collection[str]) -> Outline:
    """`symbols` have numbers before a run."""
    late = tuple(bool(_symbols(value.shape) - set(symbols)) for value in program.values)
    rows = tuple(_row(value) for value in program.values)
    folded = _folded(program, constants.keys(), late, symbols)
    return Outline(program, constants, rows, late, folded, repeatable(program, ON_ELEMENTS))


def _row(value: Value) -> tuple[int, str] | None:
    found = [(dim, size) for dim, size in enumerate(value.shape) if isinstance(size, str)]
    return found[0] if len(found) == 1 else None


def _symbols(sizes: Iterator[int | str] | tuple[int | str, ...]) -> set[str]:
    return {name for size in sizes if isinstance(size, str) for name in _NAME.findall(size)} - _FUNCTIONS


def _numbers(argument: Argument) -> Iterator[int | str]:
    if isinstance(argument, Number):
        yield argument.size
    elif isinstance(argument, tuple):
        for one in argument:
            yield from _numbers(one)


def is_late(op: Op, late: tuple[bool, ...], symbols: Collection[str]) -> bool:
    """Whether an operator has to wait for the sizes of a run."""
    values = (*op.reads, *(value for value in op.outputs if value is not None))
    sizes = _numbers((*op.args, *op.kwargs.values()))
    return any(late[value] for value in values) or bool(_symbols(tuple(sizes)) - set(symbols))


def _folded(
    program: Program, constants: Collection[int], late: tuple[bool, ...], symbols: Collection[str]
) -> frozenset[int]:
    def storages(values: list[int | None] | tuple[int | None, ...]) -> set[int]:
        return {program.values[value].storage for value in values if value is not None}

    folded = {
        index
        for index, op in enumerate(program.ops)
        if is_torch(op) and not is_late(op, late, symbols) and not _draws(op)
    }
    while True:
        known = set(constants) | {one for index in folded for one in storages(program.ops[index].outputs)}
        for index, op in enumerate(program.ops):
            if index not in folded:
                known -= storages(op.outputs)
        kept = {
            index
            for index in folded
            if storages(list(program.ops[index].reads)) <= known
            and storages(program.ops[index].outputs) <= known - set(constants)
        }
        if kept == folded:
            return frozenset(folded)
        folded = kept


def _draws(op: Op) -> bool:
    """Whether its results are random."""
    return torch.Tag.nondeterministic_seeded in operator(op.name).tags
