"""history: what one layer remembers in an open step, as stored, and how to read it."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvcellar.cache.plans import indices
from kvcellar.cache.pool import Pool, StoredPlane
from kvcellar.plan import GroupPlan, Run
from kvcellar.shapes import Arrangement

HOST = torch.device("cpu")


class StoredHistory:
    """What one layer remembers, as stored, and how to read it (see `contracts.History`)."""

    def __init__(self, pool: Pool, layer: int, plan: GroupPlan, prepared: Any, columns: "Columns") -> None:
        self._pool, self._layer, self._columns = pool, layer, columns
        self.plan, self.prepared = plan, prepared

    def stored(self, name: str) -> StoredPlane:
        return self._pool.stored(self._layer, name)

    @property
    def arrangement(self) -> Arrangement:
        """Of the keys."""
        return self.stored("k").arrangement

    def plane(self, name: str) -> Tensor:
        """The elements of a plane, as stored."""
        return self.stored(name).codes

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """(k [N,G,D], v [N,G,Dv], visible [T,N]): each cell that some row may see is there once, in order of cell."""
        cells = self._columns.cells
        k, v = (self._pool.read(self._layer, name, cells) for name in ("k", "v"))
        return k, v, self._columns.visible

    def in_order(self) -> tuple[Tensor, Tensor]:
        """(k [n,G,D], v [n,G,Dv]) of the only sequence in the step, in order of position."""
        ((k, v),) = self.each_in_order()
        return k, v

    def each_in_order(self) -> list[tuple[Tensor, Tensor]]:
        """(k [n,G,D], v [n,G,Dv]) of every sequence in the step, each in order of position."""
        return list(zip(self.plane_in_order("k"), self.plane_in_order("v"), strict=True))

    def plane_in_order(self, name: str) -> list[Tensor]:
        """A plane [n,heads,size] of every sequence in the step, each in order of position."""
        device = self.stored(name).codes.device
        return [self._pool.read(self._layer, name, indices(segment.runs, device)) for segment in self.plan.segments]


class Columns:
    """The cells that a group's segments may see, as columns of a dense mask. Shared cells are there once.

    Made when the first layer asks and kept for the others of the step: only slow roads need it.
    """

    def __init__(self, plan: GroupPlan, tokens: int, device: torch.device) -> None:
        self._plan, self._tokens, self._device = plan, tokens, device

    @cached_property
    def _merged(self) -> list[tuple[int, int]]:
        merged: list[tuple[int, int]] = []
        for start, end in sorted((run.cell, run.end) for segment in self._plan.segments for run in segment.runs):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        return merged

    @cached_property
    def _of_all(self) -> Tensor:
        return indices((Run(start, end - start) for start, end in self._merged), HOST)

    @cached_property
    def cells(self) -> Tensor:
        """[N], ascending."""
        return self._of_all.to(self._device)

    @cached_property
    def visible(self) -> Tensor:
        """[T,N], True where the row may see the cell."""
        cells = self._of_all
        out = torch.zeros(self._tokens, len(cells), dtype=torch.bool, device=HOST)
        for segment in self._plan.segments:
            own = indices(segment.runs, HOST)
            key = segment.first + torch.arange(len(own), device=HOST)
            positions = range(segment.pos.start, segment.pos.end)
            lowest = torch.tensor([self._plan.layout.lowest(pos) for pos in positions], device=HOST)[:, None]
            last = torch.tensor([segment.last(pos) for pos in positions], device=HOST)[:, None]
            rows = slice(segment.row, segment.row + len(positions))
            out[rows, torch.searchsorted(cells, own)] = (key >= lowest) & (key <= last)
        return out.to(self._device)
