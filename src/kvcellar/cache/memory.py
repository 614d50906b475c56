"""memory: the interface. What one model remembers on the device, for many sequences, a step at a time.

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
from typing import Any

import torch
from torch import Tensor

from kvcellar.cache.claims import Claims
from kvcellar.cache.group import Group, Stores, check_groups
from kvcellar.cache.history import LayerHistory
from kvcellar.cache.inputs import Inputs
from kvcellar.cache.readout import shape_of
from kvcellar.cache.sequence_states import check_all
from kvcellar.cache.sequences import Sequences
from kvcellar.cache.shift import shifted
from kvcellar.cache.states import States
from kvcellar.cache.step import Step
from kvcellar.cache.storage import Storage, check_planned
from kvcellar.contracts import Backend
from kvcellar.errors import BadRequest, NotSupported, WrongStage, shown
from kvcellar.plan import Batch, Plan
from kvcellar.shapes import Recurrent
from kvcellar.spans import Span, whole


class Memory:
    """Many sequences' memory of one model. `groups` must cover every layer that stores K/V, each layer once, and
    `recurrent` every layer that keeps a state.

    `cells` is how many cells each group gets, by its name. Of `rows` states each sequence has one, and takes another in
    each step. Those that are only kept to go back to are for the owner to evict: see `policy.trim`.
    `backend` serves all groups, or is given by group name. `limits` is how many tokens a sequence may have: one number
    for all, or by sequence (others have no limit).

    `max_bytes` is a cap on planes, scratch and staging together. Scratch is what a step takes besides (the engine
    measures it and reserves it with `storage.leave_room`); staging is what an edit takes for a moment. Raises
    `CapacityTooSmall` if they do not fit.

    Beside steps and sequences, `storage` has capacities and bytes, `inputs` what encoders made of inputs, `claims`
    the holds that are not sequences, `states` what recurrent layers read and write in a step, and `rows` their rows.
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
        recurrent = recurrent if recurrent is not None else Recurrent({})
        backends = backend if isinstance(backend, Mapping) else dict.fromkeys((group.name for group in groups), backend)
        check_planned(groups, cells, backends, dtype, recurrent, rows, max_bytes)
        self._stores = Stores(groups, cells, backends, dtype, self.device)
        self.tables = self._stores.tables  # what a step fills for all groups together
        self.states = States(recurrent, rows=rows, device=self.device)
        self._sequences = Sequences(self._stores.all, self.states, limits)
        self.rows = self.states.rows
        self.storage = Storage(self._stores, self.states, max_bytes, self._idle)
        shape = shape_of(self.storage.groups, dtype, recurrent)
        self.claims = Claims(self._stores.all, self._sequences, self.states, shape, self._idle)
        self.inputs = Inputs(self._stores, self._sequences, self.claims, self._idle)
        self.step: Step | None = None  # the open one

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences.records)

    def has(self, seq: int) -> bool:
        return seq in self._sequences.records

    def length(self, seq: int) -> int:
        """The position that the next token of `seq` will have; 0 for a sequence that is not there."""
        return self._sequences.length(seq)

    def used(self) -> dict[str, int]:
        """How many cells of each group sequences hold; a shared one counts once. Claims may hold others. Costs the runs
        of all sequences."""
        return {store.group.name: self._sequences.cells(index) for index, store in enumerate(self._stores.all)}

    def held(self, seq: int) -> dict[str, Span]:
        """The positions that `seq` still holds in each group; of its input, in groups of that."""
        tables = zip(self._stores.all, self._sequences.known(seq), strict=True)
        return {store.group.name: Span(table.first, table.end) for store, table in tables}

    def derived(self, seq: int) -> int | None:
        """From which position on the K/V of `seq` encode text that was removed; None if they encode just its tokens."""
        return self._sequences.record(seq).derived

    def state_positions(self, seq: int) -> tuple[int, ...] | None:
        """The positions behind 0 whose recurrent state is there, in order; None in a model without."""
        return self._sequences.record(seq).states.positions

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
        """Set cells aside for the new tokens of `batch` and plan what each may see.

        A sequence that is not there yet begins at position 0. Raises `CacheFull` if a group has too few free cells,
        `BadRequest` if a sequence would not go on where it ends, or beyond its limit, or if a row that only asks would
        not see all that it should. Nothing has changed then, nor if the backend raises.

        With `reserve` the step is only tried, to learn what it costs: sequences (there or not) hold all that could be
        seen from the positions they are given, scattered over all cells. It takes nothing and writes to the null cell;
        end it with `abandon`. Raises `CapacityTooSmall` if such a sequence could never be held.
        """
        self._idle("begin")
        start = Step.reserve if reserve else Step.open
        self.step = start(self._stores, self._sequences, self.states, batch)
        return self.step.plan

    def put(self, layer: int, k: Tensor | None = None, v: Tensor | None = None, **planes: Tensor) -> None:
        """Store the new tokens' k [T,G,D] and v [T,G,Dv] of one layer: the rows of the plan that store, in order.

        Other `planes` [T,heads,size] go by their names, with k and v or apart. Each once a step, in any float type.
        Raises `BadRequest` for other planes, shapes and types, and for a second time.
        """
        given = {"k": k, "v": v, **planes}
        self._open("put").put(layer, {name: plane for name, plane in given.items() if plane is not None})

    def layers(self) -> Mapping[int, LayerHistory]:
        """What `get` returns, by layer. The same objects in every step."""
        self._open("layers")
        return self._stores.layers

    def get(self, layer: int) -> LayerHistory:
        """What the rows of the open step may see in one layer, as stored, the new tokens included."""
        return self._open("get").get(layer)

    def attend(self, layer: int, q: Tensor, scoring: Any, *, dense: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """q [T,H,D] -> [T,H,Dv]: the backend of the layer's group, over what `get` returns.

        `dense` are k [N,G,D] and v [N,G,Dv] of a layer that computes them from what `get(layer).dense()` returned.
        """
        return self._open("attend").attend(layer, q, scoring, dense)

    def commit(self, accepted: Mapping[int, int] | None = None) -> dict[int, int]:
        """Keep the step: of each sequence its first `accepted[seq]` new tokens, all if it is not named.

        Returns the claims of feeds with checkpoints, by sequence, where tokens of it were kept.

        Raises `WrongStage`, and the step stays open, if any token is kept and a layer has not put all its planes.
        A span that looks ahead is accepted whole or not at all. What no next token can need is forgotten only now.
        """
        step = self._open("commit")
        counts = step.counts(accepted or {})
        self.states.settle(step.batch, counts)
        made = self.claims.of_step(step.batch, counts, step.taken)  # before anything slides out
        self.step = None
        self._sequences.commit(step.batch, counts, step.taken)
        step.end()
        return {seq: self.claims.enter(claim) for seq, claim in made.items()}

    def abandon(self) -> None:
        """Forget the step: the memory is as it was before `begin`."""
        step = self._open("abandon")
        self.step = None
        step.abandon()

    # -- sequences ----------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, upto: int) -> int:
        """Make `dst` share the first `kept <= upto` tokens of `src`, its input, and nothing else; returns `kept`.

        `kept` is what `can_cut(src, upto)` returns: as many tokens as can be shared. Whatever `dst` was before is
        forgotten. Copies integers, no K/V. Raises `BadRequest` if `kept` is beyond the limit of `dst`; nothing has
        changed then.
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
        """Forget the tokens of `span`; returns how many the sequence has now. What lies behind the span moves down, its
        keys turned to their new positions (context shift).

        Either exactly the tokens that the span has of the sequence are removed, or `NotSupported` is raised and nothing
        has changed: if resuming would need what is no longer held, if a span that looked ahead would be parted, or if
        the keys of some group cannot be turned exactly. Its `kept` is the largest position up to the span at which
        everything can resume: remove all from there on, and read what is missing again. A sequence that was edited in
        the middle is *derived*: its K/V still encode what was removed (see `derived`).

        Keys that move are written to free cells. Where too few are free, those that no other sequence shares are turned
        in the cells they are in, which the removal would free; what was there is kept until it is complete, in what
        `max_bytes` leaves beside planes and staging (a step's scratch too: none is open). Raises `CacheFull` if keys
        that are shared need more cells than are free, or there is too little room for what was there; nothing has
        changed then.
        """
        self._idle("remove")
        if type(span) is not Span:
            raise BadRequest(f"what is removed is a Span, not {shown(span)}")
        tables, length = self._sequences.known(seq), self.length(seq)
        gone = Span(min(span.start, length), min(span.end, length))
        if not len(gone):
            return length
        if (reason := self._sequences.refusal(seq, gone)) is not None:
            raise NotSupported(reason, self.can_cut(seq, gone.start))
        if gone.end == length:
            self._sequences.cut(seq, gone.start)
        else:
            behind = shifted(self._stores.all, tables, gone, self.storage.spare)
            self._sequences.close_over(seq, gone, behind)
        return length - len(gone)

    def keep_state(self, seq: int) -> None:
        """Keep the recurrent state that `seq` has now as a checkpoint of it, as a feed with `keep_state` does."""
        self._idle("keep_state")
        self._sequences.record(seq).states.keep()

    def drop(self, seq: int) -> None:
        """Forget a whole sequence. Never fails for one that is there."""
        self._idle("drop")
        self._sequences.drop(seq)

    def clear(self) -> None:
        """Forget everything, an open step too."""
        if self.step is not None:
            self.abandon()
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
        for index, store in enumerate(self._stores.all):
            taken = self.step.taken[index] if self.step is not None else []
            tables = self._sequences.tables(index) + self.claims.tables(index)
            store.check(tables, [run for of_feed in taken for run in of_feed])
        if self.step is not None:
            self.step.check()
        self.states.check()
        self._sequences.check()
        self.claims.check()
        states = [record.states for record in self._sequences.records.values()]
        check_all(self.rows, states, self.states.step_rows.held() + self.claims.held_rows())
