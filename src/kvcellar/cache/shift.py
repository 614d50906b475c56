"""shift: the cells of what lies behind a removed span, turned to the new positions. Of all groups, or of none.

Turned keys are written to free cells, so the old ones stay as they are until the removal is complete. Where too few
cells are free, cells that no other table holds are turned where they are: the removal would free them. What they held
is copied before and written back if anything raises. The copies of these keys may take as many bytes as the caller
says.

Always true:
  * a cell that another table holds is not written;
  * work is done in pieces of `PIECE` cells: what it takes at once beside those copies is bounded by `staging`;
  * a removal that raises has changed nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from kvcellar.cache.group import PIECE, GroupStore
from kvcellar.cache.plans import indices, pieces
from kvcellar.cache.pool import StoredPlane
from kvcellar.cache.tables import Part, Table
from kvcellar.errors import CacheFull
from kvcellar.plan import Run
from kvcellar.spans import Span


@dataclass(frozen=True, slots=True)
class _Way:
    """What happens to some cells of a table: they are turned where they are, or into other cells."""

    part: Part
    in_place: bool


class _Kept:
    """What cells held before they were overwritten."""

    def __init__(self) -> None:
        self._kept: list[tuple[StoredPlane, Tensor, list[Tensor]]] = []

    def keep(self, plane: StoredPlane, cells: Tensor) -> None:
        self._kept.append((plane, cells, plane.content(cells)))

    def restore(self) -> None:
        for plane, cells, content in self._kept:
            plane.restore(cells, content)


def shifted(stores: Sequence[GroupStore], tables: Sequence[Table], gone: Span, room: int | None) -> list[list[Run]]:
    """For every group, cells with what lies behind `gone` as it is at its new positions, held for the caller.

    `room` is how many bytes the copies of what is turned in place may take; None: as many as there are. Groups whose
    planes do not turn keep their cells. Raises `CacheFull`, before anything is taken.
    """
    ways: list[list[_Way]] = []
    for store, table in zip(stores, tables, strict=True):
        parts = table.parts_since(max(gone.end, table.first))
        ways.append(_ways(store, parts, room))
        if room is not None:
            room -= _undo_bytes(store, ways[-1])
    taken: list[list[Run]] = [[] for _ in stores]
    kept = _Kept()
    try:
        for store, table, of_group, runs in zip(stores, tables, ways, taken, strict=True):
            _shift(store, table, of_group, runs, -len(gone), kept)
    except BaseException:
        try:
            kept.restore()
        finally:
            for store, runs in zip(stores, taken, strict=True):
                store.cells.drop(runs)
        raise
    return taken


def _ways(store: GroupStore, parts: Sequence[Part], room: int | None) -> list[_Way]:
    """Into free cells as long as there are any, so few have to be copied; what is missing, in place, from the end."""
    if not store.group.rotations:
        return [_Way(part, in_place=True) for part in parts]
    need = sum(part.n for part in parts)
    missing = max(0, need - store.cells.free)
    owned = sum(part.n for part in parts if not part.shared)
    if missing > owned or (room is not None and missing * store.undo > room):
        raise CacheFull(store.group.name, need, store.cells.free)
    ways: list[_Way] = []
    for part in reversed(parts):
        here = 0 if part.shared else min(missing, part.n)
        missing -= here
        if here:
            ways.append(_Way(part.last(here), in_place=True))
        if here < part.n:
            ways.append(_Way(part.first(part.n - here), in_place=False))
    return ways[::-1]


def _undo_bytes(store: GroupStore, ways: Sequence[_Way]) -> int:
    return store.undo * sum(way.part.n for way in ways if way.in_place)


def _shift(store: GroupStore, table: Table, ways: Sequence[_Way], taken: list[Run], by: int, kept: _Kept) -> None:
    """Do it for one group. `taken` gets the cells as they are taken, in order, so that the caller can drop them."""
    sources: list[Run] = []
    targets: list[Run] = []
    turned: list[Run] = []
    for in_place, neighbours in groupby(ways, key=lambda way: way.in_place):
        parts = [way.part for way in neighbours]
        if in_place:
            for part in parts:
                taken.append(table.hold_part(part))
                turned.append(part.run)
        else:
            runs = store.cells.take(sum(part.n for part in parts))
            taken.extend(runs)
            sources += [part.run for part in parts]
            targets += runs
    store.turn(sources, targets, by)
    for some in pieces(turned, PIECE) if store.group.rotations else ():
        cells = indices(some, store.device)
        for layer in store.group.layers:
            for name, rotation in store.group.rotations.get(layer, {}).items():
                kept.keep(store.pool.stored(layer, name), cells)
                store.pool.turn(layer, name, cells, rotation, by)
