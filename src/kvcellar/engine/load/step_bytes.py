"""step_bytes: the bytes that measured steps took, kept in the user's cache directory for the next start.

Measuring runs eight forwards, and the same model takes the same bytes each time. So the results are kept in a small
file, under a digest of everything that they depend on (`facts`). The file is used only if it is exactly what was
written; otherwise the steps are measured again.

A fact too many costs a measurement; one too few could exceed the granted memory. So the versions of all installed
packages are facts, and kvcellar's own source byte for byte, and the files that define the modules of the network. The
values of weights are represented by the identity of their files: the bytes of a mixture of experts depend on its
router.

Always true:
  * a value that is returned was measured by this process, or read from a file with the right digest of its content,
    made for the same inputs;
  * a file has its name only when it is complete; of processes that write the same file at once, the last one wins;
  * no failure to read or write a file is an error: it only costs the time to measure.
"""

import hashlib
import inspect
import json
import logging
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvcellar.engine.models.guest import Guest
from kvcellar.places import NoPlace, cache, make_private

log = logging.getLogger("kvcellar.measures")

FORMAT = 1
MOST_BYTES = 1 << 16  # of a file
MOST_FILES = 64  # the newest are kept
LARGEST = 1 << 50  # bytes that any step could take
VARIABLES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH", "TRANSFORMERS_", "USE_")
SETTLED = 2_000_000_000  # nanoseconds that a file must be older than the load that reads it
SOURCES = (".py", ".cpp", ".cu")


def digest(value: object) -> str:
    """Of a value that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class Measures:
    """The bytes of steps with given inputs. `directory` is None where none are kept."""

    def __init__(self, directory: Path | None, inputs: str, known: Mapping[str, int] | None = None) -> None:
        """`inputs` is the digest of everything that a measurement depends on, except the `step` of `of`. `known`: what
        was measured before."""
        self._inputs = inputs
        self._path = None if directory is None else directory / f"measures-{inputs[:32]}.json"
        self.known = dict(known or {}) if self._path is None else _read(self._path, inputs)
        self._fresh = False

    def of(self, step: str, measure: Callable[[], int]) -> int:
        """The bytes of `step`, a name that identifies it: as kept, else as `measure` returns them."""
        if step not in self.known:
            self.known[step] = measure()
            self._fresh = True
        return self.known[step]

    def keep(self) -> None:
        """Write the file, if anything was measured that is not in it."""
        if self._path is None or not self._fresh:
            return
        kept = {**_read(self._path, self._inputs), **self.known}
        try:
            _write(self._path, sealed({"format": FORMAT, "inputs": self._inputs, "bytes": kept}))
            _prune(self._path.parent)
        except OSError as error:
            log.info("what steps take is not kept in %s: %s", self._path, error.strerror)
        self._fresh = False


def directory_for(environment: Mapping[str, str]) -> Path | None:
    """The user's own cache directory. None where there is none, or other users can write into it."""
    try:
        directory = cache(environment)
        make_private(directory)
    except (NoPlace, OSError) as error:
        log.info("what steps take is measured at each start: %s", error)
        return None
    return directory


def sealed(content: dict[str, Any]) -> str:
    """The text of a file, with a digest of its content."""
    return json.dumps({**content, "check": digest(content)}, sort_keys=True)


