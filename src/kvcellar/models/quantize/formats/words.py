"""words: weights in words of 32 bits, as GPTQ and AWQ pack them, and AutoRound, which writes either.

GPTQ packs along inputs: `X.qweight` I32 [w,o], `X.qzeros` I32 [G,z], `X.scales` [G,o], and perhaps `X.g_idx` [i], the
group of each input. AWQ packs along outputs, eight in a word, in an order of its own: `X.qweight` I32 [i,o/8],
`X.qzeros` I32 [G,o/8], `X.scales` [G,o].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused, shown
from kvcellar.models.quantize.formats.integers import Integers
from kvcellar.models.quantize.formats.part import (
    SCALES,
    Part,
    Read,
    check_dimensions,
    check_indices,
    check_scales,
    check_shape,
    dense_type,
    integer_part,
    per,
    stored_as,
)
from kvcellar.models.quantize.layouts import columns_of, unpack
from kvcellar.models.weights_files import Stored, WeightsFiles

_BITS = (2, 3, 4, 8)
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in AWQ's words of each of eight outputs
_PACKINGS = {  # of AutoRound
    "auto_round:auto_gptq": False,
    "auto_gptq": False,
    "auto_round:auto_awq": True,
    "auto_awq": True,
}


def auto_round(raw: Mapping[str, Any]) -> "Gptq | Awq":
    """The format of a directory by AutoRound. Raises `ModelRefused`."""
    packing = raw.get("packing_format", "auto_round:auto_gptq")
    if raw.get("data_type", "int") != "int" or not isinstance(packing, str) or packing not in _PACKINGS:
        raise ModelRefused(
            f"its weights are quantised by AutoRound, as {shown(packing)} of type {shown(raw.get('data_type'))}; read "
            f"are integers (int) as {', '.join(_PACKINGS)}"
        )
    return (Awq if _PACKINGS[packing] else Gptq)(raw)


@dataclass(frozen=True, slots=True)
class _Sizes:
    outputs: int
    inputs: int
    groups: int
    group: int | None
    bits: int


class Gptq:
    """Integers of 2, 3, 4 or 8 bits. Files of version 1 store each zero point less 1."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        version = raw.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2") or raw.get("is_marlin_format"):
            raise ModelRefused(f"its weights are quantised by GPTQ, as {shown(version)}; read are gptq and gptq_v2")
        self._offset = 0 if version == "gptq_v2" else 1
        self._bits, self._group = _bits(raw, _BITS), _group(raw)
        self._mixed = bool(raw.get("dynamic") or raw.get("extra_config"))
        self._ordered = raw.get("desc_act") is True and self._group is not None

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        if not name.endswith(".qweight"):
            return None
        module, tensors = name.removesuffix(".qweight"), weights.tensors
        words = stored_as(name, tensors, "I32")
        check_dimensions(name, words, 2)
        scales, zeros = (f"{module}.{suffix}" for suffix in ("scales", "qzeros"))
        stored = stored_as(scales, tensors, *SCALES)
        check_dimensions(scales, stored, 2)
        sizes = self._sizes(name, words, stored, stored_as(zeros, tensors, "I32"))
        outputs, inputs = sizes.outputs, sizes.inputs
        check_shape(scales, stored, (sizes.groups, outputs))
        check_shape(zeros, tensors[zeros], (sizes.groups, ceil(outputs * sizes.bits / 32)))
        order = f"{module}.g_idx" if f"{module}.g_idx" in tensors or self._ordered else None
        if order is not None:
            check_shape(order, stored_as(order, tensors, "I32", "I64"), (inputs,))

        def check(read: Read) -> None:
            check_scales(read, scales, words.file)
            if order is not None:
                check_indices(read, order, words.file, sizes.groups)

        uses = tuple(filter(None, (name, scales, zeros, order)))
        form = f"GPTQ, {sizes.bits} bits, {per(sizes.group)}"
        dense = Stored(words.file, (outputs, inputs), dense_type(stored))
        read_as = partial(self._read, module, sizes, order)
        return integer_part(f"{module}.weight", dense, uses, form, read_as, check)

    def _sizes(self, name: str, words: Stored, scales: Stored, zeros: Stored) -> _Sizes:
        """Bits and groups are the config's, or with different ones for some modules, those that the shapes mean."""
        groups, outputs = scales.shape
        bits, group = self._bits, self._group
        if self._mixed and len(zeros.shape) == 2:
            bits = zeros.shape[1] * 32 // outputs
            if bits not in _BITS:
                raise ModelRefused(f"its zero points are {list(zeros.shape)} for {outputs} outputs")
        if words.shape[0] * 32 % bits:
            raise ModelRefused(f"{name} is {list(words.shape)}, which integers of {bits} bits do not fill")
        inputs = words.shape[0] * 32 // bits
        if self._mixed:
            group = None if groups == 1 else ceil(inputs / groups)
        return _Sizes(outputs, inputs, 1 if group is None else ceil(inputs / group), group, bits)

    def _read(self, module: str, sizes: _Sizes, order: str | None, read: Read) -> Integers:
        words = read(f"{module}.qweight")
        scales = read(f"{module}.scales").T  # [o,G]
        zeros = unpack(read(f"{module}.qzeros"), sizes.bits)[:, : sizes.outputs].T + self._offset
        columns = columns_of(sizes.inputs, sizes.group) if order is None else read(order).to(torch.int64)

        def stored(block: slice) -> Tensor:
            return unpack(words[:, block].T.contiguous(), sizes.bits)

        shape = (sizes.outputs, sizes.inputs)
        return Integers(shape, stored, 1 << sizes.bits - 1, scales, zeros, columns=columns)


