"""encoding: a program as JSON, and back. What is read is checked field by field.

value      [dtype, shape, strides, storage, offset]
operator   [name, arguments, keywords, outputs]
argument   a number, text, true, false or null; a list is a tuple; {"v": value}, {"n": size}, {"d": dtype}, {"c": 0}
constant   [storage, path or null, data or null]
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from kvcellar.errors import KvcellarError
from kvcellar.kernels.program import (
    Argument,
    Cache,
    Constant,
    Dtype,
    Number,
    Op,
    Program,
    Ref,
    Size,
    Value,
    size_of,
)

T = TypeVar("T")
MOST = 1_000_000  # items of a list
DTYPES = frozenset({
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128",
})  # fmt: skip
_NAME = re.compile(r"(aten|prims|kvcellar)\.\w+(\.\w+)?")
_SYMBOL = re.compile(r"[A-Z]\d*")


class Damaged(KvcellarError):
    """A stored program that is none. The message names the field."""


def encoded(program: Program) -> dict[str, Any]:
    return {
        "symbols": list(program.symbols),
        "values": [[v.dtype, list(v.shape), list(v.strides), v.storage, v.offset] for v in program.values],
        "constants": [
            [storage, one.path, None if one.data is None else list(one.data)]
            for storage, one in program.constants.items()
        ],
        "inputs": dict(program.inputs),
        "ops": [
            [op.name, [_written(a) for a in op.args], {k: _written(a) for k, a in op.kwargs.items()}, list(op.outputs)]
            for op in program.ops
        ],
        "outputs": dict(program.outputs),
    }


def _written(argument: Argument) -> Any:
    match argument:
        case Ref(value):
            return {"v": value}
        case Number(size):
            return {"n": size}
        case Dtype(name):
            return {"d": name}
        case Cache():
            return {"c": 0}
        case tuple():
            return [_written(one) for one in argument]
        case _:
            return argument


def decoded(stored: object) -> Program:
    """Raises `Damaged` unless `stored` is a program as `encoded` writes it."""
    fields = _fields(stored, "symbols", "values", "constants", "inputs", "ops", "outputs")
    symbols = tuple(_list(fields["symbols"], "symbols", _symbol))
    reader = _Reader(symbols)
    values = tuple(_list(fields["values"], "values", reader.value))
    reader.values, reader.storages = len(values), max((value.storage for value in values), default=-1) + 1
    program = Program(
        symbols,
        values,
        dict(_list(fields["constants"], "constants", reader.constant)),
        reader.named(fields["inputs"], "inputs"),
        tuple(_list(fields["ops"], "ops", reader.op)),
        reader.named(fields["outputs"], "outputs"),
    )
    try:
        program.check()
    except AssertionError as error:
        raise Damaged(str(error)) from error
    if program.inputs.keys() != {"ids", "positions", "wanted"} or "logits" not in program.outputs:
        raise Damaged("its inputs and outputs are not those of a forward")
    return program


class _Reader:
    """Reads parts of a program with these symbols, and so many values and storages."""

    def __init__(self, symbols: tuple[str, ...]) -> None:
        self._sample = dict.fromkeys(symbols, 7)
        self.values = self.storages = 0

    def value(self, stored: object) -> Value:
        dtype, shape, strides, storage, offset = _row(stored, 5, "a value")
        if dtype not in DTYPES:
            raise Damaged(f"a value has dtype {dtype!r}")
        sizes, steps = (tuple(_list(part, "a shape", self.size)) for part in (shape, strides))
        if len(sizes) != len(steps) or not _is_index(storage, MOST):
            raise Damaged("a value has no shape, or no storage")
        return Value(dtype, sizes, steps, storage, self.size(offset))

    def size(self, stored: object) -> Size:
        if _is_index(stored, 2**62):
            return stored
        if not isinstance(stored, str) or len(stored) > 500:
            raise Damaged(f"{stored!r:.80} is no size")
        try:
            size_of(stored, self._sample)
        except (ValueError, ZeroDivisionError, RecursionError) as error:
            raise Damaged(f"{stored!r:.80} is no size") from error
        return stored

    def constant(self, stored: object) -> tuple[int, Constant]:
        storage, path, data = _row(stored, 3, "a constant")
        if (
            not _is_index(storage, self.storages)
            or not isinstance(path, str | None)
            or (path is None) == (data is None)
        ):
            raise Damaged("a constant has no storage, or neither a path nor data, or both")
        return storage, Constant(path, None if data is None else tuple(_list(data, "data", _number)))

    def op(self, stored: object) -> Op:
        name, args, kwargs, outputs = _row(stored, 4, "an operator")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(kwargs, dict):
            raise Damaged(f"{name!r:.80} is no operator")
        keywords = {str(key): self.argument(one) for key, one in kwargs.items()}
        return Op(
            name,
            tuple(_list(args, "arguments", self.argument)),
            keywords,
            tuple(_list(outputs, "outputs", self._output)),
        )

    def argument(self, stored: object) -> Argument:
        if isinstance(stored, list):
            return tuple(_list(stored, "an argument", self.argument))
        if isinstance(stored, bool | int | float | str) or stored is None:
            return stored
        match stored:
            case {"v": index, **rest} if not rest and _is_index(index, self.values):
                return Ref(index)
            case {"n": size, **rest} if not rest:
                return Number(self.size(size))
            case {"d": str(dtype), **rest} if not rest and dtype in DTYPES:
                return Dtype(dtype)
            case {"c": 0, **rest} if not rest:
                return Cache()
            case _:
                raise Damaged(f"{stored!r:.80} is no argument")

    def named(self, stored: object, what: str) -> dict[str, int]:
        if not isinstance(stored, dict) or not all(_is_index(index, self.values) for index in stored.values()):
            raise Damaged(f"its {what} are not values")
        return {str(name): int(index) for name, index in stored.items()}

    def _output(self, stored: object) -> int | None:
        if stored is not None and not _is_index(stored, self.values):
            raise Damaged(f"{stored!r:.80} is no value")
        return stored


def _fields(stored: object, *names: str) -> Mapping[str, Any]:
    if not isinstance(stored, dict) or stored.keys() != set(names):
        raise Damaged(f"it has other fields than {', '.join(names)}")
    return stored


def _list(stored: object, what: str, read: Callable[[object], T]) -> list[T]:
    if not isinstance(stored, list) or len(stored) > MOST:
        raise Damaged(f"{what}: a list is needed")
    return [read(one) for one in stored]


def _row(stored: object, length: int, what: str) -> list[Any]:
    if not isinstance(stored, list) or len(stored) != length:
        raise Damaged(f"{what} has {length} parts")
    return stored


def _symbol(stored: object) -> str:
    if not isinstance(stored, str) or not _SYMBOL.fullmatch(stored):
        raise Damaged(f"{stored!r:.80} is no symbol")
    return stored


def _number(stored: object) -> float | int | bool:
    if not isinstance(stored, bool | int | float):
        raise Damaged(f"{stored!r:.80} is no number")
    return stored


def _is_index(stored: object, limit: int) -> TypeGuard[int]:
    return type(stored) is int and 0 <= stored < limit
