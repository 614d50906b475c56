"""experts: linear layers of experts on CPUs (`experts.cpp`), of layers of ours (`layers.py`): one for each expert.

Always true: the bits of a row of results depend only on its row of inputs and on its expert: not on other rows, on
their experts, or on threads.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.kernels.arena import Arena
from kvcellar.kernels.compiled import SOURCES, Kernel, Native, address_of
from kvcellar.kernels.layers import OwnLinear, PanelKernel, panel_linear, threads_for
from kvcellar.kernels.structures import structure

SOURCE = SOURCES / "experts.cpp"


_Call = structure(SOURCE, "Call")


class ExpertsKernel(Kernel):
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        super().__init__(SOURCE, "kvcellar_experts", environment)


class OwnExperts(nn.Module):
    """Replaces the stacked weights of experts. It has no parameters."""

    def __init__(self, kernel: ExpertsKernel, layers: Sequence[OwnLinear]) -> None:
        """`layers` has one for each expert, all of one shape."""
        super().__init__()
        first = layers[0]
        assert all((one.in_features, one.out_features) == (first.in_features, first.out_features) for one in layers)
        self._kernel, self.layers = kernel, tuple(layers)
        self.experts, self.dtype, self.computed = len(layers), first.dtype, first.computed
        self.in_features, self.out_features, self.rounds = first.in_features, first.out_features, first.rounds
        self._addresses = (ctypes.c_void_p * len(layers))(*(one.address for one in layers))

    def forward(self, x: Tensor, index: Tensor, share: int) -> Tensor:
        """x [n,in] and the experts of each row, index [n*share] -> [n*share,out]: row i is expert index[i] of row
        i // share. An index that is no expert gives zeros. Raises for other types and sizes."""
        types = x.dtype is self.dtype and index.dtype is torch.int64 and x.device.type == index.device.type == "cpu"
        if not types or x.shape[1:] != (self.in_features,) or index.shape != (len(x) * share,):
            raise RuntimeError(
                f"experts of {self.in_features} inputs in {self.dtype} on the CPU got {tuple(x.shape)} in {x.dtype} "
                f"and {tuple(index.shape)} experts in {index.dtype}, {share} for each row"
            )
        rows = x.to(self.computed)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = rows.new_empty(len(index), self.out_features)
        if len(index) and self._kernel.run(ctypes.byref(self._call(rows, index.contiguous(), share, out))):
            raise MemoryError("there is not enough memory for a layer of experts")
        return out.to(x.dtype)

    def native(self, x: Tensor, index: Tensor, share: int, out: Tensor) -> Native:
        """The call that fills out [n*share,out] from x [n,in] and index [n*share], all at fixed addresses, the elements
        of a row beside each other."""
        assert x.dtype is out.dtype is self.computed
        assert (*index.shape, index.dtype, index.stride(0)) == (len(x) * share, torch.int64, 1)
        return Native(address_of(self._kernel.run), self._call(x, index, share, out), (self, x, index, out))

    def _call(self, x: Tensor, index: Tensor, share: int, out: Tensor) -> Any:
        rows, threads = len(x), threads_for(self.in_features, self.out_features, len(index))
        run, layers = address_of(self.layers[0].kernel.run), ctypes.addressof(self._addresses)
        return _Call(
            run, layers, x.data_ptr(), index.data_ptr(), out.data_ptr(), self.experts, rows, share,
            self.in_features, self.out_features, x.stride(0), out.stride(0), x.itemsize, threads,
        )  # fmt: skip


def panel_experts(
    kernel: ExpertsKernel, by: PanelKernel, arena: Arena, weights: Tensor, biases: Tensor | None
) -> OwnExperts:
    """Experts with a copy of plain weights [experts,out,in] and biases [experts,out], in bfloat16 or float32 on the
    CPU, in an arena."""
    each = range(len(weights))
    return OwnExperts(
        kernel, [panel_linear(by, arena, weights[e], None if biases is None else biases[e].clone()) for e in each]
    )
