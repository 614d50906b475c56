"""linear: linear layers of our own on CPUs, in bfloat16 or float32, over weights in panels (`linear.cpp`)."""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from kvcellar.kernels.arena import LINE, Arena
from kvcellar.kernels.compiled import SOURCES
from kvcellar.kernels.layers import TYPES, LayerKernel, OwnLinear, Part, Weights

SOURCE = SOURCES / "linear.cpp"
PANEL = 64  # outputs; the kernel's
PACKED = (torch.bfloat16, torch.float32)  # types of weights
PAIRS, WIDENED, FOREIGN = range(3)  # how the kernel multiplies bfloat16: `kvcellar_multiplies`


class Kernel(LayerKernel):
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        super().__init__(SOURCE, "kvcellar_linear", environment, PANEL=PANEL)
        self._pack = self.library.kvcellar_pack
        self._pack.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]
        self._pack.restype = None
        self.multiplies: int = self.library.kvcellar_multiplies()

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


class _Panels(Weights):
    """The panels of one layer."""

    def __init__(self, panels: Tensor, bias: Tensor | None, shape: torch.Size) -> None:
        self.panels, self.bias = panels, bias
        self.out, self._inner = shape
        self._wide = None if bias is None else bias.float().contiguous()

    def part(self, column: int) -> Part:
        bias = None if self._wide is None else self._wide.data_ptr()
        return Part(panels=self.panels.data_ptr(), bias=bias, out=self.out, column=column)

    def plain(self) -> Tensor:
        per = 2 if self.panels.dtype is torch.bfloat16 else 1  # inputs beside each other
        inner = _stored(self._inner, self.panels.dtype)
        panels = self.panels.view(-1, inner // per, PANEL, per).transpose(1, 2).reshape(-1, inner)
        return panels[: self.out, : self._inner].clone()


class PanelLinear(OwnLinear):
    """A layer with its weights in panels."""


def panel_linear(kernel: Kernel, arena: Arena, weight: Tensor, bias: Tensor | None) -> PanelLinear:
    """A layer with a copy of a plain weight [out,in], which is in bfloat16 or float32 on the CPU, in an arena."""
    out, inner = weight.shape
    panels = arena.tensor(panel_elements(out, inner, weight.dtype), weight.dtype)
    kernel.pack(weight, panels)
    return PanelLinear(kernel, [_Panels(panels, bias, weight.shape)], inner, weight.dtype)
