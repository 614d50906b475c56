"""heads: a linear layer for each head, on CPUs (`heads.cpp`), of layers of ours (`layers.py`).

Always true: the bits of a row of results depend only on that row of inputs: not on other rows, nor on threads.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kvcellar.kernels.arena import Arena
from kvcellar.kernels.compiled import SOURCES, Kernel, Native, address_of
from kvcellar.kernels.layers import OwnLinear, PanelKernel, panel_bytes, panel_linear, threads_for
from kvcellar.kernels.structures import structure

SOURCE = SOURCES / "heads.cpp"


_Call = structure(SOURCE, "Call")


class HeadsKernel(Kernel):
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        super().__init__(SOURCE, "kvcellar_heads", environment)
        self.linear = PanelKernel(environment)


class OwnHeads(nn.Module):
    """A layer for each head. It has no parameters."""

    def __init__(self, kernel: HeadsKernel, layers: Sequence[OwnLinear], tail: int) -> None:
        """`layers` has one for each head, all of one shape. `tail`: elements of a head behind its inputs that are
        copied behind its results."""
        super().__init__()
        first = layers[0]
        assert all((one.in_features, one.out_features) == (first.in_features, first.out_features) for one in layers)
        self._kernel, self._layers, self.tail, self.dtype = kernel, tuple(layers), tail, first.dtype
        self.computed = first.computed
        self.in_features, self.out_features = first.in_features + tail, first.out_features + tail
        self._addresses = (ctypes.c_void_p * len(layers))(*(one.address for one in layers))

    def forward(self, x: Tensor) -> Tensor:
        """x [...,H,in] -> [...,H,out]. Raises for other types and sizes."""
        shape = (len(self._layers), self.in_features)
        if x.dtype is not self.dtype or tuple(x.shape[-2:]) != shape or x.device.type != "cpu":
            raise RuntimeError(
                f"{shape[0]} heads of {shape[1]} inputs in {self.dtype} on the CPU got {tuple(x.shape)} in {x.dtype} "
                f"on {x.device}"
            )
        rows = x.reshape(-1, *shape)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(*rows.shape[:2], self.out_features)
        if len(rows) and self._kernel.run(ctypes.byref(self._call(rows, out))):
            raise MemoryError(f"there is not enough memory for {len(rows)} rows of a layer of heads")
        return out.view(*x.shape[:-1], self.out_features)

    def native(self, x: Tensor, out: Tensor) -> Native:
        """The call that fills out [T,H,out] from x [T,H,in], both at fixed addresses, the elements of a head beside
        each other."""
        assert x.dtype is out.dtype is self.computed
        assert x.stride(2) == 1 == out.stride(2)
        return Native(address_of(self._kernel.run), self._call(x, out), (self, x, out))

    def _call(self, x: Tensor, out: Tensor) -> Any:
        first = self._layers[0]
        threads = threads_for(first.in_features, first.out_features, len(x))
        return _Call(
            address_of(first.kernel.run), ctypes.addressof(self._addresses), x.data_ptr(), out.data_ptr(),
            len(self._layers), len(x), first.in_features, first.out_features, self.tail,
            *x.stride()[:2], *out.stride()[:2], x.itemsize, threads,
        )  # fmt: skip


def panel_heads(kernel: HeadsKernel, weights: Tensor, tail: int = 0) -> OwnHeads:
    """With a copy of plain weights [heads,out,in], in bfloat16 or float32 on the CPU."""
    arena = Arena(sum(panel_bytes(one) for one in weights))
    return OwnHeads(kernel, [panel_linear(kernel.linear, arena, one, None) for one in weights], tail)
