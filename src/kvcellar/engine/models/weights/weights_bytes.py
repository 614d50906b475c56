"""weights_bytes: the bytes that the weights of a model directory take in memory, from its files, before anything is
loaded. Neither torch nor transformers is needed.

It is an upper bound: every tensor of every safetensors file counts, in the type that it is computed in; tensors that
are packed on a CPU while their plain form stays count twice.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from safetensors import SafetensorError, safe_open

from kvcellar.engine.models.weights.config_file import quantisations, read_object, text_parts
from kvcellar.errors import ModelRefused

MARGIN_SHARE, MARGIN = 50, 8 << 20  # a fiftieth, and some bytes: buffers, padding of packed weights
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # types of computation
_STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # floating-point types of files
_CODES = (".weight", ".weight_packed", ".qweight", "_blocks", ".embedding_quantized")  # tensors that may be packed
_WORDS = {"I32": 32, "U32": 32, "U8": 8}  # their types, and the bits of an element, which may hold several weights
MOST_METHOD = 40  # characters


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """What the files of a model have: the number of parameters, and how they are stored, such as `BF16`; of quantised
    ones by the name of the method."""

    elements: int
    kind: str


def weights_of(directory: Path) -> Weights:
    """Raises `ModelRefused`."""
    config, counts = read_object(directory / "config.json"), Counter[str]()
    bits = _bits(config)
    for one in _tensors(directory):
        counts[one.dtype] += _elements(one, bits)
    kind = counts.most_common(1)[0][0] if counts else ""
    return Weights(counts.total(), _method(config) or kind)


def _method(config: Mapping[str, Any]) -> str:
    """How weights were quantised; empty: they were not, or it does not say how."""
    found = (raw.get("quant_method") for raw in quantisations(config) if isinstance(raw, Mapping))
    return next((name[:MOST_METHOD].upper() for name in found if isinstance(name, str)), "")


def _elements(tensor: _Tensor, bits: int) -> int:
    """Weights of a tensor, if packed ones have so many bits."""
    word = _WORDS.get(tensor.dtype) if tensor.name.endswith(_CODES) else None
    elements = math.prod(tensor.shape)
    return elements if word is None else elements * word // bits


def bytes_in_memory(directory: Path, *, dtype: str = "auto") -> int:
    """Raises `ModelRefused` for files that are damaged or missing."""
    tensors = list(_tensors(directory))
    if not tensors:
        raise ModelRefused(f"{directory.name} has no safetensors files")
    config = read_object(directory / "config.json")
    bits = _bits(config)
    elements = sum(_elements(one, bits) for one in tensors)
    # an embedding that is the output layer too is packed for that, and plain for lookups
    elements += max((_elements(one, bits) for one in tensors if len(one.shape) == 2), default=0)
    size = _width(config, tensors, dtype) * elements
    return size + size // MARGIN_SHARE + MARGIN


def adapter_bytes(size: int) -> int:
    """Bytes in memory of an adapter whose file has `size`: on a CPU, 16-bit elements become float32."""
    return 2 * size


def _width(config: Mapping[str, Any], tensors: list[_Tensor], dtype: str) -> int:
    """Bytes of an element in the type of computation."""
    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    for part in text_parts(config):
        for key in ("dtype", "torch_dtype"):
            if (named := part.get(key)) in _WIDTHS:
                return _WIDTHS[cast(str, named)]
    return max((_STORED[one.dtype] for one in tensors if one.dtype in _STORED), default=4)


def _bits(config: Mapping[str, Any]) -> int:
    """The fewest bits of a weight in packed tensors."""
    found: list[int] = []

    def search(value: object) -> None:
        if isinstance(value, dict):
            for key, inner in cast("dict[str, object]", value).items():
                if key in ("num_bits", "bits", "w_bit") and type(inner) is int and 1 <= inner <= 8:
                    found.append(inner)
                if key == "quant_method" and inner == "bitnet":
                    found.append(2)
                search(inner)

    for raw in quantisations(config):
        search(raw)
    return min(found, default=4)


def _tensors(directory: Path) -> Iterator[_Tensor]:
    """The tensors of all files, by their headers."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as opened:
                parts = ((name, opened.get_slice(name)) for name in opened.keys())
                yield from [_Tensor(name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts]
        except (SafetensorError, OSError) as error:
            raise ModelRefused(f"{file.name} is not a whole safetensors file: {error}") from error
