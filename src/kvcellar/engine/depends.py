"""depends: everything that the bytes of a measured step depend on, as facts by name, and the measures kept for them.

A fact too many costs a measurement; one too few could cost memory that was not granted. So versions are those of all
that is installed, kvcellar's own source counts byte for byte, and so do the files that define the network's modules.
The values of weights count by the identity of their files: a mixture's experts take what the router sends them.
"""

import hashlib
import inspect
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvcellar.engine.measures import Measures, digest, directory_for
from kvcellar.models.guest import Guest

log = logging.getLogger("kvcellar.measures")

VARIABLES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH", "TRANSFORMERS_", "USE_")
SETTLED = 2_000_000_000  # nanoseconds that a file must be older than the load that reads it
SOURCES = (".py", ".cpp", ".cu")


def measures_of(
    guest: Guest, path: Path | None, *, began: int, limits: Mapping[str, int], environment: Mapping[str, str]
) -> Measures:
    """What was measured of this model before. `path` is its directory, None for a network that the caller built: such
    code may do anything, so it is measured each time, and so is a device with a memory of its own, which is quick.
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
    """There is something whose identity cannot be known; says what. Nothing is kept then."""


def facts(
    guest: Guest, path: Path, *, began: int, limits: Mapping[str, int], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Of the model of `path`, which was loaded since `began` (nanoseconds of the clock). `limits` are the settings that
    say how large steps are. Raises `Unsettled` and `OSError`.
    """
    return {
        "installed": installed(sys.path),
        "kvcellar": source_digest(Path(__file__).parents[1]),
        "interpreter": [sys.version, platform.machine(), sys.flags.optimize],
        "torch": [torch.__version__, torch.version.git_version, torch.__config__.show()],
        "flags": flags(),
        "variables": {name: value for name, value in environment.items() if name.startswith(VARIABLES)},
        "limits": dict(limits),
        "model": model(guest),
        "shape": shape(guest),
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
    """What a program may set of torch that changes which operations run."""
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
    """The network: its config, and of each module its kind and of each tensor its form, as they are served."""
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
    """What the memory stores and how it is read, the storage of K/V included."""
    return {
        "mode": guest.mode,
        "groups": [
            [group.name, repr(group.layout), repr(group.planes), list(group.layers), group.plain]
            for group in guest.shape.groups
        ],
        "asks": {name: repr(ask) for name, ask in guest.shape.specs.items()},
        "backends": {name: [_named(type(b)), repr(b.arrangement), b.padding] for name, b in guest.backends.items()},
        "recurrent": repr(guest.shape.recurrent),
    }


def identities(path: Path, began: int) -> list[list[Any]]:
    """What tells the files of a model's directory from others without reading them: a file that is written anew, or
    replaced, has another time of change or another number. Raises `Unsettled` for one that may have changed since it
    was read.
    """
    found = []
    for file in sorted(path.iterdir()):
        about = file.stat()  # of what a link leads to
        if about.st_ctime_ns > began - SETTLED:  # set by the system alone
            raise Unsettled(f"{file} has just changed")
        found.append([file.name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_dev])
    return found
