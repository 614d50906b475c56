"""weights_bytes: the bytes that the weights of a model directory take in memory, from its files, before anything is
loaded. Neither torch nor transformers is needed.

It is an upper bound: every tensor of every safetensors file counts, in the type that it is computed in; tensors that
are packed on a CPU while their plain form stays count twice.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvcellar.errors import ModelRefused

MOST_HEADER = 100_000_000  # bytes, the limit of safetensors itself
MOST_CONFIG = 64 << 20
MARGIN_SHARE, MARGIN = 50, 8 << 20  # a fiftieth, and some bytes: buffers, padding of packed weights
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # types of computation
_STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # floating-point types of files
_CODES = (".weight", ".weight_packed", ".qweight", "_blocks", ".embedding_quantized")  # tensors that may be packed
_WORDS = {"I32": 32, "U32": 32, "U8": 8}  # their types, and the bits of an element, which may hold several weights
MOST_METHOD = 40  # characters
_KEYS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Weights:
    """What the files of a model have: the number of parameters, and how they are stored, such as `BF16`; of quantised
    ones by the name of the method."""

    elements: int
    kind: str


def weights_of(directory: Path) -> Weights:
    """Raises `ModelRefused`."""
    config = _config(directory / "config.json")
    bits, counts = _bits(config), Counter[str]()
    for file in sorted(directory.glob("*.safetensors")):
        for one in _tensors(file):
            counts[one.dtype] += _elements(one, bits)
    kind = counts.most_common(1)[0][0] if counts else ""
    return Weights(counts.total(), _method(config) or kind)


def _method(config: Mapping[str, Any]) -> str:
    """How weights were quantised; empty: they were not, or it does not say how."""
    for part in _parts(config):
        for key in _KEYS:
            found = part.get(key)
            if isinstance(found, dict) and isinstance(name := cast("dict[str, Any]", found).get("quant_method"), str):
                return name[:MOST_METHOD].upper()
    return ""


def _parts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The config, and that of the text model in it."""
    text = config.get("text_config")
    return (config, cast("Mapping[str, Any]", text)) if isinstance(text, dict) else (config,)


def _elements(tensor: "_Tensor", bits: int) -> int:
    """Weights of a tensor, if packed ones have so many bits."""
    word = _WORDS.get(tensor.dtype) if tensor.name.endswith(_CODES) else None
    return tensor.elements if word is None else tensor.elements * word // bits


def bytes_in_memory(directory: Path, *, dtype: str = "auto") -> int:
    """Raises `ModelRefused` for files that are damaged or missing."""
    tensors = [one for file in sorted(directory.glob("*.safetensors")) for one in _tensors(file)]
    if not tensors:
        raise ModelRefused(f"{directory.name} has no safetensors files")
    config = _config(directory / "config.json")
    width = _width(config, tensors, dtype)
    bits = _bits(config)
    elements = sum(_elements(one, bits) for one in tensors)
    # an embedding that is the output layer too is packed for that, and plain for lookups
    elements += max((_elements(one, bits) for one in tensors if len(one.shape) == 2), default=0)
    size = width * elements
    return size + size // MARGIN_SHARE + MARGIN


def adapter_bytes(size: int) -> int:
    """Bytes in memory of an adapter whose file has `size`: on a CPU, 16-bit elements become float32."""
    return 2 * size


def _width(config: Mapping[str, Any], tensors: list[_Tensor], dtype: str) -> int:
    """Bytes of an element in the type of computation."""
    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    for part in _parts(config):
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

    for part in _parts(config):
        for key in _KEYS:
            search(part.get(key))
    return min(found, default=4)


def _config(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > MOST_CONFIG:
            raise ModelRefused(f"{file.name} has more than {MOST_CONFIG} bytes")
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{file.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelRefused(f"{file.name} is not a JSON object")
    return cast("dict[str, Any]", found)


def _tensors(file: Path) -> Iterator[_Tensor]:
    """The tensors of a file, by its header."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(MOST_HEADER, file.stat().st_size - 8):
                raise ModelRefused(f"{file.name} is not a whole safetensors file: its header has {length} bytes")
            header = json.loads(opened.read(length))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(about["shape"])
            if not all(type(size) is int and 0 <= size < 2**48 for size in shape):
                raise ValueError(f"the shape of {name}")
            yield _Tensor(name, str(about["dtype"]), shape)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelRefused(f"{file.name} is not a whole safetensors file: {error}") from error
