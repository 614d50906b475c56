"""mlx: weights as MLX stores them: codes in words, with scales and biases of groups of inputs; or small floats.

A module X has `X.weight` U32 [o,w], `X.scales` [o,c] and `X.biases` [o,c]; the weight is code * scale + bias. Files of
transformers' `metal` method have `X.qbiases` instead. Small floats (mxfp4, mxfp8, nvfp4) have scales of 8 bits and no
biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcellar.engine.models.quantize.formats.floats import Blocked, blocked_part
from kvcellar.engine.models.quantize.formats.part import (
    SCALES,
    Format,
    Integers,
    Part,
    Read,
    check_dimensions,
    check_shape,
    dense_type,
    integer_part,
    per,
    stored_as,
)
from kvcellar.engine.models.quantize.rounding import unpack
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
from kvcellar.errors import ModelRefused, shown

_FLOATS = {"mxfp4": (4, 32, None), "mxfp8": (8, 32, None), "nvfp4": (4, 16, torch.float8_e4m3fn)}
_GROUPS, _BITS = (16, 32, 64, 128), (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class _Form:
    mode: str
    bits: int
    group: int


class Mlx(Format):
    """The format of a directory with `quantization`: bits and groups, and perhaps others for some modules."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._biases = "qbiases" if raw.get("quant_method") == "metal" else "biases"
        self._form = _form(raw, _Form("affine", 4, 128 if self._biases == "qbiases" else 64), "")
        self._own = {name: _form(one, self._form, name) for name, one in raw.items() if isinstance(one, Mapping)}

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        module = name.removesuffix(".scales")
        weight = f"{module}.weight"
        if module == name or weight not in weights.tensors:
            return None
        form = self._own.get(module, self._form)
        words = stored_as(weight, weights.tensors, "U32")
        check_dimensions(weight, words, 2)
        outputs, inputs = words.shape[0], words.shape[1] * 32 // form.bits
        if words.shape[1] * 32 % form.bits or inputs % form.group:
            raise ModelRefused(f"{weight} is {list(words.shape)}, no whole groups of {form.group} of {form.bits} bits")
        shape = (outputs, inputs // form.group)
        if form.mode in _FLOATS:
            check_shape(name, stored_as(name, weights.tensors, "U8"), shape)
            number = _FLOATS[form.mode][2]
            found = Blocked(weight, name, (1, outputs, inputs), (1, form.group), form.bits, number=number)
            return blocked_part(weight, found, weights, f"MLX {form.mode}")
        biases = f"{module}.{self._biases}"
        check_shape(name, stored_as(name, weights.tensors, *SCALES), shape)
        check_shape(biases, stored_as(biases, weights.tensors, *SCALES), shape)

        def read_as(read: Read) -> Integers:
            codes, scales = read(weight).view(torch.int32), read(name)
            half, zeros = 1 << form.bits - 1, torch.zeros(1, 1, device="cpu").expand_as(scales)
            return Integers(
                (outputs, inputs), lambda block: unpack(codes[block], form.bits), half, scales, zeros, read(biases)
            )

        dense = Stored(words.file, (outputs, inputs), dense_type(weights.tensors[name]))
        about = f"MLX, {form.bits} bits, {per(form.group)}"
        return integer_part(weight, dense, (weight, name, biases), about, read_as, name, biases)


def _form(raw: Mapping[str, Any], default: _Form, name: str) -> _Form:
    mode = raw.get("mode", default.mode)
    if not isinstance(mode, str) or mode not in ("affine", *_FLOATS):
        raise ModelRefused(f"its weights are quantised by MLX as {shown(mode)}; read are affine, {', '.join(_FLOATS)}")
    bits, group = raw.get("bits", default.bits), raw.get("group_size", default.group)
    if mode in _FLOATS:
        bits, group = _FLOATS[mode][:2]
    if type(bits) is not int or bits not in _BITS or type(group) is not int or group not in _GROUPS:
        place = f" of {shown(name)}" if name else ""
        raise ModelRefused(
            f"its weights{place} are quantised by MLX to {shown(bits)} bits in groups of {shown(group)}; read are "
            f"{', '.join(map(str, _BITS))} bits in groups of {', '.join(map(str, _GROUPS))}"
        )
    return _Form(mode, bits, group)
