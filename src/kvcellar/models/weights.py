"""weights: the tensors of a model directory, from the check of their headers to a network that holds copies of them.

Always true:
  * each weight file is opened once, read with `pread` and never mapped: what is read is the file whose header was
    checked, and when the block of `opened` ends nothing depends on any file;
  * every stored tensor is copied into the network, or named in a note, or the model is refused.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kvcellar.errors import ModelRefused
from kvcellar.models.checks import DEPTHS, read_object

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_READ_AS_NEEDED = "HF_DEACTIVATE_ASYNC_LOAD"  # an environment variable that transformers looks at for each load
_LOADING = Lock()
_FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors calls them


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a weight file."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: F32, BF16, ...


class Source:
    """A stored tensor that is read when it is indexed, into memory of its own: what transformers does for each tensor
    that the network has a place for. `was_read` says whether it did. `parts` is emptied when the files are closed."""

    def __init__(self, parts: Mapping[str, Any], name: str) -> None:
        self._parts, self._name = parts, name
        self.was_read = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        return self._parts[self._name][index]


@dataclass(frozen=True)
class Weights:
    """What the headers of the open weight files of a directory say."""

    path: Path
    tensors: Mapping[str, Stored]
    parts: Mapping[str, Any]  # safetensors' slice of each tensor
    marks: Mapping[str, tuple[int, ...]]  # of each file, when it was opened
    unlisted: tuple[str, ...]  # weight files of the directory that are not read

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
        return first_few(sorted(self.marks))

    def check_unchanged(self) -> None:
        """Raise `ModelRefused` if a file is not the one that was opened, or was written to since."""
        for name, mark in self.marks.items():
            if _mark(self.path / name) != mark:
                raise ModelRefused(
                    f"{name} was replaced or written to while it was read. Load the model again when nothing "
                    f"writes to it."
                )


@contextmanager
def opened(path: Path) -> Iterator[Weights]:
    """The weight files of a directory: each is there, in the directory, and a whole safetensors file.

    Raises `ModelRefused`. Tensors can be read until the block ends.
    """
    listed = _weight_files(path)
    names = sorted(set(listed.values())) or [_SINGLE]
    stored: dict[str, Stored] = {}
    parts: dict[str, Any] = {}
    marks: dict[str, tuple[int, ...]] = {}
    with ExitStack() as files:
        files.callback(parts.clear)  # a slice that an error's traceback holds would keep its file open
        for name in names:
            marks[name] = _mark(path / name)
            _add(path / name, files, stored, parts)
        absent = sorted(set(listed) - set(stored))
        if absent:
            raise ModelRefused(
                f"{_INDEX} lists {len(absent)} tensors that the files of {path.name} do not hold: {first_few(absent)}. "
                f"Copy the model again, whole."
            )
        others = {file.name for file in path.glob("*.safetensors")} - set(names)
        yield Weights(path, stored, parts, marks, tuple(sorted(others)))


def _add(file: Path, files: ExitStack, stored: dict[str, Stored], parts: dict[str, Any]) -> None:
    """Add what one more file holds, and have `files` close it."""
    try:
        handle = files.enter_context(safe_open(file, framework="pt", backend="pread"))
        for tensor in handle.keys():
            if tensor in stored:
                raise ModelRefused(
                    f"{stored[tensor].file} and {file.name} both hold {tensor}; remove one of them, with its entry in "
                    f"{_INDEX}"
                )
            part = parts[tensor] = handle.get_slice(tensor)
            stored[tensor] = Stored(file.name, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise ModelRefused(f"{file.name} is not a whole safetensors file: {error}") from error


def _mark(file: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    try:
        said = os.stat(file)
    except OSError as error:
        raise ModelRefused(f"the weight file {file.name} is missing from {file.parent}: {error.strerror}") from error
    return (said.st_dev, said.st_ino, said.st_size, said.st_mtime_ns, said.st_ctime_ns)


def _weight_files(path: Path) -> dict[str, str]:
    """The file of each tensor that the index lists; nothing if there is one file of the known name."""
    if (path / _SINGLE).is_file():
        return {}
    if (path / _INDEX).is_file():
        listed = read_object(path / _INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(map(_is_shard, listed.values())):
            raise ModelRefused(f"{_INDEX} does not list safetensors files of its own directory")
        for name in sorted(set(listed.values())):
            if not (path / name).is_file():
                raise ModelRefused(f"the weight file {name} is missing from {path}; {_INDEX} lists it")
        return listed
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise ModelRefused(
            f"{path.name} has only pickled weights ({', '.join(pickled[:3])}), which can run code when they are read. "
            "Convert them to safetensors."
        )
    raise ModelRefused(f"{path} has no {_SINGLE}")


def _is_shard(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name and "\\" not in name


def check_depth(fields: Mapping[str, Any], weights: Weights) -> None:
    """No model has more layers than tensors: a config that says a billion layers is refused before they are built."""
    for part in (fields, *(value for value in fields.values() if isinstance(value, dict))):
        for key in DEPTHS:
            layers = part.get(key)
            if isinstance(layers, int) and layers > len(weights.tensors):
                raise ModelRefused(
                    f"config.json says {key} is {layers}; the weight files hold {len(weights.tensors)} tensors in all"
                )


def check_shapes(skeleton: PreTrainedModel, weights: Weights) -> None:
    """Raise `ModelRefused` if stored tensors cannot be those of the skeleton of a network. Reads none of them.

    Shapes are compared where names agree: transformers renames and joins some tensors as it loads.
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


