"""saved: programs on disk, each under the digest of everything that it was made from.

A file is a line with its format, the SHA-256 of the rest, and MessagePack compressed by zlib: a few kilobytes. Records
are maps by the names of their fields, tuples are arrays.

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
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct
from torch import nn

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording.program import (
    Argument,
    Cache,
    Constant,
    Dtype,
    Index,
    Number,
    Op,
    Program,
    Ref,
    Value,
    resolved,
    size_of,
)
from kvcellar.engine.recording.recording import Captured
from kvcellar.errors import KvcellarError
from kvcellar.places import NoPlace, cache, make_private


class Damaged(KvcellarError):
    """A stored program that is none. The message names the field."""


class _Op(Struct):
    name: Annotated[str, Meta(pattern=r"^(aten|prims|kvcellar)\.\w+(\.\w+)?$")]
    args: list[Any]  # their type is recursive, which only types of msgspec may be
    kwargs: dict[str, Any]
    outputs: tuple[Index | None, ...]


class _Program(Struct, forbid_unknown_fields=True):
    symbols: tuple[Annotated[str, Meta(pattern=r"^[A-Z]\d*$")], ...]
    values: tuple[Value, ...]
    constants: dict[Index, Constant]
    inputs: dict[str, Index]
    ops: list[_Op]
    outputs: dict[str, Index]


class _Captured(Struct):
    program: _Program
    opaque: dict[str, str]
    decoding: _Program | None


def encoded(captured: Captured) -> bytes:
    return msgspec.msgpack.encode(captured)


def decoded(stored: bytes) -> Captured:
    """Raises `Damaged` unless `stored` is what `encoded` returns."""
    try:
        found = msgspec.msgpack.decode(stored, type=_Captured)
        decoding = None if found.decoding is None else _program(found.decoding)
        return Captured(_program(found.program), found.opaque, decoding)
    except (ValueError, ArithmeticError, LookupError, AssertionError, RecursionError) as error:
        raise Damaged(str(error)) from error


def _program(stored: _Program) -> Program:
    """Raises errors of several classes for one that cannot be run."""
    ops = tuple(Op(op.name, _argument(op.args), _keywords(op.kwargs), op.outputs) for op in stored.ops)
    program = Program(stored.symbols, stored.values, stored.constants, stored.inputs, ops, stored.outputs)
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


def _keywords(stored: dict[str, Any]) -> dict[str, Argument]:
    return {name: _argument(one) for name, one in stored.items()}


log = logging.getLogger("kvcellar.engine.models")

FORMAT = b"kvcellar recording 2\n"  # of programs
MOST_STORED, MOST_BYTES = 4 * 2**20, 64 * 2**20  # of a file, and of what is in it
SUFFIX = ".recording"
MOST_FILES = 512  # a few kilobytes each
_OWN = ("kvcellar", "transformers", "torch")  # packages whose version or source is part of a digest


Content = TypeVar("Content")


class Kept(Generic[Content]):
    """Files of one kind in one directory."""

    def __init__(
        self, directory: Path, kind: bytes, encode: Callable[[Content], bytes], decode: Callable[[bytes], Content]
    ) -> None:
        """`kind` is the first line of each file, `decode` raises `Damaged`."""
        self._directory, self._kind, self._encode, self._decode = directory, kind, encode, decode

    def read(self, digest: str) -> Content | None:
        """What was kept under that digest; None if there is nothing that is intact."""
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                content = file.read(MOST_STORED + 1)
            return self._decode(_read(content, self._kind))
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as error:
            log.warning("%s is not used: %s; it is made again", path, error)
            return None

    def write(self, digest: str, content: Content) -> None:
        """Keep it, unless it is too large to be read. What fails is logged: it is made again then."""
        if len(written := _written(self._encode(content), self._kind)) > MOST_STORED:
            log.info("%s is not kept: it takes %s bytes", self._path(digest), len(written))
            return
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                try:
                    file.write(written)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self._path(digest))
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._trim()
        except OSError as error:
            log.warning("nothing can be kept in %s: %s", self._directory, error.strerror)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}{SUFFIX}"

    def _trim(self) -> None:
        files = sorted(self._directory.glob(f"*{SUFFIX}"), key=_age)
        for path in files[MOST_FILES:]:
            path.unlink(missing_ok=True)


def _age(path: Path) -> int:
    """Less for files that were written later."""
    try:
        return -path.stat().st_mtime_ns
    except FileNotFoundError:  # another process has deleted it meanwhile
        return 0


class Programs(Kept[Captured]):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, FORMAT, encoded, decoded)


def place_of(name: str, environment: Mapping[str, str]) -> Path | None:
    """The directory of that name in the user's cache; None, with a log record, if there is no place for it."""
    try:
        directory = cache(environment) / name
        make_private(directory)
    except (NoPlace, OSError) as error:
        log.warning("%s are not kept: %s", name, error)
        return None
    return directory


def programs(environment: Mapping[str, str]) -> Programs | None:
    """Those of the user; None if there is no place for them."""
    directory = place_of("recordings", environment)
    return None if directory is None else Programs(directory)


def _written(content: bytes, kind: bytes) -> bytes:
    packed = zlib.compress(content, 9)
    return kind + hashlib.sha256(packed).digest() + packed


def _read(content: bytes, kind: bytes) -> bytes:
    """Raises `Damaged`."""
    start = len(kind) + hashlib.sha256().digest_size
    packed = content[start:]
    if len(content) > MOST_STORED or content[: len(kind)] != kind:
        raise Damaged("it is no file of this format")
    if hashlib.sha256(packed).digest() != content[len(kind) : start]:
        raise Damaged("its content was changed")
    unpacker = zlib.decompressobj()
    try:
        stored = unpacker.decompress(packed, MOST_BYTES)
    except zlib.error as error:
        raise Damaged(f"it cannot be read: {error}") from error
    if not unpacker.eof:
        raise Damaged("it is too large")
    return stored


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
