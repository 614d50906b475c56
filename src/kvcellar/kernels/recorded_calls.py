"""recorded_calls: operators of a recorded step that Python calls: torch's own, and those that a handler binds.

The compiled loop stops before such an operator and goes on behind it, so an exception that it raises ends the step as
it would in the network.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import CFUNCTYPE, c_int, c_void_p
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcellar.kernels.native import Native
from kvcellar.kernels.program import Argument, Dtype, Number, Op, Ref, Sizes, size_of
from kvcellar.kernels.recorded_lowering import operator

Call = Callable[[], None]
Bound = Native | Sequence[Native] | Call
NATIVE = CFUNCTYPE(c_int, c_void_p)


class Handler(Protocol):
    """Binds the operators of one name that is not torch's to tensors whose addresses stay."""

    def bind(self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> Bound:
        """What computes `outputs` from `inputs`, the tensors of `op.reads`, each time that it is called, in order.
        Their content at this time means nothing. Sizes among `op.args` are numbers."""
        ...


def is_torch(op: Op) -> bool:
    return op.name.startswith("aten.")


def of_torch(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], sizes: Sizes) -> Call:
    """A call of torch's operator, whose results are copied to `outputs` unless it writes there itself."""
    of = operator(op.name)
    left = iter(inputs)
    args = [_given(one, left, sizes) for one in op.args]
    kwargs = {name: _given(one, left, sizes) for name, one in op.kwargs.items()}
    if of._schema.is_mutable:
        return lambda: of(*args, **kwargs)

    def call() -> None:
        made = of(*args, **kwargs)
        for out, one in zip(outputs, (made,) if isinstance(made, Tensor) else made, strict=True):
            if out is not None:
                _copy(out, one)

    return call


def of_native(native: Native) -> Call:
    """A call of a compiled function by itself. Raises `MemoryError` as it is called."""
    function, address = NATIVE(native.function), native.address

    def call() -> None:
        if function(address):
            raise MemoryError("there is not enough memory for a kernel")
        assert native

    return call


def with_numbers(op: Op, sizes: Sizes) -> Op:
    """The operator with numbers in place of its sizes."""
    kwargs = {name: _number(one, sizes) for name, one in op.kwargs.items()}
    return replace(op, args=tuple(_number(one, sizes) for one in op.args), kwargs=kwargs)


def resolved(argument: Argument, values: Mapping[int, Any] | Sequence[Any], sizes: Sizes) -> Any:
    """An argument with `values` in place of references, numbers in place of sizes and torch's types."""
    match argument:
        case Ref(value):
            return values[value]
        case Number(size):
            return size_of(size, sizes)
        case Dtype(name):
            return getattr(torch, name)
        case tuple():
            return tuple(resolved(one, values, sizes) for one in argument)
        case _:
            return argument


def _given(argument: Argument, left: Any, sizes: Sizes) -> Any:
    """The same for a call of torch: references take tensors in order."""
    match argument:
        case Ref():
            return next(left)
        case tuple():
            return [_given(one, left, sizes) for one in argument]
        case _:
            return resolved(argument, (), sizes)


def _number(argument: Argument, sizes: Sizes) -> Argument:
    match argument:
        case Number(size):
            return size_of(size, sizes)
        case tuple():
            return tuple(_number(one, sizes) for one in argument)
        case _:
            return argument


def _copy(out: Tensor, made: Tensor) -> None:
    if made.shape != out.shape or made.dtype != out.dtype:
        expected = f"{tuple(out.shape)} {out.dtype}"
        raise RuntimeError(f"an operator returned {tuple(made.shape)} {made.dtype} where {expected} was recorded")
    out.copy_(made)
