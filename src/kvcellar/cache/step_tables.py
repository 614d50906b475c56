"""step_tables: what kernels read of the open step, in tensors that stay where they are (see `contracts.StepTables`).

Always true: a tensor that was handed out has the same address in every later step with the same name, type and bucket,
until the memory is gone. What it holds belongs to the open step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 16  # elements of the smallest bucket


class StepTables:
    """Of a group, whose keys have so many heads, or of all groups together. Filled by `begin` and `Guest.forward`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: int = 0) -> None:
        """`dtype` is the memory's own type."""
        self.device, self.dtype, self.heads = device, dtype, heads
        self._buckets: dict[tuple[str, torch.dtype, int], tuple[Tensor, Tensor]] = {}  # on the device, on the host

    def fill(self, name: str, values: Sequence[int] | Tensor) -> Tensor:
        """int64 [n]; the rest of its bucket is zeros: the null cell."""
        n = len(values)
        there, host = self._bucket(name, n, torch.int64)
        if isinstance(values, Tensor):
            there[:n].copy_(values)
            there[n:].zero_()
            return there[:n]
        row = host.numpy()
        row[:n] = values
        row[n:] = 0
        if there is not host:
            there.copy_(host)  # it waits: the next step fills the host's again
        return there[:n]

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of this shape on the device, for the caller to fill."""
        n = math.prod(shape)
        return self._bucket(name, n, dtype)[0][:n].view(*shape)

    @property
    def bytes(self) -> int:
        """Of all buckets, on the device."""
        return sum(there.nbytes for there, _ in self._buckets.values())

    def _bucket(self, name: str, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = max(SMALLEST, 1 << (n - 1).bit_length())
        found = self._buckets.get((name, dtype, size))
        if found is None:
            with torch.inference_mode(False):  # it is filled in any mode
                there = torch.zeros(size, dtype=dtype, device=self.device)
                host = there if self.device.type == "cpu" else torch.zeros(size, dtype=dtype, device="cpu")
            found = self._buckets[name, dtype, size] = there, host
        return found