def _read(path: Path, inputs: str) -> dict[str, int]:
    """The bytes in the file; empty unless it is complete and for these inputs."""
    try:
        content = json.loads(_bytes(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.info("%s is not used: %s", path, error)
        return {}
    if isinstance(content, dict) and _is_whole(content, inputs):
        return dict(content["bytes"])
    log.info("%s is not used: it is not what was written for these inputs", path)
    return {}


def _bytes(path: Path) -> bytes:
    """Content of a regular file that is not too large. Raises `OSError`."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError("it is not a regular file")
        return file.read(MOST_BYTES)  # of a larger one this is not JSON


def _is_whole(content: dict[str, Any], inputs: str) -> bool:
    check, kept = content.pop("check", None), content.get("bytes")
    return (
        content.keys() == {"format", "inputs", "bytes"}
        and type(content["format"]) is int
        and content["format"] == FORMAT
        and content["inputs"] == inputs
        and isinstance(kept, dict)
        and all(type(size) is int and 0 <= size <= LARGEST for size in kept.values())
        and check == digest(content)
    )


def _write(path: Path, text: str) -> None:
    """Write atomically. A power cut may leave an empty file, which is not used."""
    opened, made = tempfile.mkstemp(prefix="measures-", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(opened, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(made, path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def _prune(directory: Path) -> None:
    """Delete all but the newest: each new version of anything makes another file."""
    files = sorted(directory.glob("measures-*"), key=_written, reverse=True)
    for file in files[MOST_FILES:]:
        file.unlink(missing_ok=True)


def _written(file: Path) -> int:
    try:
        return file.lstat().st_mtime_ns
    except OSError:  # deleted meanwhile, by another process
        return 0


# -- what the bytes of a step depend on --------------------------------------------------------------------------------


def measures_of(
    guest: Guest, path: Path | None, *, began: int, limits: Mapping[str, int], environment: Mapping[str, str]
) -> Measures:
    """The measures of this model. `path` is its directory, None for a network given as an object: its code may do
    anything, so it is measured at each start, and so is a device with its own memory, where that is quick.
    """
    if path is None or guest.device.type != "cpu":
        return Measures(None, "")
    try:
        found = facts(guest, path, began=began, limits=limits, environment=environment)
    except (Unsettled, OSError) as error:
        log.info("what steps take is not kept: %s", error)
        return Measures(None, "")
    return Measures(directory_for(environment), digest(found))


class Unsettled(Exception):
    """The identity of something cannot be determined; the message names it. Nothing is kept then."""


def facts(
    guest: Guest, path: Path, *, began: int, limits: Mapping[str, int], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Of the model of `path`, which was loaded since `began` (nanoseconds of the clock). `limits` are the settings that
    limit the size of steps. Raises `Unsettled` and `OSError`.
    """
    return {
        **surroundings(path, began=began, environment=environment),
        "limits": dict(limits),
        "model": model(guest),
        "shape": shape(guest),
        "recorded": guest.recording is not None,
        "draws": type(guest.draws).__name__,
    }


def surroundings(path: Path, *, began: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a model of `path` depends on, if it was loaded since `began`, beside settings. Raises `Unsettled` and
    `OSError`."""
    return {
        "installed": installed(sys.path),
        "kvcellar": source_digest(Path(__file__).parents[2]),
        "interpreter": [sys.version, platform.machine(), sys.flags.optimize],
        "torch": [torch.__version__, torch.version.git_version, torch.__config__.show()],
        "flags": flags(),
        "variables": {name: value for name, value in environment.items() if name.startswith(VARIABLES)},
        "files": identities(path, began),
    }


def installed(places: list[str]) -> list[str]:
    """Names and versions of the distributions that can be imported: the names of their metadata directories."""
    found: set[str] = set()
    for place in places:
        if os.path.isdir(place or "."):
            found |= {name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info"))}
    return sorted(found)


def source_digest(package: Path) -> str:
    """Of every source file below `package`, by its name and content."""
    files = sorted(path for path in package.rglob("*") if path.suffix in SOURCES)
    if not files:
        raise Unsettled(f"{package} has no source files")
    return _digest((str(file.relative_to(package)), file.read_bytes()) for file in files)


def _digest(parts: Iterator[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for name, content in parts:
        whole.update(hashlib.sha256(name.encode(errors="surrogateescape")).digest() + hashlib.sha256(content).digest())
    return whole.hexdigest()


def flags() -> dict[str, Any]:
    """Settings of torch that change which operations run."""
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": [torch.backends.mkldnn.is_available(), torch.backends.mkldnn.enabled],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "default": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "sdp": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
    }


def model(guest: Guest) -> dict[str, Any]:
    """The network: its config, the class of each module, and the shape of each tensor, as they are served."""
    network = guest.model
    modules = list(network.named_modules(remove_duplicate=False))
    kinds = {type(module) for _, module in modules}
    return {
        "config": repr(sorted(network.config.to_dict().items())),
        "dtype": str(guest.dtype),
        "device": str(guest.device),
        "attention": network.config._attn_implementation,
        "modules": [[name, _named(type(module)), module.training] for name, module in modules],
        "tensors": [
            [name, list(tensor.shape), str(tensor.dtype), str(tensor.layout), list(tensor.stride())]
            for name, tensor in (*network.named_parameters(), *network.named_buffers())
        ],
        "sources": _digest((_named(kind), _source(kind)) for kind in sorted(kinds, key=_named)),
    }


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _source(kind: type) -> bytes:
    """The file that defines a class. Raises `Unsettled` for one that was defined elsewhere."""
    try:
        file = inspect.getsourcefile(kind)
    except TypeError as error:
        raise Unsettled(f"{_named(kind)} has no source file") from error
    if file is None:
        raise Unsettled(f"{_named(kind)} has no source file")
    return Path(file).read_bytes()


def shape(guest: Guest) -> dict[str, Any]:
    """What the memory stores and which backends read it, the storage of K/V included."""
    return {
        "mode": guest.mode,
        "groups": [
            [group.name, repr(group.layout), repr(group.planes), list(group.layers)] for group in guest.shape.groups
        ],
        "asks": {name: repr(ask) for name, ask in guest.shape.specs.items()},
        "backends": {name: [_named(type(b)), repr(b.arrangement), b.padding] for name, b in guest.backends.items()},
        "recurrent": repr(guest.shape.recurrent),
    }


def identities(path: Path, began: int) -> list[list[Any]]:
    """What identifies the files of a model's directory without reading them: a file that is rewritten or replaced has
    another change time or inode. Raises `Unsettled` for a file that may have changed since it was read.
    """
    found = []
    for file in sorted(path.iterdir()):
        about = file.stat()  # of the target of a link
        if about.st_ctime_ns > began - SETTLED:  # set by the system only
            raise Unsettled(f"{file} has just changed")
        found.append([file.name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_dev])
    return found
