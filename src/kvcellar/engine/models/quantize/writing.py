"""writing: the weights files and config.json of a quantised or cast directory.

Always true:
  * a tensor is read, converted and written before the next one is read; names are those of the source;
  * the header of a file was written first, every tensor has its place in it from the start, and a file is complete only
    if each was written once. The same tensors give the same bytes in any order of writing.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcellar.engine.models.quantize.formats.compressed import INTS, PACKED
from kvcellar.engine.models.quantize.kinds import CASTS, INT4, INT8
from kvcellar.engine.models.quantize.rounding import GROUP, int4_groups, int8_rows, pack
from kvcellar.engine.models.quantize.selection import Choice
from kvcellar.engine.models.weights.weights_files import FLOATS, Stored, WeightsFiles, is_finite
from kvcellar.errors import ModelRefused
from kvcellar.progress import report
from kvcellar.repository import INDEX, MTP, SINGLE

_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Type, as in safetensors, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _WIDTHS.get(self.dtype, 1)


class TensorFile:
    """One file that is being written."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._places: dict[str, int] = {}
        self._left = set(entries)
        header: dict[str, object] = {"__metadata__": _METADATA}
        end = 0
        for name in sorted(entries, key=lambda one: (-_WIDTHS.get(entries[one].dtype, 1), one)):  # aligned to elements
            entry = entries[name]
            header[name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.bytes],
            }
            self._places[name] = end
            end += entry.bytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._start = 8 + len(raw)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._write(len(raw).to_bytes(8, "little") + raw, 0)
        os.ftruncate(self._file, self._start + end)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the shape that was declared for it."""
        assert tuple(tensor.shape) == self._entries[name].shape, name
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert len(raw) == self._entries[name].bytes, name
        self._left.remove(name)
        buffer: Any = raw.numpy()  # its stub lacks the buffer protocol
        self._write(memoryview(buffer), self._start + self._places[name])

    def _write(self, raw: bytes | memoryview, at: int) -> None:
        rest = memoryview(raw)
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written

    def close(self) -> None:
        os.close(self._file)

    def check(self) -> None:
        assert not self._left, f"not written: {sorted(self._left)[:3]}"


@contextmanager
def tensor_file(path: Path, entries: Mapping[str, Entry]) -> Iterator[TensorFile]:
    """A new file at `path`, which is complete when the block ends."""
    file = TensorFile(path, entries)
    try:
        yield file
        file.check()
    finally:
        file.close()


def quantised_config(fields: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The fields of a source with a `quantization_config` as compressed-tensors writes it."""
    used = [kind for kind in (INT8, INT4) if kind in choice.kinds.values()]
    groups: dict[str, Any] = {}
    for kind in used:
        promoted = kind == INT8 and len(used) > 1 and choice.promoted is not None
        targets = [choice.promoted] if promoted else ["Linear", *choice.others]
        groups[f"group_{len(groups)}"] = {"targets": targets, **_GROUPS[kind]}
    return _described(fields, groups, choice.ignore)


