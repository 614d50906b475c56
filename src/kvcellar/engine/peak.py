"""peak: the most bytes of tensors that a piece of code has at once, beside those that were allocated before it."""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector within the block, so that equal steps take equal bytes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Meter:
    """`bytes` is the peak of allocated bytes, minus those allocated before."""

    bytes: int = 0


def peak(device: torch.device) -> AbstractContextManager[Meter]:
    """Measures the peak bytes of tensors on `device` within the block."""
    return _Cuda(device) if device.type == "cuda" else _Counted()


class _Cuda(Meter):
    """Uses the statistics of the CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "_Cuda":
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._device)
        self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before


class _Counted(TorchDispatchMode, Meter):
    """Counts the results of every operation from creation until they are freed. Temporary memory inside an operation is
    not counted; on a CPU it is small."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors(
            (args, tuple(kwargs.values()) if kwargs else ())
        ):  # arguments existed before, also if they are written in place, so they do not count
            self._see(tensor, ours=False)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors((out,)):
            self._see(tensor, ours=True)
        return out

    def _see(self, tensor: Tensor, *, ours: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            nbytes = storage.nbytes() if ours else 0
            self._known.add(storage._cdata)
            self._now += nbytes
            self.bytes = max(self.bytes, self._now)
            finalize(storage, self._gone, storage._cdata, nbytes)

    def _gone(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self._now -= nbytes


def _tensors(found: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments, except packed weights, whose storage cannot be accessed."""
    for part in found:
        if isinstance(part, Tensor):
            if not part.is_mkldnn:
                yield part
        elif isinstance(part, list | tuple):
            yield from _tensors(part)
