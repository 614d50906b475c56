"""storage: how many cells each group of a memory has, what they cost in bytes, and how they lie.

Always true:
  * planes, scratch and staging together are within `max_bytes`;
  * an operation that raises has changed nothing.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from kvcellar.cache.group import PIECE, Fragments, Group, Stores
from kvcellar.cache.states import States
from kvcellar.contracts import Backend
from kvcellar.errors import BadRequest, CapacityTooSmall, shown
from kvcellar.shapes import Recurrent
from kvcellar.spans import whole


def check_planned(
    groups: Sequence[Group],
    cells: Mapping[str, int],
    backends: Mapping[str, Backend],
    dtype: torch.dtype,
    recurrent: Recurrent,
    rows: int,
    max_bytes: int | None,
) -> None:
    """Raise `CapacityTooSmall` if a memory of these groups would take more than `max_bytes`."""
    planes = sum(group.bytes(cells[group.name], dtype.itemsize, backends[group.name]) for group in groups)
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


class Storage:
    """The cells and bytes of one memory."""

    def __init__(
        self,
        stores: Stores,
        states: States,
        max_bytes: int | None,
        idle: Callable[[str], None],
    ) -> None:
        """`idle(operation)` raises `WrongStage` while a step is open."""
        self._stores, self._states, self._idle = stores, states, idle
        self.max_bytes, self.scratch = max_bytes, 0

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(store.group for store in self._stores.all)

    @property
    def bytes(self) -> int:
        """Bytes of all planes of all groups, of the matrices that rotate what is quantised, and of all states."""
        return sum(store.pool.bytes for store in self._stores.all) + self._states.bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the step tables, which stay between steps and belong to the scratch of steps."""
        return self._stores.tables.bytes + sum(store.step.tables.bytes for store in self._stores.all)

    @property
    def staging(self) -> int:
        """Bytes that an edit takes for a moment, at most."""
        return max((store.staging for store in self._stores.all), default=0)

    @property
    def spare(self) -> int | None:
        """Bytes that the cap leaves between steps, beside planes and staging; None without a cap."""
        return None if self.max_bytes is None else self.max_bytes - self.bytes - self.staging

    def free(self) -> dict[str, int]:
        """Free cells of each group."""
        return {store.group.name: store.cells.free for store in self._stores.all}

    def capacity(self) -> dict[str, int]:
        """Cells of each group, free or not."""
        return {store.group.name: store.cells.capacity for store in self._stores.all}

    def fragments(self) -> dict[str, Fragments]:
        """How the cells of each group lie, for deciding about `compact`. Costs their pieces."""
        return {store.group.name: store.fragments() for store in self._stores.all}

    def leave_room(self, scratch: int) -> None:
        """From now on `scratch` bytes belong to the steps. Raises `CapacityTooSmall` if they do not fit the cap."""
        if whole(scratch, "scratch") < 0:
            raise BadRequest(f"a step cannot take {scratch} bytes of scratch; say 0 or more")
        _check_room(self.max_bytes, self.bytes, scratch, self.staging, "lower cells or step_tokens")
        self.scratch = scratch

    def piece(self, group: str) -> int:
        """How many cells of a group to `compact` at once so that no more bytes move than an edit takes anyway."""
        store = self._stores.named(group)
        each = store.group.bytes_per_cell(store.itemsize)
        return max(1, self.staging // each) if each else PIECE

    def compact(self, budget_cells: int, group: str | None = None) -> int:
        """Move at most `budget_cells` cells together, towards the low ones; returns how many. Tables become fewer runs.

        One piece of one group at a time, of `group` if it is named, so that steps may run in between; no sequence
        changes. 0 means that there is nothing to do, or no free cell to do it with. What is free then lies at the end,
        and `resize` can give it back. Raises `BadRequest` for a budget below 1, and for a group that is not there.
        """
        self._idle("compact")
        if whole(budget_cells, "a budget of cells") < 1:
            raise BadRequest(f"a piece of {budget_cells} cells moves nothing; give it one or more")
        only = self._stores.named(group) if group is not None else None
        for store in self._stores.all if only is None else [only]:
            if n := store.compact(budget_cells):
                return n
        return 0

    def resize(self, group: str, cells: int) -> None:
        """Let a group have `cells` cells, more or fewer. One layer at a time is copied, within the cap.

        Raises `CapacityTooSmall` if the copy, or what is there afterwards, does not fit the cap, or if a cell that
        would go is in use (`compact` first). Nothing has changed then, nor if an allocation fails: what was done is put
        back. Should that fail, too, all tokens are still held; a group that was to grow has the cells it had, one that
        was to shrink has `cells`, and layers that could not be put back, or were not reached, have room for more.
        """
        self._idle("resize")
        store = self._stores.named(group)
        if whole(cells, "a capacity in cells") < 1:
            raise BadRequest(
                f"{group} cannot have {shown(cells)} cells; {self._stores.names}, and one cell is the least"
            )
        if cells == store.cells.capacity:
            return
        more = store.pool.layer_bytes(cells) - store.pool.layer_bytes(store.cells.capacity)
        grown = max(0, len(store.group.layers) * more)
        others = max((one.staging for one in self._stores.all if one is not store), default=0)
        staging = max(others, store.group.staging(cells, store.itemsize), store.peak(cells) - grown)
        way_out = f"resize {group} to fewer cells than {cells}"
        _check_room(self.max_bytes, self.bytes + grown, self.scratch, staging, way_out)
        store.resize(cells)
