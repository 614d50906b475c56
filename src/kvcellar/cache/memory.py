"""memory: the face. What one model remembers on the device, for many sequences, a step at a time.

    plan = memory.begin(batch)          # cells are set aside; nothing that was there is touched
    memory.put(layer, k, v)             # in the forward, for every layer of the model
    history = memory.get(layer)
    memory.commit()                     # or commit({seq: k}), or abandon()

Always true:
  * every cell is held as often as tables of sequences and claims hold it, plus once if the open step set it aside;
  * a sequence that an open step began has nothing but what is set aside for that step, and goes with it;
  * every cell that a sequence holds was written since it was taken, in all planes of all layers of its group;
  * an operation that raises has changed nothing; `abandon` leaves the memory as it was before `begin`.

A memory has one owner and is not re-entrant: one step is open at a time, and sequences are not edited while it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcellar.cache.claims import Claims
from kvcellar.cache.group import PIECE, Fragments, Group, GroupStore, check_groups, check_written
from kvcellar.cache.history import Columns, StoredHistory
from kvcellar.cache.inputs import Planes, check_planes, write
from kvcellar.cache.plans import accepted_counts, check_query, group_plan, indices, worst_case, write_index
from kvcellar.cache.readout import shape_of
from kvcellar.cache.rows import NoRows, Rows
from kvcellar.cache.sequences import Sequences
from kvcellar.cache.shift import shifted
from kvcellar.cache.states import At, States
from kvcellar.cache.tables import Table, share_all
from kvcellar.contracts import Backend
from kvcellar.errors import BadRequest, CacheFull, CapacityTooSmall, NotSupported, WrongStage, shown
from kvcellar.plan import Batch, GroupPlan, Plan, Run, StateSegment
from kvcellar.shapes import Recurrent
from kvcellar.spans import Span, whole


@dataclass(slots=True)
class _Step:
    """An open step. `taken[group][feed]` are the runs set aside for it; they are ours until commit hands them over.

    A reserved step has taken nothing and cannot be kept.
    """

    plan: Plan
    batch: Batch
    taken: list[list[list[Run]]]
    writes: list[Tensor | slice]
    prepared: list[Any]
    columns: list[Columns]
    opened: list[int]  # sequences that did not exist before
    reserved: bool = False
    written: set[tuple[int, str]] = field(default_factory=set)  # layers and planes


class Memory:
    """Many sequences' memory of one model. `groups` must cover every layer that stores K/V, each layer once, and
    `recurrent` every layer that keeps a state.

    `cells` is how many cells each group gets, by its name. Of `rows` states each sequence has one, and takes another in
    each step. Those that are only kept to go back to are for the owner to evict: see `policy.trim`.
    `backend` serves all groups, or is given by group name. `limits` is how many tokens a sequence may have: one number
    for all, or by sequence (others have no limit).

    `max_bytes` is a cap on planes, scratch and staging together. Scratch is what a step takes besides (the engine
    measures it and says so with `leave_room`); staging is what an edit takes for a moment. Raises `CapacityTooSmall` if
    they do not fit.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        cells: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device | str,
        backend: Backend | Mapping[str, Backend],
        limits: int | Mapping[int, int] | None = None,
        max_bytes: int | None = None,
        recurrent: Recurrent | None = None,
        rows: int = 0,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.max_bytes, self.scratch = max_bytes, 0
        check_groups(groups, cells, backend)
        recurrent = recurrent if recurrent is not None else Recurrent({})
        chosen = {g.name: backend[g.name] if isinstance(backend, Mapping) else backend for g in groups}
        planned = sum(g.bytes(cells[g.name], dtype.itemsize, chosen[g.name]) for g in groups)
        planned += recurrent.bytes * (rows + 1)
        staging = max((g.staging(cells[g.name], dtype.itemsize) for g in groups), default=0)
        self._check_room(planned, 0, staging, "lower cells")
        self._held: list[GroupStore] = []
        self._group_of: dict[int, int] = {}
        # Tables of tokens come first, so that the first one of a sequence says how long it is.
        for index, group in enumerate(sorted(groups, key=lambda group: group.of_input)):
            self._held.append(GroupStore.new(group, chosen[group.name], cells[group.name], dtype, self.device))
            self._group_of.update(dict.fromkeys(group.layers, index))
        self._states = States(recurrent, rows=rows, device=self.device)
        self._sequences = Sequences(self._held, self._states.rows)
        shape = shape_of(self.groups, dtype, recurrent)
        self.claims = Claims(self._held, self._sequences, self._states, shape, self._idle, self._check_limit)
        self._limits = limits
        self._step: _Step | None = None

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(held.group for held in self._held)

    @property
    def bytes(self) -> int:
        """Bytes of all planes of all groups, of the matrices that rotate what is quantised, and of all states."""
        return sum(held.pool.bytes for held in self._held) + self._states.bytes

    @property
    def staging(self) -> int:
        """Bytes that an edit takes for a moment, at most."""
        return max((held.staging for held in self._held), default=0)

    @property
    def in_step(self) -> bool:
        return self._step is not None

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences.records)

    def free(self) -> dict[str, int]:
        """Free cells of each group."""
        return {held.group.name: held.cells.free for held in self._held}

    def capacity(self) -> dict[str, int]:
        """Cells of each group, free or not."""
        return {held.group.name: held.cells.capacity for held in self._held}

    @property
    def rows(self) -> Rows | NoRows:  # for `policy.trim`
        return self._states.rows

    def free_rows(self) -> int | None:  # None in a model without recurrent layers
        return self._states.rows.free

    def capacity_rows(self) -> int | None:
        """Rows of recurrent state, free or not, the null row apart; None in a model without."""
        return self._states.rows.capacity

    def points(self, seq: int) -> tuple[int, ...] | None:
        """The positions behind 0 whose recurrent state is there, in order; None in a model without."""
        return self._states.rows.points(seq)

    def has(self, seq: int) -> bool:
        return seq in self._sequences.records

    def length(self, seq: int) -> int:
        """The position that the next token of `seq` will have; 0 for a sequence that is not there."""
        return self._sequences.length(seq)

    def held(self, seq: int) -> dict[str, Span]:
        """The positions that `seq` still holds in each group; of its input, in groups of that."""
        tables = self._sequences.known(seq)
        return {held.group.name: Span(table.first, table.end) for held, table in zip(self._held, tables, strict=True)}

    def can_resume(self, seq: int, pos: int) -> bool:
        """May the next token of `seq` be at `pos`, in every group? Changes nothing."""
        return pos >= 0 and self.can_cut(seq, pos) == pos

    def can_cut(self, seq: int, pos: int) -> int:
        """The largest `kept <= pos` at which all groups can go on once `[kept, end)` is forgotten. Changes nothing.

        A span that looked ahead is kept whole, or not at all. Raises `BadRequest` for what is no position.
        """
        pos = whole(pos, "a position")
        if pos < 0:
            raise BadRequest(f"{pos} is not a position: sequence {seq} begins at 0")
        return self._sequences.can_cut(seq, pos)

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch, *, reserve: bool = False) -> Plan:
        """Set cells aside for the new tokens of `batch` and say what each may see.

        A sequence that is not there yet begins at position 0. Raises `CacheFull` if a group has too few free cells,
        `BadRequest` if a sequence would not go on where it ends, or beyond its limit, or if a row that only asks would
        not see all that it should. Nothing has changed then, nor if the backend raises.

        With `reserve` the step is only tried, to learn what it costs: sequences (there or not) hold all that could be
        seen from the positions they are given, scattered over all cells. It takes nothing and writes to the null cell;
        end it with `abandon`. Raises `CapacityTooSmall` if such a sequence could never be held.
        """
        self._idle("begin")
        if reserve:
            groups = [worst_case(held.group.name, held.group.layout, batch, held.cells.capacity) for held in self._held]
            self._step = self._lay_out(batch, groups, None, [], self._states.rows.null(batch))
            return self._step.plan
        self._admit(batch)
        opened = [feed.seq for feed in batch.feeds if not self.has(feed.seq)]
        taken: list[list[list[Run]]] = [[] for _ in self._held]
        try:
            for seq in opened:
                self._sequences.open(seq)
            for index, of_group in enumerate(taken):
                self._take(index, batch, of_group)
            groups = [self._plan_group(index, batch, taken[index]) for index in range(len(self._held))]
            self._step = self._lay_out(batch, groups, taken, opened, self._states.rows.begin(batch))
        except BaseException:  # a mask too large for the device, say: what was set aside for this step is given back
            self._undo(taken, opened)
            raise
        return self._step.plan

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' k [T,G,D] and v [T,G,Dv] of one layer: the rows of the plan that store, in order.

        Once a step, in any float type. Raises `BadRequest` for other shapes and types, and for a second time.
        """
        self._put("put", layer, {"k": k, "v": v})

    def put_plane(self, layer: int, name: str, values: Tensor) -> None:
        """The same for another plane of the layer, `values` [T,heads,size]; before its k and v, or after them."""
        self._put("put_plane", layer, {name: values})

    def _put(self, what: str, layer: int, new: Mapping[str, Tensor]) -> None:
        step, index = self._open(what), self._index_of(layer)
        held, planes = self._held[index], {(layer, name) for name in new}
        if held.group.of_input:
            raise BadRequest(f"layer {layer} remembers an input, which write_input() writes before the step")
        if planes & step.written:
            names = " and ".join(new)
            raise BadRequest(f"layer {layer} was given its {names} of this step before: nobody stores them twice")
        held.pool.check_new(layer, step.plan.stored, new)
        held.pool.write(layer, step.writes[index], new)
        step.written |= planes

    def get(self, layer: int) -> StoredHistory:
        """What the rows of the open step may see in one layer, as stored, the new tokens included."""
        step, index = self._open("get"), self._index_of(layer)
        held = self._held[index]
        return StoredHistory(held.pool, layer, step.plan.groups[index], step.prepared[index], step.columns[index])

    def attend(self, layer: int, q: Tensor, scoring: Any) -> Tensor:
        """q [T,H,D] -> [T,H,Dv]: the backend of the layer's group, over what `get` answers."""
        return self._held[self._index_of(layer)].backend.attend(q, self.get(layer), scoring)

    def attend_dense(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Any) -> Tensor:
        """The same for a layer that computes its k [N,G,D] and v [N,G,Dv] from what `get(layer).dense()` answered."""
        step, index = self._open("attend_dense"), self._index_of(layer)
        return self._held[index].backend.attend_dense(q, k, v, step.columns[index].visible, scoring)

    def state(self, layer: int, segments: Sequence[StateSegment]) -> dict[str, Tensor]:
        """By plane, what a layer remembers [B,*shape] of segments of the plan, as of before the step; to work on."""
        self._open("state")
        return self._states.read(layer, segments)

    def put_state(
        self, layer: int, segments: Sequence[StateSegment], planes: Mapping[str, Tensor], *, at: At | None = None
    ) -> None:
        """Store planes [B,*shape] of a recurrent layer, as of after the step.

        `at(indices, counts)` answers what the segments of these indices would remember after so many of their tokens,
        the most first. Without it none of them can keep a part.
        """
        self._open("put_state")
        self._states.write(layer, segments, planes, at)

    def commit(self, accepted: Mapping[int, int] | None = None) -> dict[int, int]:
        """Keep the step: of each sequence its first `accepted[seq]` new tokens, all if it is not named.

        Returns the claims of feeds with checkpoints, by sequence, where tokens of it were kept.

        Raises `WrongStage`, and the step stays open, if any token is kept and a layer has not put all its planes.
        A span that looks ahead is accepted whole or not at all. What no next token can need is forgotten only now.
        """
        step = self._open("commit")
        if step.reserved:
            raise WrongStage("commit() of a reserved step: nothing of it was stored; abandon() it")
        counts = accepted_counts(step.batch, accepted or {})
        check_written(self.groups, step.written, step.batch, counts)
        self._states.settle(step.batch, counts)
        made = self.claims.of_step(step.batch, counts, step.taken)  # before anything slides out
        self._states.end()
        self._step = None
        self._sequences.commit(step.batch, counts, step.taken)
        return {seq: self.claims.enter(claim) for seq, claim in made.items()}

    def abandon(self) -> None:
        """Forget the step: the memory is as it was before `begin`."""
        step = self._open("abandon")
        self._step = None
        self._undo(step.taken, step.opened)

    # -- sequences ----------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, upto: int) -> int:
        """Make `dst` share the first `kept <= upto` tokens of `src`, its input, and nothing else; answers `kept`.

        `kept` is less than `upto` only where `src` no longer holds what going on at `upto` needs, or where a span that
        looked ahead would be parted (see `can_cut`). Whatever `dst` was before is forgotten. Copies integers, no K/V.
        Raises `BadRequest` if `kept` is beyond the limit of `dst`; nothing has changed then.
        """
        self._idle("fork")
        self._sequences.known(src)
        dst = whole(dst, "a sequence")
        if src == dst:
            raise BadRequest(f"sequence {src} cannot be forked onto itself")
        kept = self.can_cut(src, upto)
        self._check_limit(dst, kept, "fork")
        self._sequences.fork(src, dst, kept)
        return kept

    def remove(self, seq: int, span: Span) -> int:
        """Forget `span`. What lies behind it moves down, its keys turned to their new positions (context shift).

        Answers how many tokens the sequence has now, which is `length - len(span)`. Any smaller answer means that
        nothing has changed, because going on would need what is no longer held, or a span that looked ahead would be
        parted; that many tokens could be kept: remove all from there on, and read what is missing again. A sequence
        that was edited in the middle is *derived*: its K/V still encode what was removed (see `derived`).

        Keys that move are written to free cells. Where too few are free, those that no other sequence shares are turned
        in the cells they are in, which the removal would free; what was there is kept until it is complete, in what
        `max_bytes` leaves beside planes and staging (a step's scratch too: none is open).

        Raises `NotSupported` if the keys of some group cannot be turned exactly, `CacheFull` if keys that are shared
        need more cells than are free, or there is too little room for what was there; nothing has changed then.
        """
        self._idle("remove")
        if type(span) is not Span:
            raise BadRequest(f"what is removed is a Span, not {shown(span)}")
        tables, length = self._sequences.known(seq), self.length(seq)
        if not len(span) and span.end < length:
            return length
        kept = self.can_cut(seq, span.start)
        if span.end >= length:
            if kept in (span.start, length):
                self._sequences.cut(seq, kept)
            return kept
        if not self._sequences.can_close_over(seq, span):
            return kept
        for held, table in zip(self._held, tables, strict=True):
            if held.group.no_shift is not None:
                raise NotSupported(f"{held.group.name} layers cannot be shifted: {held.group.no_shift}", kept)
            if not held.group.layout.can_shift(table.first, length, span):
                return kept
        room = None if self.max_bytes is None else self.max_bytes - self.bytes - self.staging
        self._sequences.close_over(seq, span, shifted(self._held, tables, span, self.device, room))
        return length - len(span)

    def capture(self, seq: int) -> None:
        """Keep the recurrent state that `seq` has now, to go back to, as a feed with `capture` does at its end."""
        self._idle("capture")
        self._sequences.known(seq)
        self._states.rows.capture(seq)

    # -- inputs -------------------------------------------------------------------------------------------------

    def input_length(self, seq: int) -> int:
        """How many positions the input of `seq` has; 0 if it was given none, or is not there."""
        return self._sequences.input_length(seq)

    def write_input(self, seq: int, n: int, planes: Planes, *, digest: str | None = None) -> bool:
        """Give `seq`, which may be new, what an encoder made of its input: for each layer k [n,G,D] and v [n,G,Dv].

        It is read by every row of the sequence in every step from now on, and goes with the sequence: forks share it,
        and whatever is removed of the text leaves it. Where a sequence with the same `digest` is in memory its cells
        are shared and nothing is written; answers whether something was. Raises `BadRequest` if the sequence has an
        input or the planes are not those of all such layers, `CacheFull` if a group has too few free cells; nothing has
        changed then.
        """
        self._idle("write_input")
        seq = whole(seq, "a sequence")
        inputs = [held for held in self._held if held.group.of_input]
        n = whole(n, "the length of an input")
        check_planes(inputs, n, planes)
        if self.share_input(seq, digest, n):
            return False
        self._sequences.give_input(seq, digest, lambda: write(inputs, n, planes, self.device))
        return True

    def share_input(self, seq: int, digest: str | None, n: int | None = None) -> bool:
        """Give `seq`, which may be new, the input of this digest, if a sequence or claim has it; answers whether.

        So the encoder need not even run. Raises `BadRequest` if `seq` has an input, or if that one is not `n` long.
        """
        self._idle("share_input")
        seq = whole(seq, "a sequence")
        if length := self.input_length(seq):
            raise BadRequest(f"sequence {seq} has an input of {length} positions, and can have no other")
        tables = (self._sequences.input(digest) or self.claims.input(digest)) if digest is not None else None
        if tables is None:
            return False
        if n not in (None, length := tables[0].end):
            raise BadRequest(f"the input of digest {shown(digest)} has {length} positions, not {n}")
        self._sequences.give_input(seq, digest, lambda: share_all(tables, 0))
        return True

    def read_input(self, layer: int, plane: str, seqs: Sequence[int]) -> Tensor:
        """A plane [B,n,heads,size] of the inputs of sequences, all of which are n long, in a step or between two."""
        held, index = self._held[self._index_of(layer)], self._index_of(layer)
        lengths = {self.input_length(seq) for seq in seqs}
        if len(lengths) != 1 or not held.group.of_input:
            raise BadRequest(f"the inputs of sequences {list(seqs)} are {sorted(lengths)} long in layer {layer}")
        cells = indices([run for seq in seqs for run in self._sequences.known(seq)[index].runs], self.device)
        return held.pool.read(layer, plane, cells).unflatten(0, (len(seqs), -1))

    # -- storage ------------------------------------------------------------------------------------------------

    def leave_room(self, scratch: int) -> None:
        """From now on `scratch` bytes belong to the steps. Raises `CapacityTooSmall` if they do not fit the cap."""
        if whole(scratch, "scratch") < 0:
            raise BadRequest(f"a step cannot take {scratch} bytes of scratch; say 0 or more")
        self._check_room(self.bytes, scratch, self.staging, "lower cells or step_tokens")
        self.scratch = scratch

    def fragments(self) -> dict[str, Fragments]:
        """How the cells of each group lie, for deciding about `compact`. Costs the sequences and claims."""
        return {held.group.name: held.fragments(self._tables(index)) for index, held in enumerate(self._held)}

    def piece(self, group: str) -> int:
        """How many cells of a group to `compact` at once so that no more bytes move than an edit takes anyway."""
        held = self._named(group)
        each = held.group.bytes_per_cell(held.itemsize)
        return max(1, self.staging // each) if each else PIECE

    def compact(self, budget_cells: int, group: str | None = None) -> int:
        """Move at most `budget_cells` cells together, towards the low ones; answers how many. Tables become fewer runs.

        One piece of one group at a time, of `group` if it is named, so that steps may run in between; no sequence
        changes. 0 means that there is nothing to do, or no free cell to do it with. What is free then lies at the end,
        and `resize` can give it back. Raises `BadRequest` for a budget below 1, and for a group that is not there.
        """
        self._idle("compact")
        if whole(budget_cells, "a budget of cells") < 1:
            raise BadRequest(f"a piece of {budget_cells} cells moves nothing; give it one or more")
        only = self._named(group) if group is not None else None
        for index, held in enumerate(self._held):
            if only is not None and held is not only:
                continue
            if n := held.compact(self._tables(index), budget_cells, self.device):
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
        held = self._named(group)
        if whole(cells, "a capacity in cells") < 1:
            raise BadRequest(f"{group} cannot have {shown(cells)} cells; {self._names}, and one cell is the least")
        if cells != held.cells.capacity:
            grown = len(held.group.layers) * (held.pool.layer_bytes(cells) - held.pool.layer_bytes(held.cells.capacity))
            others = max((h.staging for h in self._held if h is not held), default=0)
            staging = max(others, held.group.staging(cells, held.itemsize), held.peak(cells) - max(grown, 0))
            way_out = f"resize {group} to fewer cells than {cells}"
            self._check_room(self.bytes + max(grown, 0), self.scratch, staging, way_out)
            held.resize(cells)

    def derived(self, seq: int) -> int | None:
        """From which position on the K/V of `seq` encode text that was removed; None if they encode just its tokens."""
        return self._sequences.derived(seq)

    def drop(self, seq: int) -> None:
        """Forget a whole sequence. Never fails for one that is there."""
        self._idle("drop")
        self._sequences.drop(seq)

    def clear(self) -> None:
        """Forget everything, an open step too."""
        if self._step is not None:
            self.abandon()
        self.claims.clear()
        for seq in self.sequences:
            self.drop(seq)

    # -- inside -------------------------------------------------------------------------------------------------

    def _tables(self, index: int) -> list[Table]:  # all that hold cells of a group
        return self._sequences.tables(index) + self.claims.tables(index)

    def _named(self, group: str) -> GroupStore:
        held = next((held for held in self._held if held.group.name == group), None)
        if held is None:
            raise BadRequest(f"there is no group {shown(group)}; {self._names}")
        return held

    @property
    def _names(self) -> str:
        return "the groups are " + (", ".join(held.group.name for held in self._held) or "none")

    def _check_room(self, planes: int, scratch: int, staging: int, way_out: str) -> None:
        need = planes + scratch + staging
        if self.max_bytes is not None and need > self.max_bytes:
            raise CapacityTooSmall(
                f"{need} bytes would be needed: {planes} for planes, {scratch} for a step's scratch, {staging} "
                f"for staging; {self.max_bytes} are allowed. Raise max_bytes (cache_bytes), or {way_out}."
            )

    def _idle(self, what: str) -> None:
        if self._step is not None:
            raise WrongStage(f"{what}() while a step is open: commit() or abandon() it first")

    def _open(self, what: str) -> _Step:
        if self._step is None:
            raise WrongStage(f"{what}() needs an open step: begin() one first")
        return self._step

    def _index_of(self, layer: int) -> int:
        index = self._group_of.get(layer)
        if index is None:
            raise BadRequest(f"layer {layer} is in no group of this memory")
        return index

    def _admit(self, batch: Batch) -> None:
        """Raise what `begin` raises of a batch that cannot be."""
        for feed in batch.feeds:
            if not feed.stores:
                for held, table in zip(self._held, self._sequences.known(feed.seq), strict=True):
                    check_query(held.group.name, held.group.layout, feed, table)
                continue
            if feed.pos.start != self.length(feed.seq):
                raise BadRequest(f"sequence {feed.seq} goes on at {self.length(feed.seq)}, not at {feed.pos.start}")
            self._check_limit(feed.seq, feed.pos.end, "step")
        self._states.rows.admit(batch)
        need = batch.stored
        for held in self._held:
            if held.cells.free < need and not held.group.of_input:
                raise CacheFull(held.group.name, need, held.cells.free)

    def _check_limit(self, seq: int, length: int, what: str) -> None:
        limit = self._limits.get(seq) if isinstance(self._limits, Mapping) else self._limits
        if limit is not None and length > limit:
            raise BadRequest(f"sequence {seq} may have {limit} tokens; this {what} would bring {length}")

    def _take(self, index: int, batch: Batch, taken: list[list[Run]]) -> None:
        """Add to `taken` the cells of each feed as they are set aside, so that whoever gives them back has them all."""
        held = self._held[index]
        for feed in batch.feeds:
            table, n = self._sequences.known(feed.seq)[index], len(feed.pos)
            stores = feed.stores and not held.group.of_input
            taken.append(held.cells.take(n, table.last_cell, table.first_cell) if stores else [])

    def _plan_group(self, index: int, batch: Batch, taken: list[list[Run]]) -> GroupPlan:
        group = self._held[index].group
        tables = {feed.seq: self._sequences.known(feed.seq)[index] for feed in batch.feeds}
        return group_plan(group.name, group.layout, batch, tables, taken)

    def _lay_out(
        self,
        batch: Batch,
        groups: Sequence[GroupPlan],
        taken: list[list[list[Run]]] | None,
        opened: list[int],
        states: tuple[StateSegment, ...],
    ) -> _Step:
        """The step of these plans; a reserved one, whose rows are written to the null cell, if nothing was taken."""
        if taken is None:
            null = torch.zeros(batch.stored, dtype=torch.long, device=self.device)
            writes: list[Tensor | slice] = [null for _ in groups]
        else:
            writes = [write_index(runs, self.device) for runs in taken]
        return _Step(
            Plan(batch.tokens, batch.feeds, tuple(groups), batch.stored, batch.look_ahead, states),
            batch,
            taken if taken is not None else [[] for _ in groups],
            writes,
            prepared=[h.backend.prepare(g, self.device) for h, g in zip(self._held, groups, strict=True)],
            columns=[Columns(group, batch.tokens, self.device) for group in groups],
            opened=opened,
            reserved=taken is None,
        )

    def _undo(self, taken: list[list[list[Run]]], opened: list[int]) -> None:
        """Give back what a step has set aside so far: `taken` may stop before the last group."""
        for held, of_group in zip(self._held, taken, strict=False):
            for runs in of_group:
                held.cells.drop(runs)
        self._states.end()
        self._states.rows.abandon()
        for seq in filter(self.has, opened):  # all of them, but if it was opening them that failed
            self._sequences.drop(seq)

    def check(self) -> None:
        """Assert every invariant of the memory, its sequences and its cells."""
        for index, held in enumerate(self._held):
            runs = [run for table in self._tables(index) for run in table.runs]
            if self._step is not None:
                runs += [run for of_feed in self._step.taken[index] for run in of_feed]
            held.check(runs)
        if self._step is not None:
            assert not any(map(self.length, self._step.opened)), "a sequence has tokens of a step that was not kept"
        self._states.check()
        self._sequences.check()
        self.claims.check()
