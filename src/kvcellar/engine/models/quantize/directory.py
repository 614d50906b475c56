"""directory: writes a model directory again with its weights in fewer bits, or cast to another float type.

Works on the files, tensor by tensor, under the names of the source: its peak memory is one tensor and its codes, unless
it is to calibrate or to measure, which runs the network. What is not quantised stays as it is stored. The same source
gives the same bytes.

Experts that a file has in one tensor are written as the tensors of single experts that other readers expect.
transformers joins the experts of a layer when it loads them one by one; some files have them joined already. Where its
table of conversions has the names of single experts, they are shown under these names, so that they are quantised as
matrices; other joined experts stay as they are.
"""

import json
import shutil
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from kvcellar.engine.models.heads.assistant_head import ASSISTANTS, assistant_config, skeleton_of_assistant
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import config_of, skeleton_of
from kvcellar.engine.models.quantize.formats.compressed import quantisation_of
from kvcellar.engine.models.quantize.kinds import CASTS, GPTQ, INT4, INT8, METHODS, SIGNED_MAX, canonical_kind
from kvcellar.engine.models.quantize.measuring import Calibration, measure_harm
from kvcellar.engine.models.quantize.reading import format_of
from kvcellar.engine.models.quantize.rounding import int4_gptq, int4_groups
from kvcellar.engine.models.quantize.selection import Choice, choose
from kvcellar.engine.models.quantize.writing import Writer, cast_config, quantised_config
from kvcellar.engine.models.weights.config_file import config_fields, read_object
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles, opened, opened_file
from kvcellar.engine.models.weights.weights_loading import check_floats, targets_of
from kvcellar.errors import BadRequest, ModelRefused, shown
from kvcellar.repository import INDEX, MOST_TEXT, MTP, TEXTS


