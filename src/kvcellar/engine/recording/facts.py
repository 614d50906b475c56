"""facts: what programs, starts and measures depend on. What is kept of one start is used by the next one only where all
facts are the same (see `kept`).

A fact too many costs the work of a start; one too few could give wrong tokens, or exceed the granted memory. So the
versions of all installed packages are facts, and kvcellar's own source byte for byte, and the files that define the
modules of the network. The values of weights are represented by the identity of their files.
"""

import hashlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvcellar.engine.models.guest import Guest
from kvcellar.errors import KvcellarError

VARIABLES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH", "TRANSFORMERS_", "USE_")
SETTLED = 2_000_000_000  # nanoseconds that a file must be older than the load that reads it
SOURCES = (".py", ".h", ".cpp", ".cu")


class Unsettled(KvcellarError):
    """The identity of something cannot be determined; the message names it. Nothing is kept then."""


def digest(value: object) -> str:
    """Of a value that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def packages() -> dict[str, Any]:
    """The code that runs. Raises `Unsettled`."""
    try:
        found = {"installed": installed(sys.path), "kvcellar": _own_source()}
    except OSError as error:
        raise Unsettled(f"what is installed cannot be read: {error}") from error
    return {
        **found,
        "interpreter": [sys.version, platform.machine(), sys.flags.optimize],
        "torch": [torch.__version__, torch.version.git_version, torch.__config__.show()],
    }


def surroundings(path: Path, *, began: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a model of `path` depends on beside settings, if it was loaded since `began` (nanoseconds of the clock).
    Raises `Unsettled` and `OSError`."""
    return {
        **packages(),
        "flags": flags(),
        "variables": {name: value for name, value in environment.items() if name.startswith(VARIABLES)},
        "files": identities(path, began),
    }


def network(guest: Guest) -> dict[str, Any]:
    """Config, the class of each module, the shape of each tensor, and how attention and mixers are found in it. Raises
    `Unsettled`."""
    model, shape = guest.model, guest.shape
    modules = list(model.named_modules(remove_duplicate=False))
    paths = {module: path for path, module in model.named_modules()}
    config = model.config
    return {
        "config": repr(sorted(config.to_dict().items())),
        "implementations": [config._attn_implementation, getattr(config, "_experts_implementation", None)],
        "dtype": str(guest.dtype),
        "device": str(guest.device),
        "modules": [[name, _named(type(module)), module.training] for name, module in modules],
        "tensors": _tensors(model),
        "sources": module_sources(model),
        "groups": [[group.name, repr(group.layout), repr(group.planes), list(group.layers)] for group in shape.groups],
        "bindings": [[paths[one], to.layer, to.direct, repr(to.expands)] for one, to in shape.bindings.items()],
        "mixers": [paths[one] for one in shape.mixers],
        "past": guest.past_is_counted,
    }


def _tensors(model: nn.Module) -> list[list[Any]]:
    """Each with the first of its names: which modules share a tensor counts."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return [
        [name, first.setdefault(id(one), name), _named(type(one)), list(one.shape), str(one.dtype), str(one.layout),
         list(one.stride())]
        for name, one in named
    ]  # fmt: skip


def served(guest: Guest) -> dict[str, Any]:
    """What the memory stores and which backends read it, the storage of K/V included, and what runs the steps."""
    return {
        "mode": guest.mode,
        "asks": {name: repr(ask) for name, ask in guest.shape.specs.items()},
        "backends": {name: [_named(type(b)), b.arrangement] for name, b in guest.backends.items()},
        "recurrent": repr(guest.shape.recurrent),
        "recorded": guest.recording is not None,
        "draws": type(guest.draws).__name__,
    }


def installed(places: list[str]) -> list[str]:
    """Names and versions of the distributions that can be imported: the names of their metadata directories."""
    found: set[str] = set()
    for place in places:
        if os.path.isdir(place or "."):
            found |= {name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info"))}
    return sorted(found)


@lru_cache(maxsize=1)
def _own_source() -> str:
    """Of the files of this package, as they are when it is first asked for."""
    return source_digest(Path(__file__).parents[2])


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


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def module_sources(network: nn.Module) -> dict[str, str]:
    """The files that define the classes of its modules, with their digests. Raises `Unsettled` for a class that was
    defined elsewhere, such as in a console."""
    found: dict[str, str] = {}
    for kind in {type(module) for module in network.modules()}:
        try:
            file = str(inspect.getsourcefile(kind))
            found[file] = _file_digest(file)
        except (TypeError, OSError) as error:
            raise Unsettled(f"{_named(kind)} has no source file") from error
    return found


def changed(sources: Mapping[str, str]) -> list[str]:
    """Those of `module_sources` that are not there, or not as they were."""
    return [file for file, before in sources.items() if not os.path.isfile(file) or _file_digest(file) != before]


@lru_cache(maxsize=256)
def _file_digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


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
