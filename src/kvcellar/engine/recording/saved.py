"""saved: programs on disk, each under the digest of everything that it was made from.

A file is a line with its format, the SHA-256 of the rest, and JSON compressed by zlib: a few kilobytes. What is read is
checked field by field.

value      [dtype, shape, strides, storage, offset]
operator   [name, arguments, keywords, outputs]
argument   a number, text, true, false or null; a list is a tuple; {"v": value}, {"n": size}, {"d": dtype}, {"c": 0}
constant   [storage, path or null, data or null]

Always true:
  * a file is named by the digest of what its program depends on: the classes of modules, the network's config, types
    and shapes, the versions of torch and transformers, and the source of ours that traces;
  * what is damaged is not used, and a file has its name only when all of its bytes are there;
  * the directory has at most `MOST_FILES` files: those written last.
"""

import hashlib
import inspect
import json
import logging
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording.program import (
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
from kvcellar.engine.recording.recording import Captured
from kvcellar.errors import KvcellarError
from kvcellar.places import NoPlace, cache, make_private

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
            [
                op.name,
                [_argument(a) for a in op.args],
                {k: _argument(a) for k, a in op.kwargs.items()},
                list(op.outputs),
            ]
            for op in program.ops
        ],
        "outputs": dict(program.outputs),
    }


def _argument(argument: Argument) -> Any:
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
            return [_argument(one) for one in argument]
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


log = logging.getLogger("kvcellar.engine.models")

FORMAT = b"kvcellar recording 1\n"
MOST_STORED, MOST_BYTES = 4 * 2**20, 64 * 2**20  # of a file, and of its JSON
MOST_FILES = 512  # a few kilobytes each
_START = len(FORMAT) + hashlib.sha256().digest_size
_OWN = ("kvcellar", "transformers", "torch")  # packages whose version or source is part of a digest


class Programs:
    """The programs in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, digest: str) -> Captured | None:
        """The program of that digest; None if there is none that is intact."""
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                content = file.read(MOST_STORED + 1)
            return _read(content)
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as error:
            log.warning("%s is not used: %s; the model is recorded again", path, error)
            return None

    def write(self, digest: str, captured: Captured) -> None:
        """Keep a program. What fails is logged: it is captured again then."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                try:
                    file.write(_written(captured))
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self._path(digest))
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._trim()
        except OSError as error:
            log.warning("a recorded model cannot be kept in %s: %s", self._directory, error.strerror)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.recording"

    def _trim(self) -> None:
        files = sorted(self._directory.glob("*.recording"), key=_age)
        for path in files[MOST_FILES:]:
            path.unlink(missing_ok=True)


def _age(path: Path) -> int:
    """Less for files that were written later."""
    try:
        return -path.stat().st_mtime_ns
    except FileNotFoundError:  # another process has deleted it meanwhile
        return 0


def programs(environment: Mapping[str, str]) -> Programs | None:
    """Those of the user; None, with a log record, if there is no place for them."""
    try:
        directory = cache(environment) / "recordings"
        make_private(directory)
    except (NoPlace, OSError) as error:
        log.warning("recorded models are not kept: %s", error)
        return None
    return Programs(directory)


def _written(captured: Captured) -> bytes:
    decoding = None if captured.decoding is None else encoded(captured.decoding)
    fields = {"program": encoded(captured.program), "opaque": dict(captured.opaque), "decoding": decoding}
    packed = zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 9)
    return FORMAT + hashlib.sha256(packed).digest() + packed


def _read(content: bytes) -> Captured:
    """Raises `Damaged`."""
    packed = content[_START:]
    if len(content) > MOST_STORED or content[: len(FORMAT)] != FORMAT:
        raise Damaged("it is no recording of this format")
    if hashlib.sha256(packed).digest() != content[len(FORMAT) : _START]:
        raise Damaged("its content was changed")
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, MOST_BYTES)
        if not unpacker.eof:
            raise Damaged("it is too large")
        fields = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise Damaged(f"it cannot be read: {error}") from error
    match fields:
        case {"program": stored, "opaque": dict(opaque), "decoding": decoding}:
            also = None if decoding is None else decoded(decoding)
            return Captured(decoded(stored), {str(name): str(why) for name, why in opaque.items()}, also)
        case _:
            raise Damaged("it has no program")


# -- digests ------------------------------------------------------------------------------------------------------


class NoDigest(KvcellarError):
    """A network whose code is unknown. Its program is not kept."""


def digest_of(guest: Guest) -> str:
    """Of everything that a program of this guest depends on. Raises `NoDigest`."""
    digest = hashlib.sha256()
    for part in _parts(guest):
        digest.update(hashlib.sha256(json.dumps(part, default=str, sort_keys=True).encode()).digest())
    return digest.hexdigest()[:40]


def _parts(guest: Guest) -> Iterator[Any]:
    model, shape = guest.model, guest.shape
    yield [_own_source(), torch.__version__, torch.version.git_version, _transformers(), guest.device.type]
    yield [vars(model.config), _implementations(model), guest.past_is_counted]
    paths = {module: path for path, module in model.named_modules()}
    for module, path in paths.items():
        tensors = sorted((module._parameters | module._buffers).items())
        described = [(name, str(t.dtype), list(t.shape), t.stride()) for name, t in tensors if t is not None]
        kind = type(module)
        yield [path, kind.__module__, kind.__qualname__, _foreign_source(kind), described]
    yield [[group.name, group.layers, str(group.layout), group.planes] for group in shape.groups]
    yield [
        [paths[module], binding.layer, binding.direct, binding.expands] for module, binding in shape.bindings.items()
    ]
    yield [paths[module] for module in shape.mixers]


def _implementations(model: Any) -> list[str]:
    """What transformers' registries are asked for."""
    return [str(getattr(model.config, name, None)) for name in ("_attn_implementation", "_experts_implementation")]


@lru_cache(maxsize=256)
def _foreign_source(kind: type[nn.Module]) -> str | None:
    """A digest of the file of a class that is in no package whose version is known."""
    if kind.__module__.partition(".")[0] in _OWN:
        return None
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError) as error:
        raise NoDigest(f"the source of {kind.__qualname__} is not known") from error
    return hashlib.sha256(source.encode()).hexdigest()


@lru_cache
def _transformers() -> str:
    return version("transformers")


@lru_cache(maxsize=1)
def _own_source() -> str:
    """A digest of the source of ours that a program depends on."""
    engine = Path(__file__).parents[1]
    files = sorted(file for folder in ("models", "recording") for file in (engine / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