@dataclass(frozen=True, slots=True)
class _Slice:
    """Rows of one expert of a joined tensor, read when it is indexed."""

    slices: Mapping[str, Any]
    name: str
    stored: Stored  # [E,o,i]
    expert: int
    rows: slice

    @property
    def own(self) -> Stored:
        """These rows as a stored tensor."""
        return Stored(self.stored.file, (self.rows.stop - self.rows.start, self.stored.shape[2]), self.stored.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return self.slices[self.name][self.expert, self.rows][index]


def separated(weights: WeightsFiles, skeleton: PreTrainedModel) -> WeightsFiles:
    """The same files with single experts in place of those that are joined, as far as they have names."""
    own, targets = skeleton.state_dict(), targets_of(skeleton, weights)
    converters = [one for one in get_model_conversion_mapping(skeleton) if isinstance(one, WeightConverter)]
    parts: dict[str, Any] = {}
    tensors = dict(weights.tensors)
    for name, stored in weights.tensors.items():
        place = own.get(targets[name])
        if place is None or len(stored.shape) != 3 or tuple(place.shape) != stored.shape:
            continue
        found = _parts(name, weights, converters)
        if found and not set(found) & set(tensors) and _are_joined(found, targets[name], skeleton, weights):
            del tensors[name]
            parts |= found
            tensors |= {new: one.own for new, one in found.items()}
    return replace(weights, tensors=tensors, slices=ChainMap[str, Any](parts, weights.slices)) if parts else weights


def _parts(name: str, weights: WeightsFiles, converters: list[WeightConverter]) -> dict[str, _Slice]:
    """Names of single experts, each with its place in the joined tensor [E,o,i]; none if no conversion joins them."""
    stored = weights.tensors[name]
    for one in converters:
        sources, (target, *others) = list(one.source_patterns), list(one.target_patterns)
        joins = [(type(step), getattr(step, "dim", None)) for step in one.operations]
        whole = [(MergeModulelist, 0)] if len(sources) == 1 else [(MergeModulelist, 0), (Concatenate, 1)]
        plain = all(source.count("*") == 1 and source.endswith(".weight") for source in sources)
        if joins != whole or others or not plain or not name.endswith(target) or stored.shape[1] % len(sources):
            continue
        start, size = name.removesuffix(target), stored.shape[1] // len(sources)
        return {
            start + source.replace("*", str(expert)): _Slice(
                weights.slices, name, stored, expert, slice(at * size, (at + 1) * size)
            )
            for expert in range(stored.shape[0])
            for at, source in enumerate(sources)
        }
    return {}


def _are_joined(parts: Mapping[str, _Slice], target: str, skeleton: PreTrainedModel, weights: WeightsFiles) -> bool:
    """Whether transformers would load these names into the tensor that they are taken from."""
    found = targets_of(skeleton, replace(weights, tensors={new: one.own for new, one in parts.items()}))
    return all(place == target for place in found.values())


def quantize_directory(
    source: Path,
    into: Path,
    kind: str,
    *,
    method: str = SIGNED_MAX,
    calibrate: str | None = None,
    draft: bool = False,
    measure: bool = True,
) -> Mapping[str, Any]:
    """Write the model of `source` to the new directory `into` with weights of `kind`. Returns the report, of values
    that JSON can represent; `report_lines` has it as text.

    `method` of choosing codes of 4 bits: "signed-max", or "gptq", which calibrates on the text `calibrate`, or on
    samples of the model. `draft`: it is a draft model, whose output head is quantised, too, and its embedding if it is
    not the same. `measure`: compare the predictions of both, which loads them one after the other.

    Raises `BadRequest` and `ModelRefused`; `into` is removed then.
    """
    kind = canonical_kind(kind)
    _check_method(kind, method, calibrate)
    with silence_transformers(), _created(into):
        with ExitStack() as files:
            fields = _unquantised(source)
            weights = [files.enter_context(opened(source))]
            if (source / MTP).is_file():
                weights.append(files.enter_context(opened_file(source, MTP)))
            for one in weights:
                check_floats(one)
            skeleton = _skeleton(source, weights[0])
            if kind not in CASTS:
                weights[0] = separated(weights[0], skeleton)
            config, found = _chosen(skeleton, fields, weights[0], kind, draft)
            writer = Writer(into, weights, found, kind if kind in CASTS else None)
            report: dict[str, Any] = {"kind": kind, "method": method}
            with writer.opened():
                report |= _written(writer, found, None if method == SIGNED_MAX else Calibration(source, calibrate))
            report["source_bytes"], report["bytes"] = writer.bytes()
            report |= {"weights": writer.weights(), "left": dict(sorted(Counter(found.left.values()).items()))}
        _copy_others(source, into)
        (into / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if measure and config.get("model_type") not in ASSISTANTS:  # these run on a target only
            report["harm"] = measure_harm(source, into)
        return report


def _check_method(kind: str, method: str, calibrate: str | None) -> None:
    if method not in METHODS:
        raise BadRequest(f"there is no method {shown(method)} of quantising; there are {', '.join(METHODS)}", "method")
    if method == GPTQ and (kind == INT8 or kind in CASTS):
        raise BadRequest(f"{GPTQ} chooses codes of 4 bits; {kind} has none. Use it with int4 or mixed", "method")
    if calibrate is not None and method != GPTQ:
        raise BadRequest(f"a text to calibrate on is for the method {GPTQ}, not {method}", "calibrate")


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
    if format_of(source) is not None:
        raise ModelRefused(
            f"the weights of {source.name} are quantised already. Leave out the type to use them as they are, or "
            f"quantise the model that they were made from"
        )
    return read_object(source / "config.json")


def _chosen(
    skeleton: PreTrainedModel, fields: Mapping[str, Any], weights: WeightsFiles, kind: str, draft: bool
) -> tuple[dict[str, Any], Choice]:
    """The new fields of config.json, and what happens to each tensor."""
    if kind in CASTS:
        return cast_config(fields, kind), Choice({}, {}, ())
    choice = choose(skeleton, weights, kind, draft=draft)
    config = quantised_config(fields, choice)
    _check_described(config, choice)
    return config, choice


def _skeleton(source: Path, weights: WeightsFiles) -> PreTrainedModel:
    config = config_of(config_fields(source), weights)
    if config.model_type not in ASSISTANTS:
        return skeleton_of(config, torch.bfloat16)
    return skeleton_of_assistant(assistant_config(source, weights), torch.bfloat16, weights)


def _check_described(config: Mapping[str, Any], choice: Choice) -> None:
    """Raise `ModelRefused` if readers of the config would take a tensor for one of another kind."""
    described = quantisation_of(config["quantization_config"]) if choice.kinds else None
    for name, kind in choice.kinds.items():
        assert described is not None
        scheme = described.targeting(name.removesuffix(".weight"))
        if scheme is None or (scheme.bits == 8) != (kind == INT8):
            raise ModelRefused(f"{name} cannot be told from weights of another type by its name; use int8 or int4")


def _written(writer: Writer, choice: Choice, calibration: Calibration | None) -> dict[str, Any]:
    """Write all tensors. Returns what the report says about calibration."""
    names = {choice.modules[name]: name for name in choice.modules if choice.kinds[name] == INT4}
    calibrated = set(names.values()) if calibration is not None else set[str]()
    for name in writer.names:
        if name not in calibrated:
            writer.put(name)
    if calibration is None:
        return {}
    plain = [name for name, kind in choice.kinds.items() if kind == INT4 and name not in calibrated]
    for hessians in calibration.hessians(list(names)):
        for module, hessian in hessians.items():
            writer.put(names[module], partial(_gptq, names[module], hessian, plain))
    windows = calibration.windows
    used = {"text": windows.source, "windows": len(windows.ids), "tokens": windows.ids.numel()}
    return {"calibration": {**used, "by_the_rule": sorted(plain)}}


def _gptq(name: str, hessian: Tensor | None, plain: list[str], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales by GPTQ; where it is of no use, by the rule, and `name` is added to `plain`."""
    found = None if hessian is None else int4_gptq(weight, hessian)
    if found is not None:
        return found
    plain.append(name)
    return int4_groups(weight)


def _copy_others(source: Path, into: Path) -> None:
    """Copy tokenizer, templates, generation config and the like."""
    for file in sorted(source.iterdir()):
        named = file.suffix in (*TEXTS, ".md") or file.name.upper().startswith(("LICENSE", "NOTICE"))
        if named and file.is_file() and file.name not in ("config.json", INDEX) and file.stat().st_size <= MOST_TEXT:
            shutil.copyfile(file, into / file.name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", into / "additional_chat_templates")
