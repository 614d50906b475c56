"""storage: the cells and planes of each group of a memory: capacities, bytes and compaction.

Always true:
  * planes, scratch and staging together are within `max_bytes`;
  * every layer has storage for all cells of its group;
  * an operation that raises has changed nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvcellar.errors import BadRequest, CapacityTooSmall, shown
from kvcellar.memory.cells.cells import Cells
from kvcellar.memory.cells.compact import Compaction, relocate
from kvcellar.memory.cells.tables import Move, Table, Tables
from kvcellar.memory.kv.group import PIECE, Group
from kvcellar.memory.kv.history import Backend, GroupStep, LayerHistory, StepTables, indices
from kvcellar.memory.kv.pool import Pool
from kvcellar.memory.kv.states import States
from kvcellar.memory.plan import Run
from kvcellar.memory.shapes import Recurrent
from kvcellar.memory.spans import whole


class Fragments(NamedTuple):
    """Fragmentation of a group: the total cells of all tables (a shared cell counts once per table), their number of
    runs, the number of tables with cells, and the number of free cells."""

    cells: int
    runs: int
    tables: int
    free: int


def check_planned(
    groups: Sequence[Group],
    cells: Mapping[str, int],
    dtype: torch.dtype,
    recurrent: Recurrent,
    rows: int,
    max_bytes: int | None,
) -> None:
    """Raise `CapacityTooSmall` if a memory of these groups would take more than `max_bytes`."""
    planes = sum(group.bytes(cells[group.name], dtype.itemsize) for group in groups)
    planes += recurrent.bytes * (rows + 1)
    staging = max((group.staging(cells[group.name], dtype.itemsize) for group in groups), default=0)
    _check_room(max_bytes, planes, 0, staging, "lower cells")


def _check_room(max_bytes: int | None, planes: int, scratch: int, staging: int, way_out: str) -> None:
    need = planes + scratch + staging
    if max_bytes is not None and need > max_bytes:
        raise CapacityTooSmall(
            f"{need} bytes would be needed: {planes} for planes, {scratch} for a step's scratch, {staging} "
            f"for staging; {max_bytes} are allowed. Raise max_bytes (cache_bytes), or {way_out}."
        )


def pieces(runs: Iterable[Run], size: int) -> Iterator[list[Run]]:
    """`runs` in order, in pieces of `size` cells; the last may be smaller."""
    piece: list[Run] = []
    room = size
    for run in runs:
        while run.n:
            here = min(run.n, room)
            piece.append(Run(run.cell, here))
            run, room = Run(run.cell + here, run.n - here), room - here
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


@dataclass(slots=True)
class GroupStore:
    """The storage of one group."""

    group: Group
    tables: Tables
    cells: Cells
    pool: Pool
    backend: Backend
    itemsize: int  # bytes of the memory's own type
    device: torch.device
    step: GroupStep  # the open step
    layers: Mapping[int, LayerHistory]
    compaction: Compaction = field(default_factory=Compaction)

    @classmethod
    def new(cls, group: Group, backend: Backend, cells: int, dtype: torch.dtype, device: torch.device) -> "GroupStore":
        pool = Pool(group, backend, cells=cells, dtype=dtype, device=device)
        step = GroupStep(StepTables(device, dtype, heads=group.planes[0].heads if group.planes else 0))
        layers = {layer: LayerHistory(pool.planes(layer), layer, backend, step) for layer in group.layers}
        tables = Tables(Cells(cells), of_input=group.of_input)
        return cls(group, tables, tables.cells, pool, backend, dtype.itemsize, device, step, layers)

    @property
    def undo(self) -> int:
        """Bytes per cell of the undo copy for rotation in place."""
        return self.group.undo(self.itemsize)

    def move(self, source: Sequence[Run], target: Sequence[Run], by: int) -> None:
        """Copy the cells of `source` to those of `target`, rotated by `by` positions; 0: a bitwise copy."""
        for some, places in zip(pieces(source, PIECE), pieces(target, PIECE), strict=True):
            old, new = indices(some, self.device), indices(places, self.device)
            for layer in self.group.layers:
                rotations = self.group.rotations.get(layer, {}) if by else {}
                self.pool.move(layer, old, new, rotations, by)

    def compact(self, budget: int) -> int:
        """Move at most `budget` cells; returns how many were moved."""
        moves = self.compaction.piece(self.tables, budget)

        def copy(moves: Sequence[Move]) -> None:
            self.move([move.source for move in moves], [move.target for move in moves], 0)

        if moves:
            relocate(self.tables, moves, copy)
        return sum(move.source.n for move in moves)

    def check(self, tables: Sequence[Table], taken: Sequence[Run]) -> None:
        """Assert the invariants; all held runs are those of `tables` and those `taken` by the open step."""
        self.cells.check()
        self.cells.check_holders([*taken, *(run for table in tables for run in table.runs)])
        self.tables.check(tables)
        assert self.compaction.at >= 1, f"the frontier is at {self.compaction.at}"
        assert self.pool.bytes == self.group.bytes(self.cells.capacity, self.itemsize)


class Storage:
    """The cells and bytes of one memory. In `stores`, groups of tokens come before those of an input."""

    def __init__(
        self,
        groups: Sequence[Group],
        cells: Mapping[str, int],
        backends: Mapping[str, Backend],
        dtype: torch.dtype,
        states: States,
        max_bytes: int | None,
        idle: Callable[[str], None],
    ) -> None:
        """`idle(operation)` raises `WrongStage` while a step is open."""
        self._states, self._idle = states, idle
        self.device, self.max_bytes, self.scratch = states.device, max_bytes, 0
        self.stores = tuple(
            GroupStore.new(group, backends[group.name], cells[group.name], dtype, self.device)
            for group in sorted(groups, key=lambda group: group.of_input)
        )
        self.layers = {layer: history for store in self.stores for layer, history in store.layers.items()}
        self.tables = StepTables(self.device, dtype)
        self._index_of = {layer: index for index, store in enumerate(self.stores) for layer in store.group.layers}

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(store.group for store in self.stores)

    @property
    def bytes(self) -> int:
        """Bytes of all planes of all groups, of Hadamard matrices, and of all states."""
        return sum(store.pool.bytes for store in self.stores) + self._states.bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the step tables, which stay between steps and belong to the scratch of steps."""
        return self.tables.bytes + sum(store.step.tables.bytes for store in self.stores)

    @property
    def staging(self) -> int:
        """Most temporary bytes of an edit (shift, compaction)."""
        return max((one.group.staging(one.cells.capacity, one.itemsize) for one in self.stores), default=0)

    @property
    def spare(self) -> int | None:
        """Bytes of the cap that are left beside planes and staging while no step is open; None without a cap."""
        return None if self.max_bytes is None else self.max_bytes - self.bytes - self.staging

    def capacity(self) -> dict[str, int]:
        """Number of cells of each group."""
        return {store.group.name: store.cells.capacity for store in self.stores}

    def free_runs(self) -> list[list[Run]]:
        """The free cells of each group, in order of the groups. Costs the free pieces."""
        return [store.cells.free_runs() for store in self.stores]

    def fragments(self) -> dict[str, Fragments]:
        """The fragmentation of each group, for deciding about `compact`."""
        all_cells = [(store.group.name, store.tables.used, store.cells) for store in self.stores]
        return {name: Fragments(cells.held, cells.runs, used, cells.free) for name, used, cells in all_cells}

    def index_of(self, layer: int) -> int:
        """Index of the group that contains a layer. Raises `BadRequest` if there is none."""
        index = self._index_of.get(layer)
        if index is None:
            raise BadRequest(f"layer {layer} is in no group of this memory")
        return index

    def _named(self, group: str) -> GroupStore:
        """The group of this name. Raises `BadRequest` if there is none."""
        store = next((store for store in self.stores if store.group.name == group), None)
        if store is None:
            names = ", ".join(store.group.name for store in self.stores) or "none"
            raise BadRequest(f"there is no group {shown(group)}; the groups are {names}")
        return store

    def leave_room(self, scratch: int) -> None:
        """Reserve `scratch` bytes for steps. Raises `CapacityTooSmall` if they do not fit the cap."""
        if whole(scratch, "scratch") < 0:
            raise BadRequest(f"scratch is 0 bytes or more, not {scratch}")
        _check_room(self.max_bytes, self.bytes, scratch, self.staging, "lower cells or step_tokens")
        self.scratch = scratch

    def page_in(self, cells: int, most: int) -> None:
        """Zero the free ones of the lowest `cells` cells of each group, but at most about `most` bytes, and prefer them
        for new tokens. On a CPU that allocates their pages: the first write to a page costs more than the copy of what
        is written."""
        self._idle("page_in")
        each = sum(store.group.bytes_per_cell(store.itemsize) for store in self.stores)
        near = 1 + min(cells, most // each if each else 0)
        for store in self.stores if self.device.type == "cpu" else ():
            store.cells.near = near
            for run in store.cells.free_runs():
                if run.cell < near:
                    store.pool.zero(Run(run.cell, min(run.end, near) - run.cell))

    def piece(self, group: str) -> int:
        """How many cells of a group to `compact` at once so that no more bytes move than `staging`."""
        store = self._named(group)
        each = store.group.bytes_per_cell(store.itemsize)
        return max(1, self.staging // each) if each else PIECE

    def compact(self, budget_cells: int, group: str | None = None) -> int:
        """Move at most `budget_cells` cells of one group towards the lowest cells, so that tables have fewer runs;
        returns how many were moved.

        Steps may run between calls, and no sequence changes. Returns 0 if nothing is left to move, or no cell is free.
        Raises `BadRequest` for a budget below 1, and for an unknown group.
        """
        self._idle("compact")
        if whole(budget_cells, "a budget of cells") < 1:
            raise BadRequest(f"a budget is one cell or more, not {budget_cells}")
        only = self._named(group) if group is not None else None
        for store in self.stores if only is None else [only]:
            if n := store.compact(budget_cells):
                return n
        return 0
