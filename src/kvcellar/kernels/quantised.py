"""quantised: linear layers that multiply weights of 8 and 4 bits as integers (`quantised.cpp`), from their `Codes`.

The inputs of a row are rounded to 8 bits in blocks of 32 (16 where scales are for 16), each with its own scale; sums
within a block are exact. So outputs differ from those of the dense weights by the rounding of inputs, and a row's bits
depend only on the row: not on other rows, threads, or the CPU. `ARITHMETIC` is raised when that changes.
"""

import ctypes
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kvcellar.kernels.arena import LINE, Arena
from kvcellar.kernels.codes import INT4, Codes
from kvcellar.kernels.compiled import SOURCES, check_shared, library
from kvcellar.kernels.native import Native, address_of
from kvcellar.kernels.threads import Threads

SOURCE = SOURCES / "quantised.cpp"
ARITHMETIC = 1
PANEL = 32  # outputs whose codes are side by side; inputs are padded to as many
LEAST_GROUP = 16  # inputs that share a scale, unless all do
_HALF = 128  # added to bytes, so that they have no sign

_TENSORS = ("x", "y", "bias", "w", "scales", "mins", "table", "order")
_SIZES = ("rows", "in", "out", "x_stride", "y_stride", "bits", "step", "group", "wide_scales", "wide")


class _Call(ctypes.Structure):
    """`Call` in the kernel, field by field: `check_shared` compares them at load."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("threads", ctypes.c_void_p),
        ("at_most", ctypes.c_int64),
    )


class Kernel:
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        found = library(SOURCE, environment)
        check_shared(found, _Call, PANEL=PANEL)
        self.function = found.kvcellar_quantised
        self.function.argtypes, self.function.restype = [ctypes.c_void_p], ctypes.c_int
        self.threads = Threads(environment).address


def unfit(codes: Codes) -> str | None:
    """Why the kernel does not take these codes; None if it does."""
    if codes.scales.shape[1] > 1 and codes.group % LEAST_GROUP:
        return f"a scale is for {codes.group} inputs, which is not a multiple of {LEAST_GROUP}"
    return None


class QuantisedLinear(nn.Module):
    """Replaces one `nn.Linear`. It has no parameters; inputs and outputs have the dtype of the layer it replaces."""

    def __init__(
        self, by: Kernel, codes: Codes, bias: Tensor | None, dtype: torch.dtype, arena: Arena | None = None
    ) -> None:
        """The codes are copied into the order of the kernel, into an arena if there is one; `unfit(codes)` is None."""
        super().__init__()
        self._by, self.dtype = by, dtype
        self.out_features, self.in_features = codes.values.shape
        self.bits = 8 if codes.table is None else 4
        self._group = codes.group if codes.scales.shape[1] > 1 else _padded(self.in_features)
        self._step = LEAST_GROUP if self._group % PANEL else PANEL
        self._table = codes.table
        self._panels = _kept(_panels(codes), arena)
        narrow = all(_is_bfloat16(one) for one in (codes.scales, codes.mins) if one is not None)
        kind = torch.bfloat16 if narrow else torch.float32
        groups = math.ceil(_padded(self.in_features) / self._group)
        self._scales = _kept(_by_panel(codes.scales, groups, kind), arena)
        self._mins = None if codes.mins is None else _kept(_by_panel(codes.mins, groups, kind), arena)
        self._bytes_of_table = None
        if codes.table not in (None, INT4):
            self._bytes_of_table = torch.tensor([one + _HALF for one in codes.table], dtype=torch.uint8, device="cpu")
        self._order = None if codes.order is None else codes.order.to(torch.int32).contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and what belongs to them."""
        parts = (self._panels, self._scales, self._mins, self._order, self._bias)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def weight(self) -> Tensor:
        """A dense copy [out,in], made at each access, for code that reads weights instead of calling layers."""
        return self.codes().dense().to(self.dtype)

    def codes(self) -> Codes:
        """A copy of the codes, in the usual order."""
        values = _from_panels(self._panels, self.bits)[: self.out_features, : self.in_features].contiguous()
        count = 1 if self._group >= self.in_features else self.in_features // self._group
        scales, mins = (
            None if part is None else part.transpose(1, 2).flatten(0, 1)[: self.out_features, :count]
            for part in (self._scales, self._mins)
        )
        assert scales is not None
        order = None if self._order is None else self._order.long()
        return Codes(values, self._table, scales, mins, order)

    def forward(self, x: Tensor) -> Tensor:
        """x [...,in] -> [...,out]. Raises for other types than `dtype`, as a plain layer does."""
        if x.dtype is not self.dtype:
            name = str(self.dtype).removeprefix("torch.")
            raise RuntimeError(f"a layer of {name} needs inputs of {name}, not {x.dtype}")
        rows = x.detach().reshape(-1, self.in_features)
        rows = rows.float() if x.dtype not in (torch.bfloat16, torch.float32) else rows
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        call = self._call(rows, out)
        if self._by.function(ctypes.addressof(call)):
            raise MemoryError(f"no memory to round {len(rows)} rows of {self.in_features} inputs")
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def native(self, x: Tensor, out: Tensor) -> Native:
        """The same for x [T,in] and out [T,out], of one type (bfloat16 or float32), that stay at their addresses. The
        last stride of both is 1; rows may be further apart."""
        assert x.dtype is out.dtype and x.dtype in (torch.bfloat16, torch.float32)
        return Native(address_of(self._by.function), self._call(x, out), (x, out, self))

    def _call(self, x: Tensor, out: Tensor) -> _Call:
        assert x.stride(1) == 1 == out.stride(1)
        tensors = (x, out, self._bias, self._panels, self._scales, self._mins, self._bytes_of_table, self._order)
        sizes = (len(x), self.in_features, self.out_features, x.stride(0), out.stride(0))
        kinds = (self.bits, self._step, self._group, self._scales.dtype is torch.float32, x.dtype is torch.float32)
        addresses = (None if one is None else one.data_ptr() for one in tensors)
        return _Call(*addresses, *sizes, *kinds, self._by.threads, torch.get_num_threads())


