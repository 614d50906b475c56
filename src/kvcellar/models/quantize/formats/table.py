"""table: which formats of quantised weights are read, and where a model directory says which one it has.

A directory says it in config.json, under one of `_KEYS`, at the top or in `text_config`; or ModelOpt's
hf_quant_config.json does. Methods without an entry here are refused by name.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.config_file import read_object
from kvcellar.models.quantize.formats.bitsandbytes import BitsAndBytes
from kvcellar.models.quantize.formats.compressed import Compressed
from kvcellar.models.quantize.formats.mlx import Mlx
from kvcellar.models.quantize.formats.part import Format
from kvcellar.models.quantize.formats.scaled import ModelOpt, ScaledFloats
from kvcellar.models.quantize.formats.small import BitNet, Gemma, Mxfp4
from kvcellar.models.quantize.formats.torchao import TorchAo
from kvcellar.models.quantize.formats.words import Awq, Gptq, auto_round
from kvcellar.models.quantize.schemes import quantisation_of

_KEYS = ("quantization_config", "compression_config", "quantization")
_MODELOPT = "hf_quant_config.json"
_MLX = "mlx"
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "compressed-tensors": lambda raw: Compressed(quantisation_of(raw)),
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
    found = list(_descriptions(config))
    if any(other != found[0] for other in found):
        raise ModelRefused("config.json describes quantised weights twice, in different ways. Remove one of them")
    return _format(found[0]) if found else None


def _descriptions(config: Mapping[str, Any]) -> Iterator[Any]:
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            yield from (part[key] for key in _KEYS if part.get(key))


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
