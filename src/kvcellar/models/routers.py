"""routers: products of modules that multiply rows by a weight of their own, without a linear layer, on CPUs.

Routers of experts call torch's `linear` with a parameter. Its order of sums depends on the number of rows, so near ties
between experts would fall one way in a batch and another way alone. Within these modules, that call goes to a linear
layer of ours (`kernels/linear.py`), in the type that the module multiplies in. Their sigmoids are computed in whole
vectors: torch computes what is left behind the last one in another way, and which experts that are depends on the
number of rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvcellar.kernels.arena import Arena
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.linear import PACKED, Kernel, PanelLinear, panel_bytes, panel_linear

VECTORS = 64  # elements of the largest step of torch's loops over vectors
SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)
CHILDREN = {dtype: f"kvcellar_{dtype}".replace(".", "_") for dtype in PACKED}  # names of layers below a module, by type


def wrap_routers(model: nn.Module, environment: Mapping[str, str]) -> int | str:
    """Let routers of a CPU model multiply by layers of ours. Returns how many there are, or why there are none."""
    found = [module for module in model.modules() if _multiplies(module)]
    if not found:
        return 0
    try:
        kernel = Kernel(environment)
    except NotCompiled as error:
        return str(error)
    for module in found:
        if not isinstance(vars(module).get("forward"), Routed):
            module.forward = Routed(module, kernel)
    return len(found)


def _multiplies(module: nn.Module) -> bool:
    """Whether it is a module of transformers without children, with a weight [out,in]."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and (weight.dim(), weight.device.type) == (2, "cpu")
        and type(weight.detach()) is Tensor
        and type(module).__module__.startswith("transformers.models.")
        and not isinstance(module, nn.Embedding)
        and not module._modules.keys() - set(CHILDREN.values())
    )


class Routed:
    """Replaces the `forward` of a module."""

    def __init__(self, module: nn.Module, kernel: Kernel) -> None:
        self._own: Callable[..., Any] = module.forward
        self._products = _Products(module, kernel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._products:
            return self._own(*args, **kwargs)


class _Products(TorchFunctionMode):
    """Calls of `linear` with the weight of a module, or with its weight in another type."""

    def __init__(self, module: nn.Module, kernel: Kernel) -> None:
        super().__init__()
        self._module, self._kernel = module, kernel

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and (layer := self._layer(*args)) is not None:
            return layer(args[0])
        if func in SIGMOIDS and not kwargs and (missing := -args[0].shape[-1] % VECTORS):
            return func(F.pad(args[0], (0, missing)))[..., : args[0].shape[-1]].contiguous()
        return func(*args, **kwargs)

    def _layer(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> PanelLinear | None:
        """The layer for these arguments; None if they are not the module's own, or of a type that it does not take."""
        own, other = self._module._parameters["weight"], self._module._parameters.get("bias")
        if x.dtype is not weight.dtype or x.dtype not in PACKED or x.device.type != "cpu":
            return None
        if own is None or weight.shape != own.shape or (bias is None) != (other is None):
            return None  # another product of the module
        name = CHILDREN[x.dtype]
        layer = self._module._modules.get(name)
        if layer is None and type(weight.detach()) is Tensor and self._is_own(weight, bias):
            arena = Arena(panel_bytes(weight))
            layer = panel_linear(self._kernel, arena, weight.detach(), None if bias is None else bias.detach().clone())
            self._module.add_module(name, layer)
        return layer if isinstance(layer, PanelLinear) else None

    def _is_own(self, weight: Tensor, bias: Tensor | None) -> bool:
        own, other = self._module._parameters["weight"], self._module._parameters.get("bias")
        assert own is not None
        same = torch.equal(weight, own.to(weight.dtype))
        return same and (bias is None or (other is not None and torch.equal(bias, other.to(bias.dtype))))