def most_bytes(outputs: int, inputs: int) -> int:
    """Bytes of an arena that the codes of a layer take at most."""
    return _padded(outputs) * _padded(inputs) * 3 // 2 + 3 * LINE  # scales and minima are for 16 inputs or more


def _kept(values: Tensor, arena: Arena | None) -> Tensor:
    """The same values side by side, in an arena if there is one."""
    if arena is None:
        return values.contiguous()
    return arena.tensor(values.numel(), values.dtype).view(values.shape).copy_(values)


def _padded(size: int) -> int:
    return math.ceil(size / PANEL) * PANEL


def _is_bfloat16(values: Tensor) -> bool:
    """Whether bfloat16 holds these values exactly."""
    return values.dtype is torch.bfloat16 or bool((values.float() == values.to(torch.bfloat16).float()).all())


def _panels(codes: Codes) -> Tensor:
    """U8 [panels, in / (4 or 8), 32, 4], as documented in the kernel."""
    outputs, inputs = codes.values.shape
    values = codes.values.view(torch.uint8)
    if outputs % PANEL or inputs % PANEL:
        padded = values.new_zeros(_padded(outputs), _padded(inputs))
        padded[:outputs, :inputs] = values
        values = padded
    if codes.table is None:
        return (values ^ _HALF).view(-1, PANEL, values.shape[1] // 4, 4).transpose(1, 2)
    halves = values.view(-1, PANEL, values.shape[1] // 8, 2, 4)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2)


def _from_panels(panels: Tensor, bits: int) -> Tensor:
    """The values of codes, padded."""
    rows = panels.transpose(1, 2)  # [panels,32,in/...,4]
    if bits == 8:
        return (rows ^ _HALF).flatten(2).flatten(0, 1).view(torch.int8)
    return torch.stack((rows & 15, rows >> 4), -2).flatten(2).flatten(0, 1)


def _by_panel(scales: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[out,c] -> [panels,groups,32]; what is padded is 0."""
    padded = torch.zeros(_padded(len(scales)), groups, dtype=dtype, device="cpu")
    padded[: len(scales), : scales.shape[1]] = scales
    return padded.view(-1, PANEL, groups).transpose(1, 2)
