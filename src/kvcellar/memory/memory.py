"""memory: the interface: K/V and recurrent state of one model on the device, for many sequences, step by step.

    plan = memory.begin(batch)          # allocates cells; existing sequences do not change
    memory.put(layer, k, v)             # in the forward, for every layer of the model
    history = memory.get(layer)
    memory.commit()                     # or commit({seq: k}), or abandon()

Always true:
  * every cell has as many holders as tables of sequences and claims contain it, and one more if the open step
    allocated it;
  * a new sequence has only what the open step allocated for it, and is dropped if the step is abandoned;
  * every cell that a sequence holds was written since its allocation, in all planes of all layers of its group;
  * an operation that raises has changed nothing; `abandon` leaves the memory as it was before `begin`;
  * cells and rows that are reserved for steps are taken by steps only.

A memory has one owner and is not re-entrant: one step is open at a time, and sequences are not edited meanwhile.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcellar.errors import BadRequest, NotSupported, WrongStage, shown
from kvcellar.memory.kv.claim import Claim
from kvcellar.memory.kv.claims import Claims
from kvcellar.memory.kv.group import Group, check_groups
from kvcellar.memory.kv.history import Backend, LayerHistory
from kvcellar.memory.kv.inputs import Inputs
from kvcellar.memory.kv.readout import shape_of
from kvcellar.memory.kv.sequences import Sequences
from kvcellar.memory.kv.shift import shifted
from kvcellar.memory.kv.states import States
from kvcellar.memory.kv.storage import Storage, check_planned
from kvcellar.memory.plan import Batch, Plan, Run
from kvcellar.memory.shapes import Recurrent
from kvcellar.memory.spans import Span, whole
from kvcellar.memory.step import Step


class Memory:
    """The memory of many sequences of one model. `groups` must contain every layer that stores K/V, each layer once,
    and `recurrent` every layer that keeps a state.

    `cells` is the number of cells of each group, by name. Of `rows` state rows each sequence has one, and allocates
    another in each step; the owner evicts those that are only checkpoints (`rows.trim`). `backend` serves all groups,
    or is given by group name. `limits`: the most tokens of a sequence, for all or by sequence (others have no limit).

    `max_bytes` is a cap on planes, scratch and staging together. Scratch is temporary memory of a step (the engine
    measures it and reserves it with `storage.leave_room`), staging that of an edit. Raises `CapacityTooSmall` if they
    do not fit.

    Beside steps and sequences: `storage` has capacities and bytes, `inputs` the inputs of encoders, `claims` the holds
    that are not sequences, `states` the recurrent states of a step, and `rows` the counts of their rows.
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
        check_groups(groups, cells, backend)
        self.recurrent = recurrent = recurrent if recurrent is not None else Recurrent({})
        backends = backend if isinstance(backend, Mapping) else dict.fromkeys((group.name for group in groups), backend)
        check_planned(groups, cells, dtype, recurrent, rows, max_bytes)
        self.states = States(recurrent, rows=rows, device=self.device)
        self.rows = self.states.rows
        self.storage = Storage(groups, cells, backends, dtype, self.states, max_bytes, self._idle)
        self.tables = self.storage.tables  # step tables of all groups together
        self.layers = self.storage.layers  # what `get` returns, by layer: the same objects in every step
        self._sequences = Sequences(self.storage.stores, self.states, limits)
        shape = shape_of(self.storage.groups, dtype, recurrent)
        self.claims = Claims(self.storage.stores, self._sequences, self.states, shape, self._idle)
        self.inputs = Inputs(self.storage, self._sequences, self.claims, self._idle)
        self.step: Step | None = None  # the open one

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences.records)

    def has(self, seq: int) -> bool:
        return seq in self._sequences.records

    def length(self, seq: int) -> int:
        """The position that the next token of `seq` will have; 0 for an unknown sequence."""
        return self._sequences.length(seq)

    def held(self, seq: int) -> dict[str, Span]:
        """The positions that `seq` holds in each group; in input groups, those of its input."""
        tables = zip(self.storage.stores, self._sequences.known(seq), strict=True)
        return {store.group.name: Span(table.first, table.end) for store, table in tables}

    def derived(self, seq: int) -> int | None:
        """The position from which on K/V of `seq` encode text that was removed; None if there is none."""
        return self._sequences.record(seq).derived

    def state_positions(self, seq: int) -> tuple[int, ...] | None:
        """The positions behind 0 whose recurrent state is held, in order; None without recurrent layers."""
        return self._sequences.record(seq).states.positions

    def state(self, seq: int) -> list[Tensor]:
        """Copies of the present recurrent state of a sequence that has tokens, by layer and plane."""
        return self.states.content(self._sequences.record(seq).states.row)

    def free(self) -> dict[str, int]:
        """Free cells of each group, those that are reserved for steps among them."""
        return {store.group.name: store.cells.free for store in self.storage.stores}

    def spare(self) -> dict[str, int]:
        """Free cells of each group that are not reserved: what edits, inputs and restored snapshots may take."""
        return {store.group.name: store.cells.spare for store in self.storage.stores}

    def used(self, seqs: Collection[int] | None = None) -> dict[str, int]:
        """How many cells of each group these sequences hold, by default all; a shared one counts once. Claims may hold
        others. Costs the runs of the sequences."""
        return {store.group.name: self._sequences.cells(index, seqs) for index, store in enumerate(self.storage.stores)}

    def runs(self, seq: int) -> list[tuple[Run, ...]]:
        """The cells that a sequence holds in each group. Raises `UnknownSequence`."""
        return [tuple(table.runs) for table in self._sequences.known(seq)]

    def can_cut(self, seq: int, pos: int) -> int:
        """The largest position up to `pos` at which all groups can resume if all behind it is removed. Changes nothing.

        A span that looked ahead is kept whole, or not at all. Raises `BadRequest` if `pos` is not a position.
        """
        pos = whole(pos, "a position")
        if pos < 0:
            raise BadRequest(f"{pos} is not a position: sequence {seq} begins at 0")
        return self._sequences.can_cut(seq, pos)

    # -- a step -------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int, sequences: int = 0) -> None:
        """Reserve a cell of each group for each of `tokens` new tokens of the steps to come, and a state row for each
        of `sequences`, in place of what was reserved before. Until these steps begin nothing else can take them. The
        owner has made sure that so many cells are free; rows may become free until then."""
        self._idle("reserve")
        for store in self.storage.stores:
            if not store.group.of_input:
                assert tokens <= store.cells.free, f"{tokens} cells of {store.group.name} are promised and not free"
                store.cells.reserved = tokens
        self.rows.reserved = sequences

    def begin(self, batch: Batch, *, reserve: bool = False) -> Plan:
        """Open a step: allocate cells for the new tokens of `batch`, and plan what each token sees.

        An unknown sequence begins at position 0. Raises `CacheFull` if a group has too few free cells, `BadRequest` if
        a sequence does not continue at its end, or exceeds its limit, or if cells that a query-only row should see are
        not held. Nothing has changed then, nor if the backend raises.

        With `reserve` the step only measures the cost: sequences, known or not, hold all that is visible from the given
        positions, scattered over all cells. It allocates nothing and writes to the null cell; end it with `abandon`.
        Raises `CapacityTooSmall` if such a sequence could never be held.
        """
        self._idle("begin")
        start = Step.reserve if reserve else Step.open
        self.step = start(self.storage, self._sequences, self.states, batch)
        if not reserve:
            self._use_reserved(batch)
        return self.step.plan

    @contextmanager
    def stepping(self, batch: Batch, *, reserve: bool = False) -> Iterator[Plan]:
        """`begin`; a step that is still open at the end of the block is abandoned."""
        plan = self.begin(batch, reserve=reserve)
        try:
            yield plan
        finally:
            if self.step is not None:
                self.abandon()

    def _use_reserved(self, batch: Batch) -> None:
        for store in self.storage.stores:
            store.cells.reserved = max(0, store.cells.reserved - batch.stored)
        self.rows.reserved = max(0, self.rows.reserved - len(batch.feeds))

    def put(self, layer: int, k: Tensor | None = None, v: Tensor | None = None, **planes: Tensor) -> None:
        """Store k [T,G,D] and v [T,G,Dv] of one layer, for the rows of the plan that store, in order.

        Other `planes` [T,heads,size] are passed by name, with k and v or apart. Each once per step, in any float type.
        Raises `BadRequest` for other planes, shapes and types, and for a second time.
        """
        given = {"k": k, "v": v, **planes}
        self._open("put").put(layer, {name: plane for name, plane in given.items() if plane is not None})

    def get(self, layer: int) -> LayerHistory:
        """One layer in the open step: what its rows see, as stored, the new tokens included."""
        return self._open("get").get(layer)

    def attend(self, layer: int, q: Tensor, scoring: Any, *, dense: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """q [T,H,D] -> [T,H,Dv]: the backend of the layer's group, over what `get` returns.

        `dense` are k [N,G,D] and v [N,G,Dv] of a layer that computes them from what `get(layer).dense()` returned.
        """
        return self._open("attend").attend(layer, q, scoring, dense)

    def commit(self, accepted: Mapping[int, int] | None = None) -> dict[int, int]:
        """End the step: keep the first `accepted[seq]` new tokens of each sequence, by default all.

        Returns the claims that feeds ask for, by sequence, if tokens of them are kept. Cells that slide out of
        windows are freed only now.

        Raises `WrongStage`, and the step stays open, if any token is kept and a layer has not put all its planes.
        A span that looks ahead is accepted whole or not at all.
        """
        step = self._open("commit")
        counts = step.counts(accepted or {})
        self.states.settle(step.batch, counts)
        made: dict[int, Claim] = {}
        if any(feed.claims for feed in step.batch.feeds):
            made = self.claims.of_step(step.batch, counts, step.taken)  # before cells slide out of windows
        self.step = None
        self._sequences.commit(step.batch, counts, step.taken)
        step.end()
        return {seq: self.claims.enter(claim) for seq, claim in made.items()}

    def abandon(self) -> None:
        """End the step without a change: the memory is as before `begin`."""
        step = self._open("abandon")
        self.step = None
        step.abandon()

    # -- sequences ----------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, upto: int) -> int:
        """Replace `dst` by a sequence that shares the input and the first `can_cut(src, upto)` tokens of `src`;
        returns their number.

        Copies integers, no K/V. Raises `BadRequest` if they exceed the limit of `dst`; nothing has changed then.
        """
        self._idle("fork")
        self._sequences.known(src)
        dst = whole(dst, "a sequence")
        if src == dst:
            raise BadRequest(f"sequence {src} cannot be forked onto itself")
        kept = self.can_cut(src, upto)
        self._sequences.check_limit(dst, kept, "fork")
        self._sequences.fork(src, dst, kept)
        return kept

    def remove(self, seq: int, span: Span) -> int:
        """Remove the tokens of `span`; returns the new length. Tokens behind the span move down, and their keys are
        rotated to the new positions (context shift).

        Either exactly the tokens in the span are removed, or `NotSupported` is raised and nothing has changed: if
        resuming needs what is no longer held, if a span that looked ahead would be split, or if the keys of a group
        cannot be rotated exactly. Its `kept` is the largest position up to the span at which all can resume: remove all
        from there on, and compute the missing tokens again. A sequence that was edited in the middle is *derived*: its
        K/V still encode the removed tokens (see `derived`).

        Rotated keys are written to free cells. If too few are free, those that are not shared are rotated in place. A
        copy of them is kept for undo, in the bytes that `max_bytes` leaves beside planes and staging. Raises
        `CacheFull` if shared keys need more cells than are free, or if the copy does not fit; nothing has changed then.
        """
        self._idle("remove")
        if type(span) is not Span:
            raise BadRequest(f"remove() needs a Span, not {shown(span)}")
        tables, length = self._sequences.known(seq), self.length(seq)
        gone = Span(min(span.start, length), min(span.end, length))
        if not len(gone):
            return length
        if (reason := self._sequences.refusal(seq, gone)) is not None:
            raise NotSupported(reason, self.can_cut(seq, gone.start))
        if gone.end == length:
            self._sequences.cut(seq, gone.start)
        else:
            behind = shifted(self.storage.stores, tables, gone, self.storage.spare)
            self._sequences.close_over(seq, gone, behind)
        return length - len(gone)

    def drop(self, seq: int) -> None:
        """Drop a sequence. Never fails for a known one."""
        self._idle("drop")
        self._sequences.drop(seq)

    def clear(self) -> None:
        """Drop all sequences and claims, abandon an open step, and reserve nothing."""
        if self.step is not None:
            self.abandon()
        self.reserve(0)
        self.claims.clear()
        for seq in self.sequences:
            self.drop(seq)

    # -- inside -------------------------------------------------------------------------------------------------

    def _idle(self, what: str) -> None:
        if self.step is not None:
            raise WrongStage(f"{what}() while a step is open: commit() or abandon() it first")

    def _open(self, what: str) -> Step:
        if self.step is None:
            raise WrongStage(f"{what}() needs an open step: begin() one first")
        return self.step

    def check(self) -> None:
        """Assert every invariant of the memory, its sequences and its cells."""
        for index, store in enumerate(self.storage.stores):
            taken = self.step.taken[index] if self.step is not None else []
            tables = self._sequences.tables(index) + self.claims.tables(index)
            store.check(tables, [run for of_feed in taken for run in of_feed])
        if self.step is not None:
            self.step.check()
        self.states.check()
        self._sequences.check()
        self.claims.check()
        states = (record.states for record in self._sequences.records.values())
        self.rows.check(states, self.states.step_rows.held() + self.claims.held_rows())
