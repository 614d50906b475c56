"""restored_chunk: the bytes of a chunk that was read, as a tensor that memory copies."""

import torch
from torch import Tensor


class Chunk:
    """One chunk at a time as a tensor. A copy, since torch warns of tensors that share memory which must not be
    written; always in the same memory, since the pages of a new allocation cost more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def holding(self, chunk: bytes) -> Tensor:
        """Until the next call."""
        if len(chunk) > len(self._memory):
            self._memory = torch.empty(len(chunk), dtype=torch.uint8)
        made = self._memory[: len(chunk)]
        made.numpy().data[:] = chunk
        return made
