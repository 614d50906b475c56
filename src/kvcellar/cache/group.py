"""group: the layers of a model that share one table of cells per sequence, and their storage.

Always true:
  * every layer has storage for all cells of the group;
  * an operation that raises leaves the cells and their content unchanged.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvcellar.cache.cells import Cells
from kvcellar.cache.compact import Compaction, relocate
from kvcellar.cache.history import GroupStep, LayerHistory
from kvcellar.cache.layouts.encoder import Input
from kvcellar.cache.plans import indices, pieces
from kvcellar.cache.pool import Pool, rotated_sizes
from kvcellar.cache.step_tables import StepTables
from kvcellar.cache.tables import InputTable, Move, Table, Tables
from kvcellar.contracts import Backend
from kvcellar.errors import BadRequest, CapacityTooSmall, WrongStage, shown
from kvcellar.layout import Layout
from kvcellar.plan import Batch, Run
from kvcellar.shapes import BLOCK, Plane, Rotation
from kvcellar.spans import whole

PIECE = 1024  # cells that are copied or rotated at once: bounds the staging memory of a shift or a compaction
COPIES = 5  # most copies of a piece of one plane at once while it is rotated, in the type of the computation
QUANTISED = 8  # the same for a quantised plane: dequantised, rotated and quantised again
INDEX = 24  # bytes per cell: int64 source and target indices, and a temporary copy of one of them
ANGLES = 12  # bytes per element of a vector
_FAR = 1 << 62  # a position greater than every window


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of a model that share one layout and shape, and so one table of cells per sequence."""

    name: str
    layout: Layout
    planes: tuple[Plane, ...]  # by convention the first two are named "k" and "v"
    layers: tuple[int, ...]
    rotations: Mapping[int, Mapping[str, Rotation]] = field(
        default_factory=dict
    )  # by layer, plane; others are not rotated
    no_shift: str | None = "it is not known how its keys rotate with position"  # None: positions may change
    plain: bool = False  # planes are [cells,heads,size] without padding, instead of the backend's arrangement

    def __post_init__(self) -> None:
        if self.of_input:
            if self.rotations:
                raise BadRequest(f"keys of {self.name} layers never turn: an input stays where it is")
            object.__setattr__(self, "no_shift", None)  # a shift of the text does not change it

    @property
    def of_input(self) -> bool:
        """Whether its cells store an encoder's input instead of tokens."""
        return isinstance(self.layout, Input)

    @property
    def bounded(self) -> bool:
        """Whether a sequence holds only a window or chunk of its tokens."""
        return not self.of_input and self.layout.keep(_FAR) > 0

    def bytes_per_cell(self, itemsize: int) -> int:
        """Bytes of one cell in all layers, scales included; `itemsize` is that of the memory's own type."""
        return len(self.layers) * sum(plane.bytes_per_cell(itemsize) for plane in self.planes)

    def bytes(self, cells: int, itemsize: int, backend: Backend) -> int:
        """Bytes of all planes for `cells` cells, with the null cell, the padding of `backend` and the rotations."""
        padding = 1 if self.plain else backend.padding
        rotations = sum(size * size * torch.float32.itemsize for size in rotated_sizes(self.planes))
        return -(-(cells + 1) // padding) * padding * self.bytes_per_cell(itemsize) + rotations

    def undo(self, itemsize: int) -> int:
        """Bytes of the undo copy of one cell that is rotated in place; kept until the removal is complete."""
        planes = {plane.name: plane.bytes_per_cell(itemsize) for plane in self.planes}
        turning = sum(planes[name] for layer in self.layers for name in self.rotations.get(layer, {}))
        return turning + torch.int64.itemsize if turning else 0

    def staging(self, cells: int, itemsize: int) -> int:
        """Most temporary bytes that a shift or a compaction allocates, in a group of `cells` cells."""
        widest = max((_turning(plane, itemsize) for plane in self.planes), default=0)
        angles = max((plane.size for plane in self.planes), default=0) * ANGLES
        return min(PIECE, cells) * (widest + INDEX) + angles


class Fragments(NamedTuple):
    """Fragmentation of a group: the total cells of all tables (a shared cell counts once per table), their number of
    runs, the number of tables with cells, and the number of free cells."""

    cells: int
    runs: int
    tables: int
    free: int


def _turning(plane: Plane, itemsize: int) -> int:
    """Most temporary bytes for rotating one cell of a plane; `itemsize` is that of the memory's own type."""
    storage = plane.storage
    if storage is not None and storage.quantised:
        full = plane.size if plane.size <= BLOCK else -(-plane.size // BLOCK) * BLOCK
        return plane.heads * full * torch.float32.itemsize * QUANTISED
    own = itemsize if storage is None else storage.bytes(1)
    return plane.heads * plane.size * max(torch.float32.itemsize, own) * COPIES


def check_groups(groups: Sequence[Group], cells: Mapping[str, int], backend: Backend | Mapping[str, Backend]) -> None:
    """Raise `BadRequest` unless names and layers are unique, each group has a size and a backend, one stores tokens."""
    names = [group.name for group in groups]
    layers = [layer for group in groups for layer in group.layers]
    for name in names:
        if names.count(name) > 1:
            raise BadRequest(f"two groups are called {name}")
        if whole(cells.get(name, -1), f"the number of cells of group {name}") < 0:
            raise BadRequest(f"group {name} needs cells, none or more; what was given is {dict(cells)}")
        if isinstance(backend, Mapping) and name not in backend:
            raise BadRequest(f"group {name} needs a backend; there are some for {', '.join(backend)}")
    for layer in layers:
        if layers.count(layer) > 1:
            raise BadRequest(f"layer {layer} is in two groups")
    if groups and all(group.of_input for group in groups):
        raise BadRequest("a memory remembers tokens; it needs a group whose layout is not Input")


def check_written(groups: Sequence[Group], written: Set[tuple[int, str]], batch: Batch, counts: Sequence[int]) -> None:
    """Raise `WrongStage` unless every plane of every layer of tokens was `written` in a step, by layer and plane.

    Otherwise a visible cell would contain stale data of a dropped sequence. If no token is kept (no feed stores any, or
    `counts` accepts none), nothing has to be written. O(groups) if everything was written.
    """
    if not any(count for feed, count in zip(batch.feeds, counts, strict=True) if feed.stores):
        return
    tokens = [group for group in groups if not group.of_input]
    if len(written) == sum(len(group.layers) * len(group.planes) for group in tokens):
        return
    missing: dict[str, list[str]] = {}
    for group in tokens:
        for layer in group.layers:
            names = [plane.name for plane in group.planes if (layer, plane.name) not in written]
            if names:
                missing.setdefault(group.name, []).append(f"{layer} ({', '.join(names)})")
    said = "; ".join(f"layers {', '.join(layers)} of group {name}" for name, layers in missing.items())
    raise WrongStage(f"commit() before all was put: {said}. Run the whole model, or abandon() the step")


@dataclass(slots=True)
class GroupStore:
    """The storage of one group."""

    group: Group
    tables: Tables
    pool: Pool
    backend: Backend
    itemsize: int  # bytes of the memory's own type
    device: torch.device
    step: GroupStep  # the open step
    layers: Mapping[int, LayerHistory]
    compaction: Compaction = field(default_factory=Compaction)

    @classmethod
    def new(cls, group: Group, backend: Backend, cells: int, dtype: torch.dtype, device: torch.device) -> "GroupStore":
        pool = Pool.agreed(
            group.planes, group.layers, backend, plain=group.plain, cells=cells, dtype=dtype, device=device
        )
        step = GroupStep(StepTables(device, dtype, heads=group.planes[0].heads if group.planes else 0))
        layers = {layer: LayerHistory(pool, layer, backend, step) for layer in group.layers}
        return cls(group, Tables(Cells(cells)), pool, backend, dtype.itemsize, device, step, layers)

    @property
    def cells(self) -> Cells:
        return self.tables.cells

    @property
    def staging(self) -> int:
        """Most temporary bytes of an edit (shift or compaction)."""
        return self.group.staging(self.cells.capacity, self.itemsize)

    @property
    def undo(self) -> int:
        """Bytes per cell of the undo copy for rotation in place."""
        return self.group.undo(self.itemsize)

    def table(self) -> Table:
        """An empty table for a new sequence."""
        return InputTable(self.tables) if self.group.of_input else Table(self.tables)

    def turn(self, source: Sequence[Run], target: Sequence[Run], by: int) -> None:
        """Copy the cells of `source` to those of `target`, rotated by `by` positions; 0: a bitwise copy."""
        for some, places in zip(pieces(source, PIECE), pieces(target, PIECE), strict=True):
            old, new = indices(some, self.device), indices(places, self.device)
            for layer in self.group.layers:
                turns = self.group.rotations.get(layer, {}) if by else {}
                self.pool.move(layer, old, new, turns, by)

    def compact(self, budget: int) -> int:
        """Move at most `budget` cells; returns how many were moved."""
        moves = self.compaction.piece(self.tables, budget)

        def copy(moves: Sequence[Move]) -> None:
            self.turn([move.source for move in moves], [move.target for move in moves], 0)

        if moves:
            relocate(self.tables, moves, copy)
        return sum(move.source.n for move in moves)

    def fragments(self) -> Fragments:
        return Fragments(*self.cells.held(), self.tables.used, self.cells.free)

    def peak(self, cells: int) -> int:
        """Peak of additional bytes during `resize(cells)`."""
        old, new = self.pool.layer_bytes(self.cells.capacity), self.pool.layer_bytes(cells)
        return new + max(0, (len(self.group.layers) - 1) * (new - old))

    def resize(self, cells: int) -> None:
        """Resize all layers to `cells` cells, one by one. Raises `CapacityTooSmall` if a higher cell is held."""
        old = self.cells.capacity
        if cells < (highest := self.cells.highest):
            raise CapacityTooSmall(
                f"cell {highest} of group {self.group.name} is in use: it can shrink to {highest} cells now, and to "
                f"{max(1, self.cells.used)} after compact(); {cells} were asked for"
            )
        if cells < old:
            self.cells.resize(cells)
        done: list[int] = []
        try:
            for layer in self.group.layers:
                self.pool.resize(layer, cells)
                done.append(layer)
        except BaseException:
            # If this raises too, some layers have more storage than `capacity`, which is harmless.
            for layer in done:
                self.pool.resize(layer, old)
            self.cells.resize(old)
            raise
        self.cells.resize(cells)

    def check(self, tables: Sequence[Table], taken: Sequence[Run]) -> None:
        """Assert the invariants; all held runs are those of `tables` and those `taken` by the open step."""
        self.cells.check()
        self.cells.check_holders([*taken, *(run for table in tables for run in table.runs)])
        self.tables.check(tables)
        self.compaction.check()
        assert self.pool.bytes >= len(self.group.layers) * self.pool.layer_bytes(self.cells.capacity)


class Stores:
    """The storage of all groups of one memory, in `all`: groups of tokens first, then those of an input."""

    def __init__(
        self,
        groups: Sequence[Group],
        cells: Mapping[str, int],
        backends: Mapping[str, Backend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.all = tuple(
            GroupStore.new(group, backends[group.name], cells[group.name], dtype, device)
            for group in sorted(groups, key=lambda group: group.of_input)
        )
        self.layers = {layer: history for store in self.all for layer, history in store.layers.items()}
        self.tables = StepTables(device, dtype)
        self._index_of = {layer: index for index, store in enumerate(self.all) for layer in store.group.layers}

    @property
    def names(self) -> str:
        return "the groups are " + (", ".join(store.group.name for store in self.all) or "none")

    def index_of(self, layer: int) -> int:
        """Index of the group that contains a layer. Raises `BadRequest` if there is none."""
        index = self._index_of.get(layer)
        if index is None:
            raise BadRequest(f"layer {layer} is in no group of this memory")
        return index

    def named(self, group: str) -> GroupStore:
        """The group of this name. Raises `BadRequest` if there is none."""
        store = next((store for store in self.all if store.group.name == group), None)
        if store is None:
            raise BadRequest(f"there is no group {shown(group)}; {self.names}")
        return store
