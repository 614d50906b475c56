"""torchao: tensors of its classes as transformers stores them in safetensors files.

A weight `X.weight` is `X._weight_qdata`, `X._weight_scale` and perhaps `X._weight_zero_point`; the file's metadata has
its class and the outputs and inputs that share a scale, as JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import torch

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.quantize.formats.integers import Integers
from kvcellar.models.quantize.formats.part import (
    EIGHT_BITS,
    SCALES,
    Part,
    Read,
    check_dimensions,
    check_scales,
    check_shape,
    dense_type,
    integer_part,
    stored_as,
)
from kvcellar.models.quantize.layouts import columns_of
from kvcellar.models.quantize.schemes import block_of
from kvcellar.models.weights_files import Stored, WeightsFiles

_CODES = {"Int8Tensor": ("I8",), "IntxUnpackedToInt8Tensor": ("I8",), "Float8Tensor": EIGHT_BITS}
_DATA = "_qdata"
_MOST_ABOUT = 1 << 16  # characters of what the metadata says about one weight


class TorchAo:
    """The format of a directory of this method: each weight says how it is stored."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        del raw  # which names a configuration of torchao; what is stored follows from the metadata of the files

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        module, _, last = name.rpartition(".")
        if not (last.startswith("_") and last.endswith(_DATA)):
            return None
        weight, start = f"{module}.{last[1:].removesuffix(_DATA)}", name.removesuffix(_DATA)
        kind, block = _about(weight, weights)
        codes = stored_as(name, weights.tensors, *_CODES[kind])
        check_dimensions(name, codes, 2)
        outputs, inputs = codes.shape
        block = block or (1, inputs)
        grid = ceil(outputs / block[0]), ceil(inputs / block[1])
        scales, zeros = f"{start}_scale", f"{start}_zero_point"
        stored = stored_as(scales, weights.tensors, *SCALES)
        check_shape(scales, stored, grid, *([(outputs,)] if grid == (outputs, 1) else []))
        has_zeros = zeros in weights.tensors
        if has_zeros:
            check_shape(zeros, stored_as(zeros, weights.tensors, "I8"), stored.shape)

        def read_as(read: Read) -> Integers:
            values, rows = read(name), torch.arange(outputs, device="cpu") // block[0]
            factors = read(scales).reshape(grid)[rows]  # [o,c]
            offsets = read(zeros).reshape(grid)[rows] if has_zeros else None
            columns = columns_of(inputs, block[1])
            return Integers((outputs, inputs), lambda some: values[some], 0, factors, offsets, columns=columns)

        uses = (name, scales, *([zeros] if has_zeros else []))
        form = f"torchao {kind}, one scale for {block[0]} x {block[1]} weights"
        dense = Stored(codes.file, (outputs, inputs), dense_type(stored))
        check = partial(check_scales, name=scales, file=codes.file)
        part = integer_part(weight, dense, uses, form, read_as, check)
        return part if codes.dtype == "I8" else replace(part, codes=None)


def _about(weight: str, weights: WeightsFiles) -> tuple[str, tuple[int, int] | None]:
    """Class and block of a weight, of the metadata of any file. Raises `ModelRefused`."""
    raw = next((found[weight] for found in weights.metadata.values() if weight in found), None)
    try:
        about = json.loads(raw) if raw is not None and len(raw) <= _MOST_ABOUT else None
    except (ValueError, RecursionError):
        about = None
    kind = about.get("_type") if isinstance(about, dict) else None
    if not isinstance(about, dict) or not isinstance(kind, str) or kind not in _CODES:
        raise ModelRefused(f"the file's metadata describes it as {shown(kind)}; read are {', '.join(_CODES)}")
    data = about.get("_data")
    block = data.get("block_size") if isinstance(data, dict) else None
    return kind, None if block is None else block_of(block)
