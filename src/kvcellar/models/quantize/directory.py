"""directory: writes a model directory again with its weights in fewer bits, or cast to another float type.

Works on the files, tensor by tensor, under the names of the source: its peak memory is one tensor and its codes. What
is not quantised stays as it is stored. The same source gives the same bytes.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcellar.errors import BadRequest, ModelRefused, shown
from kvcellar.models.config_file import config_fields, read_object
from kvcellar.models.hf_logging import silence_transformers
from kvcellar.models.load import config_of, skeleton_of
from kvcellar.models.quantize.chosen import Choice, choose
from kvcellar.models.quantize.described import cast_config, quantised_config
from kvcellar.models.quantize.kinds import CASTS, INT8, METHODS, canonical_kind
from kvcellar.models.quantize.layouts import pack
from kvcellar.models.quantize.rules import GROUP, int4_groups, int8_rows
from kvcellar.models.quantize.schemes import quantisation_of
from kvcellar.models.quantize.tensor_file import Entry, TensorFile, tensor_file
from kvcellar.models.weights_files import MTP_FILE, Stored, WeightsFiles, opened, opened_file
from kvcellar.models.weights_loading import FLOATS, is_finite
from kvcellar.progress import Listener, listening, report

_COPIED = (".json", ".jinja", ".txt", ".md", ".model", ".tiktoken", ".vocab")
_NOT_COPIED = ("config.json", "model.safetensors.index.json")
_MOST_COPIED = 256 << 20  # bytes of one file beside the weights
_TYPES = {"bf16": ("BF16", torch.bfloat16), "f16": ("F16", torch.float16), "f32": ("F32", torch.float32)}


def quantize_directory(
    source: Path,
    into: Path,
    kind: str,
    *,
    method: str = "signed-max",
    draft: bool = False,
    progress: Listener | None = None,
) -> Mapping[str, Any]:
    """Write the model of `source` to the new directory `into` with weights of `kind`. Returns the report, of values
    that JSON can represent.

    `draft`: it is a draft model, whose output head is quantised, too, and its embedding if it is not the same. Raises
    `BadRequest` and `ModelRefused`; `into` is removed then.
    """
    kind = canonical_kind(kind)
    if method not in METHODS:
        raise BadRequest(f"there is no method {shown(method)} of quantising; there are {', '.join(METHODS)}", "method")
    with silence_transformers(), listening(progress), _created(into), ExitStack() as files:
        fields = _unquantised(source)
        weights = [files.enter_context(opened(source))]
        if (source / MTP_FILE).is_file():
            weights.append(files.enter_context(opened_file(source, MTP_FILE)))
        config = config_of(config_fields(source), weights[0])
        skeleton = skeleton_of(config, torch.bfloat16)
        if kind in CASTS:
            choice, changed = Choice({}, {}, ()), cast_config(fields, kind)
        else:
            choice = choose(skeleton, weights[0], kind, draft=draft)
            changed = quantised_config(fields, choice)
            _check_described(changed, choice)
        writer = _Writer(into, choice, kind if kind in CASTS else None)
        for one in weights:
            writer.write(one)
        _copy_others(source, into)
        (into / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
        return {"kind": kind, "method": method, **writer.sizes(weights)}


@contextmanager
def _created(into: Path) -> Iterator[None]:
    try:
        into.mkdir()
    except FileExistsError:
        raise BadRequest(f"{into} exists; quantised weights are written to a new directory") from None
    try:
        yield
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise


def _unquantised(source: Path) -> dict[str, Any]:
    """All fields of config.json. Raises `ModelRefused` if the weights are quantised already."""
    if not (source / "config.json").is_file():
        raise ModelRefused(f"{source} has no config.json, so it is not a model directory")
    fields = read_object(source / "config.json")
    if quantisation_of(fields) is not None:
        raise ModelRefused(
            f"the weights of {source.name} are quantised already. Leave out the type to use them as they are, or "
            f"quantise the model that they were made from"
        )
    return fields


def _check_described(config: Mapping[str, Any], choice: Choice) -> None:
    """Raise `ModelRefused` if readers of the config would take a tensor for one of another kind."""
    described = quantisation_of(config)
    for name, kind in choice.kinds.items():
        assert described is not None
        scheme = described.targeting(name.removesuffix(".weight"))
        if scheme is None or (scheme.bits == 8) != (kind == INT8):
            raise ModelRefused(f"{name} cannot be told from weights of another type by its name; use int8 or int4")


def _copy_others(source: Path, into: Path) -> None:
    """Copy tokenizer, templates, generation config and the like."""
    for file in sorted(source.iterdir()):
        named = file.suffix in _COPIED or file.name.upper().startswith(("LICENSE", "NOTICE"))
        if named and file.is_file() and file.name not in _NOT_COPIED and file.stat().st_size <= _MOST_COPIED:
            shutil.copyfile(file, into / file.name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", into / "additional_chat_templates")


@dataclass(slots=True)
class _Writer:
    """Writes the files of a source. `cast` is the kind that all floats are cast to; None: they stay as they are."""

    into: Path
    choice: Choice
    cast: str | None

    def write(self, weights: WeightsFiles) -> None:
        """The same files, and their index if there is not the usual one."""
        named: dict[str, str] = {}
        total = sum(math.prod(stored.shape) for stored in weights.tensors.values())
        done = 0
        for file in sorted(weights.stats):
            own = {name: stored for name, stored in weights.tensors.items() if stored.file == file}
            entries = {new: entry for name, stored in own.items() for new, entry in self._entries(name, stored)}
            with tensor_file(self.into / file, entries) as out:
                for name, stored in own.items():
                    report("quantising weights" if self.cast is None else "casting weights", done, total)
                    self._put(name, weights, out)
                    done += math.prod(stored.shape)
            named |= dict.fromkeys(entries, file)
        weights.check_unchanged()
        if set(weights.stats) not in ({"model.safetensors"}, {MTP_FILE}):
            index = {"metadata": {"total_size": _total(self.into, weights)}, "weight_map": dict(sorted(named.items()))}
            (self.into / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _entries(self, name: str, stored: Stored) -> list[tuple[str, Entry]]:
        """The tensors that one of the source becomes."""
        kind, module = self.choice.kinds.get(name), name.removesuffix(".weight")
        if kind is None:
            cast = self.cast is not None and stored.dtype in FLOATS
            return [(name, Entry(_TYPES[self.cast][0] if cast and self.cast else stored.dtype, stored.shape))]
        outputs, inputs = stored.shape
        if kind == INT8:
            codes, scales = Entry("I8", stored.shape), Entry("BF16", (outputs, 1))
            return [(name, codes), (f"{module}.weight_scale", scales)]
        return [
            (f"{module}.weight_packed", Entry("I32", (outputs, inputs // 8))),
            (f"{module}.weight_scale", Entry("BF16", (outputs, inputs // GROUP))),
            (f"{module}.weight_shape", Entry("I64", (2,))),
        ]

    def _put(self, name: str, weights: WeightsFiles, out: TensorFile) -> None:
        tensor: Tensor = weights.slices[name][...]
        kind, module, file = self.choice.kinds.get(name), name.removesuffix(".weight"), weights.tensors[name].file
        if not is_finite(tensor):
            raise ModelRefused(f"{file}: {name} holds NaN or infinity. The weights are damaged")
        if kind is None:
            out.put(name, self._cast(name, tensor))
        elif kind == INT8:
            codes, scales = int8_rows(tensor)
            out.put(name, codes)
            out.put(f"{module}.weight_scale", scales)
        else:
            codes, scales = int4_groups(tensor)
            out.put(f"{module}.weight_packed", pack(codes, 4))
            out.put(f"{module}.weight_scale", scales)
            out.put(f"{module}.weight_shape", torch.tensor(tensor.shape))

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        if self.cast is None or not tensor.is_floating_point():
            return tensor
        cast = tensor.to(_TYPES[self.cast][1])
        if not is_finite(cast):
            raise ModelRefused(f"{name} has values that {self.cast} cannot hold; use bf16")
        return cast

    def sizes(self, sources: list[WeightsFiles]) -> dict[str, Any]:
        """Bytes and weights of the report."""
        weights: dict[str, int] = {}
        for one in sources:
            for name, stored in one.tensors.items():
                kind = self.choice.kinds.get(name) or self._entries(name, stored)[0][1].dtype.lower()
                weights[kind] = weights.get(kind, 0) + math.prod(stored.shape)
        left: dict[str, int] = {}
        for why in self.choice.left.values():
            left[why] = left.get(why, 0) + 1
        return {
            "source_bytes": sum((one.path / file).stat().st_size for one in sources for file in one.stats),
            "bytes": sum((self.into / file).stat().st_size for one in sources for file in one.stats),
            "weights": dict(sorted(weights.items())),
            "left": dict(sorted(left.items())),
        }


def _total(into: Path, weights: WeightsFiles) -> int:
    return sum((into / file).stat().st_size for file in weights.stats)
