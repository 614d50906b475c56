"""writing: the weights files of a quantised or cast directory.

Always true: a tensor is read, converted and written before the next one is read; names are those of the source.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused
from kvcellar.models.quantize.chosen import Choice
from kvcellar.models.quantize.kinds import INT8
from kvcellar.models.quantize.layouts import pack
from kvcellar.models.quantize.rules import GROUP, int4_groups, int8_rows
from kvcellar.models.quantize.tensor_file import Entry, TensorFile, tensor_file
from kvcellar.models.weights_files import MTP_FILE, Stored, WeightsFiles
from kvcellar.models.weights_loading import FLOATS, is_finite
from kvcellar.progress import report

_SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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
        sharded = {file: entries for file, entries in placed.items() if file not in (_SINGLE, MTP_FILE)}
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
