"""recorded_outline: what holds for a program whatever its sizes, and operators that Python calls in a recorded step.

The outline is the dimension of rows of each value, which values are late, and which operators compute the same in every
step. Python calls torch's own operators, and those that a handler binds: the compiled loop stops before such an
operator and goes on behind it, so an exception that it raises ends the step as it would in the network.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from ctypes import CFUNCTYPE, c_int, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcellar.engine.recording.program import Argument, Cache, Number, Op, Program, Ref, Sizes, Value, resolved
from kvcellar.engine.recording.recorded_lowering import operator
from kvcellar.engine.recording.recorded_operators import viewed
from kvcellar.kernels.compiled import Native, error_of

Call = Callable[[], None]
Bound = Native | Sequence[Native] | Call
NATIVE = CFUNCTYPE(c_int, c_void_p)


# Binds the operators of one name that is not torch's to tensors whose addresses stay: returns what computes the outputs
# from the inputs, the tensors of `op.reads`, each time that it is called, in order. The content of tensors has no
# meaning when they are bound. Sizes among `op.args` are numbers.
Handler = Callable[[Op, Sequence[Tensor], Sequence[Tensor | None]], Bound]


def is_torch(op: Op) -> bool:
    return op.name.startswith("aten.")


def of_torch(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], sizes: Sizes) -> Call:
    """A call of torch's operator, whose results are copied to `outputs` unless it writes there itself."""
    of = operator(op.name)
    left = iter(inputs)
    args = resolved(op.args, lambda _: next(left), sizes)
    kwargs = {name: resolved(one, lambda _: next(left), sizes) for name, one in op.kwargs.items()}
    if of._schema.is_mutable:
        return lambda: of(*args, **kwargs)

    def call() -> None:
        made = of(*args, **kwargs)
        for out, one in zip(outputs, (made,) if isinstance(made, Tensor) else made, strict=True):
            if out is not None:
                _copy(out, one)

    return call


def of_native(native: Native) -> Call:
    """A call of a compiled function by itself. Raises `MemoryError` and `IndexError` as it is called."""
    function, address = NATIVE(native.function), native.address

    def call() -> None:
        if error := function(address):
            raise error_of(error)
        assert native

    return call


def with_numbers(op: Op, sizes: Sizes) -> Op:
    """The operator with numbers in place of its sizes, and types of torch in place of their names."""
    kwargs = {name: resolved(one, Ref, sizes, Cache()) for name, one in op.kwargs.items()}
    return replace(op, args=resolved(op.args, Ref, sizes, Cache()), kwargs=kwargs)


def _copy(out: Tensor, made: Tensor) -> None:
    if made.shape != out.shape or made.dtype != out.dtype:
        expected = f"{tuple(out.shape)} {out.dtype}"
        raise RuntimeError(f"an operator returned {tuple(made.shape)} {made.dtype} where {expected} was recorded")
    out.copy_(made)


_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = frozenset({"Min", "Max"})


@dataclass(frozen=True, slots=True)
class Outline:
    """A program and its constants, by storage: its own, and what operators compute from these for all sizes, which are
    not in the program any more. `reads`: the values that each operator reads. `rows`: of each value, the one dimension
    whose size is an expression. `late`: values whose sizes are not known before a run. `folded`: indices of operators
    whose results depend on constants and sizes only, and are written by no other operator."""

    program: Program
    constants: Mapping[int, Tensor]
    reads: tuple[Sequence[int], ...]
    rows: tuple[tuple[int, str] | None, ...]
    late: tuple[bool, ...]
    folded: frozenset[int]


def outlined(program: Program, constants: Mapping[int, Tensor], symbols: Collection[str]) -> Outline:
    """`symbols` have numbers before a run."""
    same = _folded(program, constants.keys(), _late(program, ()), ())
    made = computed(program, [program.ops[index] for index in sorted(same)], constants, {})
    program = replace(program, ops=tuple(op for index, op in enumerate(program.ops) if index not in same))
    read = {program.values[value].storage for op in program.ops for value in op.reads}
    read |= {program.values[value].storage for value in program.outputs.values()}
    constants = {**constants, **{storage: tensor for storage, tensor in made.items() if storage in read}}
    late, rows = _late(program, symbols), tuple(_row(value) for value in program.values)
    folded, reads = _folded(program, constants.keys(), late, symbols), tuple(op.reads for op in program.ops)
    return Outline(program, constants, reads, rows, late, folded)


def _late(program: Program, symbols: Collection[str]) -> tuple[bool, ...]:
    every = ((*value.shape, *value.strides, value.offset) for value in program.values)
    return tuple(bool(symbols_of(sizes) - set(symbols)) for sizes in every)


def computed(program: Program, ops: Sequence[Op], constants: Mapping[int, Tensor], symbols: Sizes) -> dict[int, Tensor]:
    """The storages that these operators write, from constants alone, as bytes."""
    sizes: dict[int, int] = {}
    for index in (index for op in ops for index in op.outputs if index is not None):
        view = viewed(program.values[index], symbols)
        sizes[view.storage] = max(sizes.get(view.storage, 1), view.bytes)
    made = {storage: torch.empty(size, dtype=torch.uint8, device="cpu") for storage, size in sizes.items()}

    def tensor(index: int) -> Tensor:
        view = viewed(program.values[index], symbols)
        whole = made[view.storage] if view.storage in made else constants[view.storage]
        return view.tensor(whole, int(whole.storage_offset()) * whole.itemsize)

    with torch.no_grad():
        for op in ops:
            outputs = [None if index is None else tensor(index) for index in op.outputs]
            of_torch(op, [tensor(index) for index in op.reads], outputs, symbols)()
    return made


def _row(value: Value) -> tuple[int, str] | None:
    found = [(dim, size) for dim, size in enumerate(value.shape) if isinstance(size, str)]
    return found[0] if len(found) == 1 else None


def symbols_of(sizes: Iterator[int | str] | tuple[int | str, ...]) -> set[str]:
    """Those that the expressions of sizes have."""
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
    return any(late[value] for value in values) or bool(symbols_of(tuple(sizes)) - set(symbols))


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