def with_codes(fields: Mapping[str, Any], modules: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """The fields of a model of whose modules some, by bits, have codes in groups."""
    groups = {
        f"group_{number}": {
            **_GROUPS[INT4],
            "targets": sorted(modules[bits]),
            "weights": _args(bits, strategy="group", group_size=GROUP),
            "format": PACKED if bits == 4 else INTS,
        }
        for number, bits in enumerate(sorted(modules))
    }
    return _described(fields, groups, ())


def _described(fields: Mapping[str, Any], groups: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    forms = [group["format"] for group in groups.values()]
    quantization = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms[0] if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
    return {**fields, **({"quantization_config": quantization} if groups else {})}


def cast_config(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of a source whose weights were cast."""
    changed = {**fields, "dtype": CASTS[kind]}
    changed.pop("torch_dtype", None)
    for key, part in fields.items():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            changed[key] = cast_config(part, kind)
    return changed


def _args(bits: int, **more: Any) -> dict[str, Any]:
    defaults = {
        "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "block_structure": None,
        "actorder": None, "dynamic": False, "observer": None, "observer_kwargs": {},
    }  # fmt: skip
    return {"num_bits": bits, **defaults, **more}


_GROUPS: Mapping[str, Mapping[str, Any]] = {
    INT8: {
        "weights": _args(8),
        "input_activations": _args(8, strategy="token", dynamic=True),
        "output_activations": None,
        "format": INTS,
    },
    INT4: {
        "weights": _args(4, strategy="group", group_size=GROUP),
        "input_activations": None,
        "output_activations": None,
        "format": PACKED,
    },
}


_TYPES = {"bf16": ("BF16", torch.bfloat16), "f16": ("F16", torch.float16), "f32": ("F32", torch.float32)}

Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]  # [o,i] -> codes of 4 bits and scales


class Writer:
    """Writes the tensors of `sources` into files of the same names in `into`, in any order."""

    def __init__(self, into: Path, sources: Sequence[WeightsFiles], choice: Choice, cast: str | None) -> None:
        """`cast` is the kind that all floats are cast to; None: what is not quantised stays as it is stored."""
        self._into, self._sources, self._choice, self._cast_to = into, sources, choice, cast
        self._owners = {name: one for one in sources for name in one.tensors}
        self._files: dict[str, TensorFile] = {}
        self._done, self._total = 0, sum(one.elements for one in sources)

    @property
    def names(self) -> list[str]:
        """All tensors of the sources, file by file."""
        return sorted(self._owners, key=lambda name: (self._stored(name).file, name))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Tensors are written within the block; after it the files are complete, with their index if there is not one
        file of the usual name."""
        placed: dict[str, dict[str, Entry]] = {file: {} for one in self._sources for file in one.stats}
        for name in self.names:
            placed[self._stored(name).file] |= self._entries(name)
        with ExitStack() as files:
            for file, entries in placed.items():
                self._files[file] = files.enter_context(tensor_file(self._into / file, entries))
            yield
        for one in self._sources:
            one.check_unchanged()
        sharded = {file: entries for file, entries in placed.items() if file not in (SINGLE, MTP)}
        if sharded:
            named = {name: file for file, entries in sharded.items() for name in entries}
            size = sum(entry.bytes for entries in sharded.values() for entry in entries.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(named.items()))}
            (self._into / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def put(self, name: str, rounding: Rounding = int4_groups) -> None:
        """Convert and write one tensor; `rounding` is for 4 bits. Raises `ModelRefused` for values that are not finite,
        here or in the type that they are cast to."""
        report("quantising weights" if self._cast_to is None else "casting weights", self._done, self._total)
        tensor: Tensor = self._owners[name].slices[name][...]
        stored, kind, module = self._stored(name), self._choice.kinds.get(name), name.removesuffix(".weight")
        out = self._files[stored.file]
        if not is_finite(tensor):
            raise ModelRefused(f"{stored.file}: {name} holds NaN or infinity. The weights are damaged")
        if kind is None:
            out.put(name, self._cast(name, tensor))
        elif kind == INT8:
            codes, scales = int8_rows(tensor)
            out.put(name, codes)
            out.put(f"{module}.weight_scale", scales)
        else:
            codes, scales = rounding(tensor)
            out.put(f"{module}.weight_packed", pack(codes, 4))
            out.put(f"{module}.weight_scale", scales)
            out.put(f"{module}.weight_shape", torch.tensor(tensor.shape))
        self._done += tensor.numel()

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        if self._cast_to is None or not tensor.is_floating_point():
            return tensor
        cast = tensor.to(_TYPES[self._cast_to][1])
        if not is_finite(cast):
            raise ModelRefused(f"{name} has values that {self._cast_to} cannot hold; use bf16")
        return cast

    def _stored(self, name: str) -> Stored:
        return self._owners[name].tensors[name]

    def _entries(self, name: str) -> dict[str, Entry]:
        """The tensors that one of a source becomes."""
        kind, module, stored = self._choice.kinds.get(name), name.removesuffix(".weight"), self._stored(name)
        if kind is None:
            cast = self._cast_to if stored.dtype in FLOATS else None
            return {name: Entry(stored.dtype if cast is None else _TYPES[cast][0], stored.shape)}
        outputs, inputs = stored.shape
        if kind == INT8:
            return {name: Entry("I8", stored.shape), f"{module}.weight_scale": Entry("BF16", (outputs, 1))}
        return {
            f"{module}.weight_packed": Entry("I32", (outputs, inputs // 8)),
            f"{module}.weight_scale": Entry("BF16", (outputs, inputs // GROUP)),
            f"{module}.weight_shape": Entry("I64", (2,)),
        }

    # -- the report -----------------------------------------------------------------------------------------------

    def bytes(self) -> tuple[int, int]:
        """Of the weights files of the sources, and of those written."""
        files = [(one.path / file, self._into / file) for one in self._sources for file in one.stats]
        return sum(before.stat().st_size for before, _ in files), sum(after.stat().st_size for _, after in files)

    def weights(self) -> Mapping[str, int]:
        """How many weights are stored in each kind or type."""
        counted: dict[str, int] = {}
        for name in self.names:
            kind = self._choice.kinds.get(name) or self._entries(name)[name].dtype.lower()
            counted[kind] = counted.get(kind, 0) + math.prod(self._stored(name).shape)
        return dict(sorted(counted.items()))
