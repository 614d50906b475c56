"""restored_chunk: the bytes of a chunk that was read, as a tensor that memory copies."""

import torch
from torch import Tensor

from kvcellar.tiers.tier import Chunk


class ChunkTensor:
    """One chunk at a time as a tensor. It shares the chunk's memory; where that is read-only, for which torch has
    no tensors, it is a copy, always in the same place: the pages of a new allocation cost more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def holding(self, chunk: Chunk) -> Tensor:
        """Until the next call, and until the chunk's memory is used again."""
        if isinstance(chunk, memoryview) and not chunk.readonly:
            return torch.frombuffer(chunk, dtype=torch.uint8)
        if len(chunk) > len(self._memory):
            self._memory = torch.empty(len(chunk), dtype=torch.uint8)
        made = self._memory[: len(chunk)]
        made.numpy().data[:] = chunk
        return made
