"""A graph on a CPU: calls of torch's operators, replayed on the same memory as a CUDA graph replays its launches."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_BACK = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::masked_select"}


class Calls(TorchDispatchMode):
    """Records calls. One whose result the host has to wait for raises, as in a capture on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS_BACK:
            raise RuntimeError(f"{func._schema.name} waits for the device while a graph is captured")
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            if func._schema.name != "aten::set_":
                self.calls.append((func, args, kwargs or {}, []))
        else:  # results that are views, or the argument itself, stay what they are
            given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            made = [one for one in _tensors(out) if one.untyped_storage()._cdata not in given]
            if made:
                self.calls.append((func, args, kwargs or {}, made))
        return out

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            new = _tensors(func(*args, **kwargs))
            for one, of in zip(made, new if made else [], strict=True):
                one.copy_(of)


def _tensors(found: Any) -> list[Tensor]:
    return [one for one in tree_leaves(found) if isinstance(one, Tensor)]


def record(run: Callable[[], None]) -> Calls:
    calls = Calls()
    with calls:
        run()
    return calls
