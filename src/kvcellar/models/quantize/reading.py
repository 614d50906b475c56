"""reading: the quantised tensors of weights files, as the dense tensors that they stand for.

A module X stored in integers has `X.weight` (I8) or `X.weight_packed` (I32), `X.weight_scale`, and perhaps
`X.weight_zero_point`, `X.weight_g_idx` and `X.weight_shape`. `decoded` shows these as one tensor `X.weight`, which is
computed in float32 when it is read, so that rounding it to bfloat16 gives what compressed-tensors computes.

Always true: shapes and scales were checked before a tensor is shown; `X.weight_shape` is not read, the shape follows
from what is stored, and is compared with that of the network like any other.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvcellar.errors import ModelRefused
from kvcellar.models.config_file import read_object
from kvcellar.models.quantize.layouts import decode, row_blocks, unpack
from kvcellar.models.quantize.schemes import INTS, PACKED, READABLE, Quantisation, Scheme, quantisation_of
from kvcellar.models.weights_files import Stored, WeightsFiles

_SCALE, _ZERO, _ORDER, _SHAPE = ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
_ACTIVATIONS = tuple(f".{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point"))
_SCALES = ("BF16", "F16", "F32")
_LARGEST = 2.0**16  # of a scale; weights of real models are far below


def decoded(weights: WeightsFiles) -> WeightsFiles:
    """The same files if their config does not describe quantised weights; else with dense tensors in place of those
    that are stored as integers. Raises `ModelRefused`.

    Decoding reads the files, so it works until they are closed.
    """
    if not (weights.path / "config.json").is_file():
        return weights
    quantisation = quantisation_of(read_object(weights.path / "config.json"))
    if quantisation is None:
        return weights
    modules = [name.removesuffix(_SCALE) for name in weights.tensors if name.endswith(_SCALE)]
    parts = {f"{module}.weight": _module(module, weights, quantisation) for module in modules}
    used = {name for module in modules for name in _names(module)}
    unused = tuple(name for name in weights.tensors if name.endswith(_ACTIVATIONS) and name not in used)
    plain = {name: stored for name, stored in weights.tensors.items() if name not in used and name not in unused}
    tensors = {name: part.stored for name, part in parts.items()}
    slices = _Slices(weights.slices, tuple(plain), MappingProxyType(parts))
    return replace(weights, tensors=plain | tensors, slices=slices, unused=unused)


def _names(module: str) -> tuple[str, ...]:
    suffixes = (".weight", ".weight_packed", _SCALE, _ZERO, _ORDER, _SHAPE)
    return tuple(f"{module}{suffix}" for suffix in suffixes)


@dataclass(frozen=True, slots=True)
class _Slices(Mapping[str, Any]):
    """Lazy slices by name: of stored tensors, and of those that are decoded."""

    plain: Mapping[str, Any]
    names: tuple[str, ...]  # of those in `plain` that are shown
    parts: Mapping[str, "Part"]

    def __getitem__(self, name: str) -> Any:
        return self.parts[name].of(self.plain) if name in self.parts else self.plain[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.names
        yield from self.parts

    def __len__(self) -> int:
        return len(self.names) + len(self.parts)


@dataclass(frozen=True, slots=True)
class Part:
    """One weight that is stored as integers. `stored` is the dense tensor that it stands for."""

    module: str
    scheme: Scheme
    stored: Stored
    zeros: bool
    ordered: bool  # the scale of an input is that of X.weight_g_idx

    def of(self, slices: Mapping[str, Any]) -> "Decoded":
        return Decoded(self, slices)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decodes one weight when it is indexed."""

    part: Part
    slices: Mapping[str, Any]

    def __getitem__(self, index: Any) -> Tensor:
        part, (rows, inputs) = self.part, self.part.stored.shape
        packed = part.scheme.format == PACKED
        codes: Tensor = self._read(".weight_packed" if packed else ".weight")
        scales, zeros = _rows(self._read(_SCALE)), self._zeros() if part.zeros else None
        columns = self._read(_ORDER).to(torch.int64) if part.ordered else None
        values = torch.empty(rows, inputs)
        for block in row_blocks(rows, inputs):
            some = codes[block]
            if packed:
                some = unpack(some, part.scheme.bits)
                if zeros is None:
                    some -= 1 << part.scheme.bits - 1
            own = scales[block] if len(scales) > 1 else scales
            values[block] = decode(some, own, None if zeros is None else zeros[block], columns)
        return values[index]

    def _read(self, suffix: str) -> Tensor:
        return self.slices[f"{self.part.module}{suffix}"][...]

    def _zeros(self) -> Tensor:
        """Zero points [o,c], unsigned as the codes of the same layout."""
        zeros = self._read(_ZERO)
        if self.part.scheme.format == INTS:
            return _rows(zeros).expand(self.part.stored.shape[0], -1)
        return unpack(zeros.T.contiguous(), self.part.scheme.bits).T[: self.part.stored.shape[0]]


