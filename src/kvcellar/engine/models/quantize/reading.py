"""reading: the quantised tensors of weights files, as the dense tensors that they stand for.

A directory says in config.json which format its weights have, at the top or in `text_config`; or
ModelOpt's hf_quant_config.json does. Methods without an entry in `FORMATS` are refused by name.

`decoded` shows the stored tensors of each quantised weight as one dense tensor under the name that the file would have
for it, so that whatever reads dense files reads these, too.

Always true: types, shapes and scales were checked before a tensor is shown. Shapes follow from what is stored, and are
compared with those of the network like any other.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcellar.engine.models.quantize.formats.bitsandbytes import BitsAndBytes
from kvcellar.engine.models.quantize.formats.compressed import Compressed
from kvcellar.engine.models.quantize.formats.floats import ModelOpt, Mxfp4, ScaledFloats
from kvcellar.engine.models.quantize.formats.integers import Awq, BitNet, Gemma, Gptq, TorchAo, auto_round
from kvcellar.engine.models.quantize.formats.mlx import Mlx
from kvcellar.engine.models.quantize.formats.part import Format, Part, shown_part
from kvcellar.engine.models.weights.config_file import quantisations, read_object
from kvcellar.engine.models.weights.weights_files import WeightsFiles
from kvcellar.errors import ModelRefused, shown

_MODELOPT = "hf_quant_config.json"
_MLX = "mlx"
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "compressed-tensors": Compressed,
    "gptq": Gptq,
    "awq": Awq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "fp8": ScaledFloats,
    "fbgemm_fp8": ScaledFloats,
    "mxfp8": ScaledFloats,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "bitsandbytes": BitsAndBytes,
    "torchao": TorchAo,
    _MLX: Mlx,
    "metal": Mlx,
    "bitnet": BitNet,
    "gemma": Gemma,
}
READABLE = f"Weights are read as float32, bfloat16, float16, or quantised by one of: {', '.join(FORMATS)}"


def format_of(path: Path) -> Format | None:
    """The format of the quantised weights of a directory; None if it does not say that they are quantised. Raises
    `ModelRefused`."""
    found = format_in(read_object(path / "config.json")) if (path / "config.json").is_file() else None
    if found is None and (path / _MODELOPT).is_file():
        own = read_object(path / _MODELOPT).get("quantization")
        return ModelOpt(own if isinstance(own, Mapping) else {})
    return found


def format_in(config: Mapping[str, Any]) -> Format | None:
    """The format that the fields of config.json describe; None if they describe none. Raises `ModelRefused`."""
    found = list(quantisations(config))
    if any(other != found[0] for other in found):
        raise ModelRefused("config.json describes quantised weights twice, in different ways. Remove one of them")
    return _format(found[0]) if found else None


def _format(raw: Any) -> Format:
    method = raw
    if isinstance(raw, Mapping):
        method = raw.get("quant_method", _MLX if "bits" in raw and "group_size" in raw else None)
        if method is None and "quant_algo" in raw:
            method = "modelopt"
    if not isinstance(raw, Mapping) or not isinstance(method, str) or method not in FORMATS:
        known = isinstance(method, str) and method.replace("-", "_").isidentifier()
        raise ModelRefused(f"its weights are quantised ({method if known else shown(method)}). {READABLE}")
    return FORMATS[method](raw)


_ACTIVATIONS = (  # of activations and of K/V, which are not quantised
    *(f".{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point", "global_scale")),
    *("activation_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
)


def decoded(weights: WeightsFiles) -> WeightsFiles:
    """The same files if their config does not describe quantised weights; else with dense tensors in place of those
    that are stored quantised. Raises `ModelRefused`.

    Decoding reads the files, so it works until they are closed.
    """
    form = format_of(weights.path)
    if form is None:
        return weights
    parts: dict[str, Part] = {}
    for name in weights.tensors:
        part = _part(form, name, weights)
        if part is None:
            continue
        if part.name in parts or (part.name in weights.tensors and part.name not in part.uses):
            raise ModelRefused(f"{weights.tensors[name].file} holds {part.name} twice: {name} describes it, too")
        parts[part.name] = part
    used = {name for part in parts.values() for name in part.uses}
    unused = tuple(name for name in weights.tensors if name.endswith(_ACTIVATIONS) and name not in used)
    hidden = used.union(unused)
    plain = {name: stored for name, stored in weights.tensors.items() if name not in hidden}
    tensors = {name: part.stored for name, part in parts.items()}
    shown: dict[str, Any] = {name: shown_part(part, weights.slices) for name, part in parts.items()}
    forms = MappingProxyType({name: part.form for name, part in parts.items()})
    return replace(weights, tensors=plain | tensors, slices=ChainMap(shown, weights.slices), unused=unused, forms=forms)


def _part(form: Format, name: str, weights: WeightsFiles) -> Part | None:
    """Raises `ModelRefused` for a weight that is not stored as the format requires, or with values that none has."""
    try:
        part = form.part(name, weights)
    except ModelRefused as error:
        raise ModelRefused(
            f"{weights.tensors[name].file} holds {name}, but its weight is not stored as config.json describes it: "
            f"{error}"
        ) from error
    if part is not None:
        part.check(lambda stored: weights.slices[stored][...])
    return part
