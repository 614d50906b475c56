"""layouts: what is gained by storing K/V in the arrangement that the attention backend declares.

The same backend is measured on planes in its arrangement, and on plain planes [cells,heads,size], which it permutes and
makes contiguous in every layer of every step.
"""

import statistics
import time
from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from benchmarks.interleave import in_rounds
from kvcellar.attention.sdpa import Sdpa
from kvcellar.bench.network import Size
from kvcellar.cache.memory import Memory
from kvcellar.contracts import History, Stored
from kvcellar.plan import Batch, Feed
from kvcellar.shapes import Scoring
from kvcellar.spans import Span


class Rearranging(Sdpa):
    """Declares no arrangement, and makes K/V contiguous by head."""

    name = "rearranging"

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        return super().attend(q, _Rearranged(history), scoring)


class _Rearranged:
    """A history whose planes are copied on each read."""

    def __init__(self, history: History) -> None:
        self.step, self.dense = history.step, history.dense
        self.planes: Mapping[str, Stored] = {name: _copied(plane) for name, plane in history.planes.items()}


def _copied(plane: Stored) -> Stored:
    twin = copy(plane)

    def read(cells: Tensor | slice, dtype: torch.dtype, *, rotated: bool = False) -> Tensor:
        return plane.read(cells, dtype, rotated=rotated).contiguous()

    twin.read = read
    return twin


class Side:
    """A memory with sequences of unequal length, and the K/V and queries of a decoding step."""

    def __init__(self, size: Size, lengths: list[int], backend: Sdpa, dtype: torch.dtype, *, plain: bool) -> None:
        group = size.group(plain=plain)
        cells = {group.name: sum(lengths) + len(lengths)}
        self._memory = Memory([group], cells=cells, dtype=dtype, device="cpu", backend=backend)
        self._layers, self._scoring = group.layers, Scoring(size.head_size**-0.5)
        self._new = torch.randn(len(lengths), size.kv_heads, size.head_size).to(dtype)  # [T,G,D]
        self._q = torch.randn(len(lengths), size.query_heads, size.head_size).to(dtype)  # [T,H,D]
        for seq, length in enumerate(lengths):
            self._memory.begin(Batch((Feed(seq, Span(0, length)),)))
            for layer in self._layers:
                drawn = torch.randn(length, size.kv_heads, size.head_size).to(dtype)
                self._memory.put(layer, drawn, drawn)
            self._memory.commit()
        self._step = Batch(tuple(Feed(seq, Span(length, length + 1)) for seq, length in enumerate(lengths)))

    def step(self) -> float:
        """Seconds of writing K/V and of attention, in all layers of a step."""
        self._memory.begin(self._step)
        start = time.perf_counter()
        for layer in self._layers:
            self._memory.put(layer, self._new, self._new)
            self._memory.attend(layer, self._q, self._scoring)
        taken = time.perf_counter() - start
        self._memory.abandon()
        return taken


@torch.inference_mode()
def layouts(size: Size, lengths: list[int], dtype: torch.dtype, steps: int) -> tuple[float, float]:
    """Median milliseconds of a step's attention: in the backend's arrangement, and rearranged. Interleaved."""
    sides = Side(size, lengths, Sdpa(), dtype, plain=False), Side(size, lengths, Rearranging(), dtype, plain=True)
    declared, rearranged = in_rounds(steps, *(side.step for side in sides))
    return 1000 * statistics.median(declared), 1000 * statistics.median(rearranged)