def fill(skeleton: PreTrainedModel, dtype: torch.dtype, weights: Weights) -> tuple[PreTrainedModel, list[str]]:
    """A network like `skeleton` that holds copies of the weights as `dtype`, and what was not taken as it is stored.

    Reads tensor by tensor, so at its peak this takes the network's bytes and what transformers is joining at the time.
    Raises `ModelRefused` if tensors are missing, of another shape, have no place in the network, or hold values that
    are not finite; and what transformers raises.
    """
    goals = _goals(skeleton, weights)
    _check_types(skeleton, weights, goals)
    sources = {name: Source(weights.parts, name) for name in weights.parts}
    with _in_turn():
        built: Any = type(skeleton).from_pretrained(
            None,
            config=skeleton.config,
            dtype=dtype,
            state_dict=sources,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, report = built
    weights.check_unchanged()
    _check_report(report, weights, goals, type(model).__name__)
    _check_finite(model, weights)
    return model, _notes(skeleton, model, weights, [name for name, source in sources.items() if not source.was_read])


@contextmanager
def _in_turn() -> Iterator[None]:
    """Within the block, transformers reads a tensor when it needs it. Its threads would read ahead without a bound: all
    experts of a model before the first are joined, which is a second copy of it. One load at a time, since the switch
    is of the process."""
    with _LOADING:
        before = os.environ.get(_READ_AS_NEEDED)
        os.environ[_READ_AS_NEEDED] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_READ_AS_NEEDED]
            else:
                os.environ[_READ_AS_NEEDED] = before


def _goals(skeleton: PreTrainedModel, weights: Weights) -> dict[str, str]:
    """Where transformers loads each stored tensor to, by its own rules: a name of the network, or one that it has not.

    Raises `ModelRefused` if two go to one place and are not joined there.
    """
    conversions = get_model_conversion_mapping(skeleton)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    prefix, places = skeleton.base_model_prefix, skeleton.state_dict()
    goals: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in weights.tensors:
        goal, joined = rename_source_key(name, renamings, converters, prefix, places)
        if goal not in places and name in places:
            goal, joined = rename_source_key(name, [], [], prefix, places)
        goals[name] = goal
        if joined is None and goal in places and taken.setdefault(goal, name) != name:
            raise ModelRefused(
                f"{taken[goal]} ({weights.tensors[taken[goal]].file}) and {name} ({weights.tensors[name].file}) are "
                f"both the network's {goal}, and only one of them would be used. Remove the other one from its file."
            )
    return goals


def _check_types(skeleton: PreTrainedModel, weights: Weights, goals: Mapping[str, str]) -> None:
    """Integers and eight-bit floats have scales that a cast knows nothing of."""
    places = skeleton.state_dict()
    for name, goal in goals.items():
        stored = weights.tensors[name]
        if goal in places and places[goal].is_floating_point() and stored.dtype not in _FLOATS:
            raise ModelRefused(
                f"{stored.file} holds {name} as {stored.dtype}; float32, bfloat16 and float16 weights are served"
            )


def _check_report(report: Mapping[str, Any], weights: Weights, goals: Mapping[str, str], network: str) -> None:
    """Raise `ModelRefused` for what transformers found wrong. Names in its ignore lists are not in its report."""
    faults: list[str] = []
    if unexpected := set(map(str, report["unexpected_keys"])):
        names = [name for name, goal in goals.items() if goal in unexpected] or sorted(unexpected)
        faults.append(f"{len(names)} tensors that have no place in it ({first_few(names)})")
    for what, kind in (("missing_keys", "nothing for"), ("mismatched_keys", "another shape for")):
        if found := sorted(map(str, report[what])):
            faults.append(f"{kind} {len(found)} of its parameters ({first_few(found)})")
    if faults:
        raise ModelRefused(
            f"the weights do not fit the config: it describes a {network}, and {weights.files} of {weights.path.name} "
            f"holds {' and '.join(faults)}. It would be another model: correct config.json, or the weights."
        )


def _check_finite(model: PreTrainedModel, weights: Weights) -> None:
    """NaN or infinity in one row of a weight would spoil only some texts, long after the model was loaded."""
    bad = [name for name, one in model.named_parameters() if one.numel() and not _is_finite(one)]
    if bad:
        raise ModelRefused(
            f"{weights.files} of {weights.path.name}: {len(bad)} tensors hold NaN or infinity as {model.dtype}: "
            f"{first_few(bad)}. The weights are damaged; if not, load them with dtype float32."
        )


def _is_finite(values: torch.Tensor) -> bool:
    """The least and the greatest value are NaN if any value is."""
    if not values.is_floating_point():
        return True
    low, high = torch.aminmax(values.detach())
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _notes(before: PreTrainedModel, model: PreTrainedModel, weights: Weights, unread: Sequence[str]) -> list[str]:
    """What a user may not expect of the files."""
    notes: list[str] = []
    network = type(model).__name__
    if unread:
        notes.append(f"{len(unread)} stored tensors are not used: {network} ignores {first_few(unread)}")
    if weights.unlisted:
        notes.append(f"{first_few(weights.unlisted)}: not read, since {weights.files} hold the model's weights")
    parted = sorted(set(before.all_tied_weights_keys or ()) - set(model.all_tied_weights_keys or ()))
    if parted:
        notes.append(f"config.json ties {first_few(parted)}, but other values are stored for it, and these are used")
    filled = [pattern for pattern in model._keys_to_ignore_on_load_missing or () if _fills(pattern, model, weights)]
    if filled:
        notes.append(f"no stored tensor is named like {first_few(filled)}: {network} takes initial values of its own")
    return notes


def _fills(pattern: str, model: PreTrainedModel, weights: Weights) -> bool:
    """Whether the network has parameters of this kind, and the files have none."""
    return any(re.search(pattern, name) for name in model.state_dict()) and not any(
        re.search(pattern, name) for name in weights.tensors
    )


def first_few(names: Sequence[str], most: int = 3) -> str:
    """The first few of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
