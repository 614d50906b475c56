"""shift: rotate the keys behind a removed span to their new positions, in all groups or in none.

Rotated keys are written to free cells, so the old cells stay unchanged until the removal is complete. If too few cells
are free, cells that no other table holds are rotated in place. Their old content is copied first, and written back if
anything raises. The caller limits the bytes of these copies.

Always true:
  * a cell that another table holds is not written;
  * work is done in pieces of `PIECE` cells: temporary memory other than those copies is bounded by `staging`;
  * a removal that raises has changed nothing.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple

from kvcellar.errors import CacheFull
from kvcellar.memory.cells.tables import Part, Table
from kvcellar.memory.kv.group import PIECE
from kvcellar.memory.kv.history import indices
from kvcellar.memory.kv.storage import GroupStore, pieces
from kvcellar.memory.plan import Run
from kvcellar.memory.spans import Span


class _Way(NamedTuple):
    """Whether a part of a table is rotated in place or into other cells."""

    part: Part
    in_place: bool


def shifted(stores: Sequence[GroupStore], tables: Sequence[Table], gone: Span, room: int | None) -> list[list[Run]]:
    """Per group, the cells of the positions behind `gone`, rotated to their new positions and held for the caller.

    `room` limits the bytes of the copies for rotation in place; None: no limit. Groups without rotated planes keep
    their cells. Raises `CacheFull` before anything is allocated.
    """
    ways: list[list[_Way]] = []
    for store, table in zip(stores, tables, strict=True):
        ways.append(_ways(store, table.parts_since(max(gone.end, table.first)), room))
        if room is not None:
            room -= store.undo * sum(way.part.n for way in ways[-1] if way.in_place)
    taken: list[list[Run]] = [[] for _ in stores]
    with ExitStack() as undo:
        for store, runs in zip(stores, taken, strict=True):
            undo.callback(store.cells.drop, runs)
        for store, table, of_group, runs in zip(stores, tables, ways, taken, strict=True):
            _shift(store, table, of_group, runs, -len(gone), undo)
        undo.pop_all()
    return taken


def _ways(store: GroupStore, parts: Sequence[Part], room: int | None) -> list[_Way]:
    """Use free cells first, which need no undo copies; the missing ones are rotated in place, from the end."""
    if not store.group.rotations:
        return [_Way(part, in_place=True) for part in parts]
    need = sum(part.n for part in parts)
    missing = max(0, need - store.cells.spare)
    owned = sum(part.n for part in parts if not part.shared)
    if missing > owned or (room is not None and missing * store.undo > room):
        raise CacheFull(store.group.name, need, store.cells.spare)
    ways: list[_Way] = []
    for part in reversed(parts):
        here = 0 if part.shared else min(missing, part.n)
        missing -= here
        if here:
            ways.append(_Way(part.last(here), in_place=True))
        if here < part.n:
            ways.append(_Way(part.first(part.n - here), in_place=False))
    return ways[::-1]


def _shift(store: GroupStore, table: Table, ways: Sequence[_Way], taken: list[Run], by: int, undo: ExitStack) -> None:
    """Shift one group. Appends held cells to `taken` at once and in order, so the caller can drop them on an error.
    `undo` gets what writes back the cells that were rotated in place."""
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
    store.move(sources, targets, by)
    for some in pieces(turned, PIECE) if store.group.rotations else ():
        cells = indices(some, store.device)
        for layer in store.group.layers:
            for name, rotation in store.group.rotations.get(layer, {}).items():
                plane = store.pool.planes(layer)[name]
                undo.callback(plane.restore, cells, plane.content(cells))
                store.pool.rotate(layer, name, cells, cells, rotation, by)
