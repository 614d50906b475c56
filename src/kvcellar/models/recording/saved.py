"""saved: programs on disk, each under the digest of everything that it was made from.

A file is a line with its format, the SHA-256 of the rest, and JSON (`encoding.py`) compressed by zlib: a few kilobytes.

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
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvcellar.errors import KvcellarError
from kvcellar.models.guest import Guest
from kvcellar.models.recording.encoding import Damaged, decoded, encoded
from kvcellar.models.recording.recording import Captured
from kvcellar.places import NoPlace, cache, make_private

log = logging.getLogger("kvcellar.models")

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
    yield [_own_source(), torch.__version__, torch.version.git_version, version("transformers"), guest.device.type]
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


@lru_cache(maxsize=1)
def _own_source() -> str:
    """A digest of the source of ours that a program depends on."""
    package = Path(__file__).parents[2]
    files = sorted([*(package / "models").rglob("*.py"), package / "kernels" / "program.py"])
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
