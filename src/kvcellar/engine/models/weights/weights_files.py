"""weights_files: the safetensors files of a model directory, opened and checked before any tensor is read.

Always true: each file is opened once, read with `pread` and never mapped. So what is read is the file whose header was
checked, and after the block of `opened` nothing depends on the files.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, aminmax

from kvcellar.engine.models.weights.config_file import DEPTHS
from kvcellar.errors import ModelRefused, first_few
from kvcellar.repository import INDEX, MTP, SINGLE, weight_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOATS = ("F64", "F32", "BF16", "F16")  # named as in safetensors
MOST_TENSORS = 1 << 20  # of all files together; a record is made for each


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a weights file."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # named as in safetensors: F32, BF16, ...


@dataclass(frozen=True)
class WeightsFiles:
    """The headers of the open weights files of a directory."""

    path: Path
    tensors: Mapping[str, Stored]
    slices: MutableMapping[str, Any]  # the lazy slice of each tensor, and perhaps of others
    stats: Mapping[str, tuple[int, ...]]  # of each file, when it was opened
    unlisted: tuple[str, ...] = ()  # weights files of the directory that are not read
    unused: tuple[str, ...] = ()  # tensors that are known, and not used
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))  # of each file
    forms: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # how decoded tensors are stored

    @cached_property
    def elements(self) -> int:
        return sum(math.prod(stored.shape) for stored in self.tensors.values())

    @cached_property
    def dtype(self) -> str | None:
        """The type that most of the tensors have."""
        counted = Counter(stored.dtype for stored in self.tensors.values())
        return counted.most_common(1)[0][0] if counted else None

    @property
    def files(self) -> str:
        return first_few(sorted(self.stats))

    def check_unchanged(self) -> None:
        """Raise `ModelRefused` if a file was replaced or written to since it was opened."""
        for name, stat in self.stats.items():
            if _stat(self.path / name) != stat:
                raise ModelRefused(
                    f"{name} was replaced or written to while it was read. Load the model again when nothing "
                    f"writes to it."
                )


@contextmanager
def opened(path: Path) -> Iterator[WeightsFiles]:
    """The weights files of a directory, each of them present and a complete safetensors file.

    Raises `ModelRefused`. Tensors can be read until the block ends.
    """
    listed = weight_map(path)
    names = sorted(set(listed.values())) or [SINGLE]
    with _files(path, names) as weights:
        absent = sorted(set(listed) - set(weights.tensors))
        if absent:
            raise ModelRefused(
                f"{INDEX} lists {len(absent)} tensors that the files of {path.name} do not hold: {first_few(absent)}. "
                f"Copy the whole model again."
            )
        others = {file.name for file in path.glob("*.safetensors")} - {*names, MTP}
        yield replace(weights, unlisted=tuple(sorted(others)))


def opened_file(path: Path, name: str) -> AbstractContextManager[WeightsFiles]:
    """One weights file of a directory, and nothing else of it. As `opened`."""
    return _files(path, [name])


@contextmanager
def _files(path: Path, names: Sequence[str]) -> Iterator[WeightsFiles]:
    stored: dict[str, Stored] = {}
    slices: dict[str, Any] = {}
    stats: dict[str, tuple[int, ...]] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    with ExitStack() as files:
        files.callback(slices.clear)  # a slice in the traceback of an error would keep its file open
        for name in names:
            stats[name] = _stat(path / name)
            metadata[name] = _add(path / name, files, stored, slices)
        yield WeightsFiles(path, stored, slices, stats, metadata=metadata)


def _add(file: Path, files: ExitStack, stored: dict[str, Stored], slices: dict[str, Any]) -> Mapping[str, str]:
    """Add the tensors of one more file, which `files` closes. Returns its metadata."""
    try:
        handle = files.enter_context(safe_open(file, framework="pt", backend="pread"))
        names = handle.keys()
        if len(names) > MOST_TENSORS - len(stored):
            raise ModelRefused(f"{file.name} has {len(names)} tensors; a model may have {MOST_TENSORS} in all files")
        for tensor in names:
            if tensor in stored:
                raise ModelRefused(
                    f"{stored[tensor].file} and {file.name} both hold {tensor}; remove one of them, with its entry in "
                    f"{INDEX}"
                )
            part = slices[tensor] = handle.get_slice(tensor)
            stored[tensor] = Stored(file.name, tuple(part.get_shape()), part.get_dtype())
        return handle.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ModelRefused(f"{file.name} is not a whole safetensors file: {error}") from error


def _stat(file: Path) -> tuple[int, ...]:
    """Numbers that change when a file is replaced or written to."""
    try:
        stat = os.stat(file)
    except OSError as error:
        raise ModelRefused(f"the weights file {file.name} is missing from {file.parent}: {error.strerror}") from error
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def check_depth(fields: Mapping[str, Any], weights: WeightsFiles) -> None:
    """Refuse a config with more layers than there are tensors, before any layer is built."""
    for part in (fields, *(value for value in fields.values() if isinstance(value, dict))):
        for key in DEPTHS:
            layers = part.get(key)
            if isinstance(layers, int) and layers > len(weights.tensors):
                raise ModelRefused(
                    f"config.json: {key} is {layers}; the weights files hold {len(weights.tensors)} tensors in all"
                )


def check_shapes(skeleton: "PreTrainedModel", weights: WeightsFiles) -> None:
    """Raise `ModelRefused` if the stored tensors cannot be those of this network. No tensor is read.

    Shapes are compared where names agree: transformers renames and joins some tensors while it loads.
    """
    shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    other = [
        f"{name} is {list(stored.shape)} in the weights and {list(shapes[name])} by the config"
        for name, stored in weights.tensors.items()
        if name in shapes and shapes[name] != stored.shape
    ]
    if other:
        raise ModelRefused(f"the weights do not fit the config: {'; '.join(other[:3])}")
    elements = sum(parameter.numel() for parameter in skeleton.parameters())
    if elements > weights.elements:
        raise ModelRefused(
            f"the weights do not fit the config: it describes {elements} parameters; the files hold {weights.elements}"
        )


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    if not values.is_floating_point():
        return True
    low, high = aminmax(values.detach())  # both are NaN if any value is
    return math.isfinite(float(low)) and math.isfinite(float(high))
