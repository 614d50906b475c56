"""widened: linear layers with bfloat16 weights on CPUs that have no instructions to multiply bfloat16.

torch's own take several times as long there as in float32, and float32 weights take twice the memory. So weights stay
as they are and are widened as they are used: by a kernel compiled on this machine (`widened.cpp`) where there are few
rows, and a strip at a time before torch's float32 product where there are many. Sums are float32, and what comes out
is rounded once.
"""

import ctypes
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcellar.kernels.compiled import SOURCES, NotCompiled, check_shared, library

SOURCE = SOURCES / "widened.cpp"
FEW = 64  # rows up to which the kernel is faster than torch's float32 product of a strip that is widened first
STRIP = 1024  # outputs whose weights are widened at once
PER_THREAD = 1 << 20  # bytes of weights that are worth another thread


class _Call(ctypes.Structure):
    """`Call` in the kernel, field by field: `check_shared` compares them at load."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "in", "out", "threads")),
    )


class Kernel:
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and where its work is kept."""
        self._library = library(SOURCE, environment)
        check_shared(self._library, _Call)
        self._library.kvcellar_linear.argtypes, self._library.kvcellar_linear.restype = [ctypes.c_void_p], None
        self.needed = not self._library.kvcellar_multiplies()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [n,in] float32, weight [out,in] and bias [out] bfloat16, all contiguous -> [n,out] bfloat16."""
        out = weight.new_empty(len(x), len(weight))
        threads = min(torch.get_num_threads(), 1 + weight.nbytes // PER_THREAD)
        shape = (len(x), *weight.shape[::-1], threads)
        bias_at = None if bias is None else bias.data_ptr()
        call = _Call(x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr(), *shape)
        self._library.kvcellar_linear(ctypes.byref(call))
        return out


def kernel(environment: Mapping[str, str]) -> Kernel | str:
    """The kernel if this CPU needs it, or the reason why it is not used."""
    try:
        found = Kernel(environment)
    except NotCompiled as error:
        return str(error)
    return found if found.needed else "this CPU multiplies bfloat16 as it is"


class WidenedLinear(nn.Module):
    """Replaces one `nn.Linear`, and uses its weight [out,in] and bias where they are. It has no parameters."""

    def __init__(self, by: Kernel, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._by = by
        self.weight, self.bias = weight.contiguous(), None if bias is None else bias.contiguous()
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """x [...,in] bfloat16 -> [...,out]. Raises for other types, as a plain layer does."""
        if x.dtype is not torch.bfloat16:
            raise RuntimeError(f"a layer with bfloat16 weights needs bfloat16, not {x.dtype}")
        rows = x.reshape(-1, self.in_features).float().contiguous()
        few = len(rows) <= FEW
        out = self._by.linear(rows, self.weight, self.bias) if few else self._by_strips(rows)
        return out.view(*x.shape[:-1], self.out_features)

    def _by_strips(self, rows: Tensor) -> Tensor:
        out = self.weight.new_empty(len(rows), self.out_features)
        for first in range(0, self.out_features, STRIP):
            strip = slice(first, first + STRIP)
            bias = None if self.bias is None else self.bias[strip].float()
            out[:, strip] = F.linear(rows, self.weight[strip].float(), bias)
        return out