class Awq:
    """Integers of 4 bits with zero points, as `gemm` kernels read them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        version = raw.get("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise ModelRefused(f"its weights are quantised by AWQ, as {shown(version)}; read is gemm")
        _bits(raw, (4,))
        self._group = _group(raw)

    def part(self, name: str, weights: WeightsFiles) -> Part | None:
        if not name.endswith(".qweight"):
            return None
        module, tensors = name.removesuffix(".qweight"), weights.tensors
        words = stored_as(name, tensors, "I32")
        check_dimensions(name, words, 2)
        inputs, outputs = words.shape[0], 8 * words.shape[1]
        groups = 1 if self._group is None else ceil(inputs / self._group)
        scales, zeros = (f"{module}.{suffix}" for suffix in ("scales", "qzeros"))
        stored = stored_as(scales, tensors, *SCALES)
        check_shape(scales, stored, (groups, outputs))
        check_shape(zeros, stored_as(zeros, tensors, "I32"), (groups, words.shape[1]))
        form = f"AWQ, 4 bits, {per(self._group)}"
        dense = Stored(words.file, (outputs, inputs), dense_type(stored))
        check = partial(check_scales, name=scales, file=words.file)
        read_as = partial(self._read, module, (outputs, inputs))
        return integer_part(f"{module}.weight", dense, (name, scales, zeros), form, read_as, check, step=8)

    def _read(self, module: str, shape: tuple[int, int], read: Read) -> Integers:
        words, columns = read(f"{module}.qweight"), columns_of(shape[1], self._group)
        scales = read(f"{module}.scales").T  # [o,G]
        zeros = _outputs(read(f"{module}.qzeros")).T

        def stored(block: slice) -> Tensor:
            return _outputs(words[:, block.start // 8 : block.stop // 8]).T

        return Integers(shape, stored, 8, scales, zeros, columns=columns, step=8)


def _outputs(words: Tensor) -> Tensor:
    """AWQ's words [r,o/8] -> codes [r,o] in the order of outputs."""
    return unpack(words, 4).unflatten(1, (-1, 8))[..., _ORDER].flatten(1)


def _bits(raw: Mapping[str, Any], known: tuple[int, ...]) -> int:
    found = raw.get("bits", raw.get("w_bit"))
    if isinstance(found, bool) or not isinstance(found, int) or found not in known:
        raise ModelRefused(
            f"its weights are quantised ({raw.get('quant_method')}) to {shown(found)} bits; read are "
            f"{', '.join(map(str, known))}"
        )
    return found


def _group(raw: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale; None is all of them."""
    found = raw.get("group_size", raw.get("q_group_size"))
    if isinstance(found, bool) or not isinstance(found, int) or (found != -1 and not 0 < found <= 1 << 20):
        raise ModelRefused(f"its weights are quantised in groups of {shown(found)} inputs; -1 or a size is needed")
    return None if found == -1 else found
