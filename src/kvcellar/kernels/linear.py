"""linear: linear layers of our own on CPUs, in bfloat16 or float32, over weights in panels (`linear.cpp`).

Always true: the bits of a row of outputs depend only on that row and on the weights: not on other rows, on their
number, on layers that are computed in the same call (`merged`), or on threads.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kvcellar.kernels.arena import LINE, Arena
from kvcellar.kernels.compiled import SOURCES, check_shared, library
from kvcellar.kernels.native import Native, address_of
from kvcellar.kernels.threads import Threads

SOURCE = SOURCES / "linear.cpp"
PANEL = 64  # outputs; the kernel's
TYPES = {torch.bfloat16: 0, torch.float32: 1}
PER_THREAD = 1 << 19  # products that are worth another thread
PAIRS, WIDENED, FOREIGN = range(3)  # how the kernel multiplies bfloat16: `kvcellar_multiplies`


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int64) for name in ("out", "column")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "threads")),
        *((name, ctypes.c_int64) for name in ("n_parts", "in", "type")),
    )


class _Call(ctypes.Structure):
    """`Call` in the kernel, field by field: `check_shared` compares them at load."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layer", "x", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "x_row", "y_row", "threads")),
    )


CALL_BYTES = ctypes.sizeof(_Call)


class Kernel:
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        self._library = library(SOURCE, environment)
        constants = {"BFLOAT16": TYPES[torch.bfloat16], "FLOAT32": TYPES[torch.float32]}
        sizes = {"PART": ctypes.sizeof(_Part), "LAYER": ctypes.sizeof(_Layer)}
        check_shared(self._library, _Call, PANEL=PANEL, **constants, **sizes)
        self.threads = Threads(environment).address
        self.run = self._library.kvcellar_linear
        self.run.argtypes, self.run.restype = [ctypes.c_void_p], ctypes.c_int
        self._pack = self._library.kvcellar_pack
        self._pack.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]
        self._pack.restype = None
        self.multiplies: int = self._library.kvcellar_multiplies()

    def pack(self, weight: Tensor, panels: Tensor) -> None:
        """Write a weight [out,in] into `panels`."""
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        self._pack(
            weight.data_ptr(), panels.data_ptr(), *weight.shape, weight.stride(0), TYPES[weight.dtype],
            self.threads, torch.get_num_threads(),
        )  # fmt: skip


def panel_elements(out: int, inner: int, dtype: torch.dtype) -> int:
    """Elements of the panels of a weight [out,inner]."""
    return -(-out // PANEL) * PANEL * _stored(inner, dtype)


def panel_bytes(weight: Tensor) -> int:
    """Bytes that the panels of a weight take in an `Arena`."""
    out, inner = weight.shape
    size = panel_elements(out, inner, weight.dtype) * weight.itemsize
    return -(-size // LINE) * LINE


def _stored(inner: int, dtype: torch.dtype) -> int:
    """Inputs in a panel: bfloat16 is stored in pairs."""
    return inner + inner % 2 if dtype is torch.bfloat16 else inner


class _Weights:
    """The panels of one layer, and its bias."""

    def __init__(self, panels: Tensor, bias: Tensor | None, out: int) -> None:
        self.panels, self.bias, self.out = panels, bias, out
        self.wide = None if bias is None else bias.float().contiguous()


class PanelLinear(nn.Module):
    """Replaces one `nn.Linear`, or several with the same input. It has no parameters."""

    def __init__(self, kernel: Kernel, parts: Sequence[_Weights], inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._kernel, self._parts, self.dtype = kernel, tuple(parts), dtype
        self.in_features, self.out_features = inner, sum(part.out for part in parts)
        column, fields = 0, []
        for part in parts:
            wide = None if part.wide is None else part.wide.data_ptr()
            fields.append(_Part(part.panels.data_ptr(), wide, part.out, column))
            column += part.out
        self._fields = (_Part * len(fields))(*fields)
        self._layer = _Layer(ctypes.addressof(self._fields), kernel.threads, len(fields), inner, TYPES[dtype])

    @property
    def address(self) -> int:
        """Where the kernel's description of the layer is, as long as the layer lives."""
        return ctypes.addressof(self._layer)

    @property
    def weight(self) -> Tensor:
        """A plain copy [out,in], made at each access, for code that reads weights instead of calling layers."""
        return torch.cat([self._plain(part) for part in self._parts])

    @property
    def bias(self) -> Tensor | None:
        biases = [part.bias for part in self._parts]
        if len(biases) == 1 or all(bias is None for bias in biases):
            return biases[0]
        zeros = (torch.zeros(part.out, dtype=self.dtype, device="cpu") for part in self._parts)
        return torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])

    def _plain(self, part: _Weights) -> Tensor:
        per = 2 if self.dtype is torch.bfloat16 else 1  # inputs beside each other
        inner = _stored(self.in_features, self.dtype)
        panels = part.panels.view(-1, inner // per, PANEL, per).transpose(1, 2).reshape(-1, inner)
        return panels[: part.out, : self.in_features].clone()

    def forward(self, x: Tensor) -> Tensor:
        """x [...,in] -> [...,out]. Raises for other types and sizes, as a plain layer does."""
        if x.dtype is not self.dtype or x.shape[-1] != self.in_features or x.device.type != "cpu":
            raise RuntimeError(
                f"a layer of {self.in_features} inputs in {self.dtype} on the CPU got {tuple(x.shape)} in {x.dtype} "
                f"on {x.device}"
            )
        rows = x.reshape(-1, self.in_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        if len(rows) and self._kernel.run(ctypes.byref(self._call(rows, out.view(-1, self.out_features)))):
            raise MemoryError("there is not enough memory for a linear layer")
        return out

    def native(self, x: Tensor, out: Tensor) -> Native:
        """The call that fills out [T,out] from x [T,in], both at fixed addresses, with elements of a row beside each
        other."""
        assert x.dtype is out.dtype is self.dtype
        assert (*x.shape, *out.shape) == (len(x), self.in_features, len(x), self.out_features)
        return Native(address_of(self._kernel.run), self._call(x, out), (self, x, out))

    def _call(self, rows: Tensor, out: Tensor) -> _Call:
        """rows [n,in], out [n,out]."""
        n = len(rows)
        threads = threads_for(self.in_features, self.out_features, n)
        layer, strides = ctypes.addressof(self._layer), (rows.stride(0), out.stride(0))
        return _Call(layer, rows.data_ptr(), out.data_ptr(), n, *strides, threads)


def threads_for(inner: int, out: int, rows: int) -> int:
    """Threads that so many rows of a weight [out,inner] are worth."""
    return min(torch.get_num_threads(), 1 + inner * out * (rows + 8) // (8 * PER_THREAD))


def panel_linear(kernel: Kernel, arena: Arena, weight: Tensor, bias: Tensor | None) -> PanelLinear:
    """A layer with a copy of a plain weight [out,in], which is in bfloat16 or float32 on the CPU, in an arena."""
    out, inner = weight.shape
    panels = arena.tensor(panel_elements(out, inner, weight.dtype), weight.dtype)
    kernel.pack(weight, panels)
    return PanelLinear(kernel, [_Weights(panels, bias, out)], inner, weight.dtype)


def merged(layers: Sequence[PanelLinear]) -> PanelLinear:
    """One layer that computes several with the same input, outputs side by side. It shares their weights."""
    first = layers[0]
    assert all((one.in_features, one.dtype) == (first.in_features, first.dtype) for one in layers)
    return PanelLinear(first._kernel, [part for one in layers for part in one._parts], first.in_features, first.dtype)