def _rows(scales: Tensor) -> Tensor:
    """[] or [1] -> [1,1]; [o] -> [o,1]; others as they are."""
    return scales.reshape(-1, 1) if scales.dim() < 2 else scales


# -- checks ------------------------------------------------------------------------------------------------------------


def _module(module: str, weights: WeightsFiles, quantisation: Quantisation) -> Part:
    """The part of a module, of the only scheme that what is stored can be, or of the one that config.json names."""
    tensors = weights.tensors
    fitting: dict[Scheme, Part] = {}
    refused: dict[Scheme, str] = {}
    for scheme in quantisation.schemes:
        try:
            fitting[scheme] = _part(module, scheme, tensors)
        except ModelRefused as error:
            refused[scheme] = str(error)
    scheme = next(iter(fitting)) if len(fitting) == 1 else quantisation.targeting(module) if fitting else None
    if scheme not in fitting:
        reasons = "; ".join(f"{scheme}: {why}" for scheme, why in refused.items()) or "no config group names it"
        raise ModelRefused(f"{module} is stored quantised, but not as config.json describes it. {reasons}. {READABLE}")
    part = fitting[scheme]
    _check_values(part, weights)
    return part


def _part(module: str, scheme: Scheme, tensors: Mapping[str, Stored]) -> Part:
    """Raises `ModelRefused` if what is stored of the module does not have the types and shapes of the scheme."""
    packed = scheme.format == PACKED
    codes = _tensor(module, ".weight_packed" if packed else ".weight", tensors, ("I32",) if packed else ("I8",))
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise ModelRefused(f"its codes are {list(codes.shape)}; two dimensions are needed")
    outputs, inputs = codes.shape[0], codes.shape[1] * (32 // scheme.bits if packed else 1)
    scales = _tensor(module, _SCALE, tensors, _SCALES)
    ordered = scheme.group is not None and f"{module}{_ORDER}" in tensors
    count = 1 if scheme.group is None else math.ceil(inputs / scheme.group)
    if scheme.group is not None and inputs % scheme.group:
        raise ModelRefused(f"its {inputs} inputs are not a multiple of {scheme.group}")
    if not _fits(scales.shape, outputs, count):
        raise ModelRefused(f"its scales are {list(scales.shape)} for {outputs} outputs of {count} scales each")
    if not scheme.symmetric:
        zeros = _tensor(module, _ZERO, tensors, ("I32",) if packed else ("I8",)).shape
        expected = (math.ceil(outputs * scheme.bits / 32), count)
        if zeros != expected if packed else not _fits(zeros, outputs, count):
            raise ModelRefused(f"its zero points are {list(zeros)} for {outputs} outputs of {count} each")
    if ordered and _tensor(module, _ORDER, tensors, ("I32", "I64")).shape != (inputs,):
        raise ModelRefused(f"its group indices are not one for each of {inputs} inputs")
    dense = Stored(codes.file, (outputs, inputs), scales.dtype)
    return Part(module, scheme, dense, zeros=not scheme.symmetric, ordered=ordered)


def _tensor(module: str, suffix: str, tensors: Mapping[str, Stored], types: tuple[str, ...]) -> Stored:
    stored = tensors.get(f"{module}{suffix}")
    if stored is None:
        raise ModelRefused(f"there is no {module}{suffix}")
    if stored.dtype not in types:
        raise ModelRefused(f"{module}{suffix} is {stored.dtype}, not {' or '.join(types)}")
    return stored


def _fits(shape: tuple[int, ...], outputs: int, count: int) -> bool:
    """Whether these are `count` scales for each output, or one for all."""
    if count > 1:
        return shape == (outputs, count)
    return shape in ((outputs, 1), (outputs,), (1, 1), (1,), ())


def _check_values(part: Part, weights: WeightsFiles) -> None:
    """Raise `ModelRefused` for scales that no weights have, and for indices out of range."""
    file, name = part.stored.file, f"{part.module}{_SCALE}"
    scales = weights.slices[name][...]
    largest = float(scales.float().abs().max())  # NaN if any is
    if not largest <= _LARGEST:
        raise ModelRefused(
            f"{file}: {name} has a scale of {largest}; at most {_LARGEST:.0f} is allowed. The file is damaged"
        )
    if part.ordered:
        order = weights.slices[f"{part.module}{_ORDER}"][...]
        low, high = int(order.min()), int(order.max())
        if low < 0 or high >= _rows(scales).shape[1]:
            raise ModelRefused(
                f"{file}: {part.module}{_ORDER} has indices from {low} to {high}; there are {_rows(scales).shape[1]} "
                f"groups. The file is damaged"
            )
