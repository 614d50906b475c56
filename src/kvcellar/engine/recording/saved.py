"""saved: programs in files, each under the digest of the network and of the code that it was made from.

Records are maps by the names of their fields, tuples are arrays. What is read is checked field by field (`decoded`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording.facts import digest, network, packages
from kvcellar.engine.recording.kept import Damaged, Kept, place_of
from kvcellar.engine.recording.program import Cache, Dtype, Number, Program, Ref, resolved, size_of
from kvcellar.engine.recording.recording import Captured

FORMAT = b"kvcellar recording 3\n"


def encoded(captured: Captured) -> bytes:
    return msgspec.msgpack.encode(captured)


def decoded(stored: bytes) -> Captured:
    """Raises `Damaged` unless `stored` is what `encoded` returns."""
    try:
        found = msgspec.msgpack.decode(stored, type=Captured)
        decoding = None if found.decoding is None else _program(found.decoding)
        return replace(found, program=_program(found.program), decoding=decoding)
    except (ValueError, ArithmeticError, LookupError, AssertionError, RecursionError) as error:
        raise Damaged(str(error)) from error


def _program(stored: Program) -> Program:
    """The same with arguments of their types. Raises errors of several classes for one that cannot be run."""
    ops = (
        replace(op, args=_argument(list(op.args)), kwargs={name: _argument(one) for name, one in op.kwargs.items()})
        for op in stored.ops
    )
    program = replace(stored, ops=tuple(ops))
    sample = dict.fromkeys(program.symbols, 7)
    for value in program.values:
        for size in (*value.shape, *value.strides, value.offset):
            size_of(size, sample)
        if len(value.shape) != len(value.strides):
            raise ValueError("a value has other strides than dimensions")
    for op in program.ops:
        resolved((*op.args, *op.kwargs.values()), program.values.__getitem__, sample)
    if not program.constants.keys() <= {value.storage for value in program.values}:
        raise ValueError("a constant has no storage")
    if any((one.path is None) == (one.data is None) for one in program.constants.values()):
        raise ValueError("a constant has neither a path nor data, or both")
    if program.inputs.keys() != {"ids", "positions", "wanted"} or "logits" not in program.outputs:
        raise ValueError("its inputs and outputs are not those of a forward")
    program.check()
    return program


def _argument(stored: Any) -> Any:
    if isinstance(stored, dict):
        return msgspec.convert(stored, Ref | Number | Dtype | Cache)
    return tuple(map(_argument, stored)) if isinstance(stored, list) else stored


class Programs(Kept[Captured]):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, FORMAT, encoded, decoded)


def programs(environment: Mapping[str, str]) -> Programs | None:
    """Those of the user; None if there is no place for them."""
    directory = place_of("recordings", environment)
    return None if directory is None else Programs(directory)


def digest_of(guest: Guest) -> str:
    """Of everything that a program of this guest depends on. Raises `Unsettled`."""
    return digest({**packages(), **network(guest)})
