"""uploads: numbers of the host as tensors on a device, without waiting for it.

A copy from pageable memory ends only when the device has done all that was queued before. Copies from pinned memory are
queued; torch's allocator of pinned memory reuses what a queued copy reads only after it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def uploaded(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of numbers."""
    return sent(torch.tensor(values, dtype=dtype, device="cpu"), device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload(values: Sequence[int], into: Tensor) -> None:
    """Overwrite a flat tensor of integers on a device; the rest of it with zeros."""
    pinned = into.device.type == "cuda"
    host = torch.empty(len(into), dtype=into.dtype, device="cpu", pin_memory=pinned)
    row = host.numpy()
    row[: len(values)] = values
    row[len(values) :] = 0
    into.copy_(host, non_blocking=pinned)
