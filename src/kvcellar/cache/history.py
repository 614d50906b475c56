"""history: what one layer remembers in an open step: where its new tokens are written, and how the stored are read.

Always true: what is bound here outlives steps; what it shows belongs to the open step.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvcellar.cache.plans import indices
from kvcellar.cache.pool import Pool
from kvcellar.cache.step_tables import StepTables
from kvcellar.contracts import Backend
from kvcellar.errors import BadRequest
from kvcellar.plan import GroupPlan, Run

HOST = torch.device("cpu")


class GroupStep:
    """What the layers of a group share in the open step: one object for each group, refilled by `begin`."""

    plan: GroupPlan
    prepared: Any  # what the backend's `prepare` returned
    cells: Tensor  # [t], where the new tokens are written
    columns: "Columns"
    written: set[tuple[int, str]]  # layers and planes of the step, in all groups

    def __init__(self, tables: StepTables) -> None:
        self.tables = tables

    def end(self) -> None:
        """No step is open: free what was made for this one alone."""
        vars(self).pop("columns", None)  # not there yet if laying out the step failed


class LayerHistory:
    """One layer of a group (see `contracts.History`), bound once: its planes, its backend and the step of its group."""

    def __init__(self, pool: Pool, layer: int, backend: Backend, step: GroupStep) -> None:
        self.layer, self.backend, self.step = layer, backend, step
        self.planes = pool.planes(layer)
        self._pool = pool

    def put(self, new: Mapping[str, Tensor]) -> None:
        """Store new planes [1,heads,t,size] by name, of the sizes that the layer has."""
        written = self.step.written
        for name in new:
            if (self.layer, name) in written:
                names = " and ".join(new)
                raise BadRequest(f"layer {self.layer} was given its {names} of this step before: they are stored once")
        self._pool.write(self.layer, self.step.cells, new)
        for name in new:
            written.add((self.layer, name))

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """(k [N,G,D], v [N,G,Dv], visible [T,N]): each cell that some row may see is there once, in order of cell."""
        k, v = (self._read(name, self.step.columns.cells) for name in ("k", "v"))
        return k, v, self.step.columns.visible

    def in_order(self) -> tuple[Tensor, Tensor]:
        """(k [n,G,D], v [n,G,Dv]) of the only sequence in the step, in order of position."""
        ((k, v),) = self.each_in_order()
        return k, v

    def each_in_order(self) -> list[tuple[Tensor, Tensor]]:
        """(k [n,G,D], v [n,G,Dv]) of every sequence in the step, each in order of position."""
        return list(zip(self.plane_in_order("k"), self.plane_in_order("v"), strict=True))

    def plane_in_order(self, name: str) -> list[Tensor]:
        """A plane [n,heads,size] of every sequence in the step, each in order of position."""
        runs = (segment.runs for segment in self.step.plan.segments)
        return [self._read(name, indices(of_one, self.step.tables.device)) for of_one in runs]

    def _read(self, name: str, cells: Tensor) -> Tensor:
        return self._pool.read(self.layer, name, cells)


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
