"""step: the open step of a memory, from the cells that are set aside for it to what its rows read and write.

Always true:
  * `taken` are the cells that the step holds; `commit` hands them to the sequences, `abandon` frees them;
  * a reserved step has taken nothing, writes to the null cell, and cannot be kept.
"""

from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from kvcellar.cache.group import Stores, check_written
from kvcellar.cache.history import Columns, LayerHistory
from kvcellar.cache.plans import accepted_counts, check_query, group_plan, worst_case
from kvcellar.cache.pool import as_new
from kvcellar.cache.sequences import Sequences
from kvcellar.cache.states import States
from kvcellar.errors import BadRequest, CacheFull, WrongStage
from kvcellar.plan import Batch, GroupPlan, Plan, Run, StateSegment
from kvcellar.shapes import Scoring


class Step:
    """An open step. `taken[group][feed]` are the runs set aside for it, `opened` the sequences that are new."""

    plan: Plan

    def __init__(self, stores: Stores, sequences: Sequences, states: States, batch: Batch) -> None:
        self.batch = batch
        self.taken: list[list[list[Run]]] = [[] for _ in stores.all]
        self.opened: list[int] = []
        self.reserved = False
        self.written: set[tuple[int, str]] = set()  # layers and planes
        self._stores, self._sequences, self._states = stores, sequences, states

    @classmethod
    def open(cls, stores: Stores, sequences: Sequences, states: States, batch: Batch) -> Self:
        """See `Memory.begin`."""
        step = cls(stores, sequences, states, batch)
        step._admit()
        try:
            for feed in batch.feeds:
                if feed.seq not in sequences.records:
                    step.opened.append(feed.seq)
                    sequences.open(feed.seq)
            for index in range(len(stores.all)):
                step._take(index)
            groups = [step._plan_group(index) for index in range(len(stores.all))]
            step._lay_out(groups, states.step_rows.begin(batch, lambda seq: sequences.record(seq).states.row))
        except BaseException:  # for one, a mask may be too large for the device
            step.abandon()
            raise
        return step

    @classmethod
    def reserve(cls, stores: Stores, sequences: Sequences, states: States, batch: Batch) -> Self:
        """A step that is only tried: see `Memory.begin`."""
        step = cls(stores, sequences, states, batch)
        step.reserved = True
        groups = [worst_case(one.group.name, one.group.layout, batch, one.cells.capacity) for one in stores.all]
        step._lay_out(groups, states.step_rows.null(batch))
        return step

    # -- in the forward -----------------------------------------------------------------------------------------

    def put(self, layer: int, new: Mapping[str, Tensor]) -> None:
        store = self._stores.all[self._stores.index_of(layer)]
        if store.group.of_input:
            raise BadRequest(f"layer {layer} remembers an input, which inputs.write() writes before the step")
        store.pool.check_new(layer, self.plan.stored, new)
        store.layers[layer].put({name: as_new(values) for name, values in new.items()})

    def get(self, layer: int) -> LayerHistory:
        return self._stores.all[self._stores.index_of(layer)].layers[layer]

    def attend(self, layer: int, q: Tensor, scoring: Scoring, dense: tuple[Tensor, Tensor] | None) -> Tensor:
        history = self.get(layer)
        if dense is None:
            return history.backend.attend(q[None], history, scoring)[0]
        return history.backend.attend_dense(q, *dense, history.step.columns.visible, scoring)

    # -- at the end ---------------------------------------------------------------------------------------------

    def counts(self, accepted: Mapping[int, int]) -> list[int]:
        """How many tokens of each feed are kept. Raises `WrongStage` if the step cannot be."""
        if self.reserved:
            raise WrongStage("commit() of a reserved step: nothing of it was stored; abandon() it")
        counts = accepted_counts(self.batch, accepted)
        check_written([store.group for store in self._stores.all], self.written, self.batch, counts)
        return counts

    def end(self) -> None:
        """What was made for this step alone is freed; cells and rows have other holders."""
        self._states.end()
        self._states.step_rows.end()
        for store in self._stores.all:
            store.step.end()

    def abandon(self) -> None:
        """Free what was set aside so far."""
        for store, of_group in zip(self._stores.all, self.taken, strict=True):
            for runs in of_group:
                store.cells.drop(runs)
        self.end()
        for seq in filter(self._sequences.records.__contains__, self.opened):  # not one whose opening failed
            self._sequences.drop(seq)

    def check(self) -> None:
        """Assert what is always true."""
        assert not any(map(self._sequences.length, self.opened)), "a sequence has tokens of a step that was not kept"

    # -- inside -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Raise what `Memory.begin` raises of a batch that cannot be."""
        for feed in self.batch.feeds:
            if not feed.stores:
                for store, table in zip(self._stores.all, self._sequences.known(feed.seq), strict=True):
                    check_query(store.group.name, store.group.layout, feed, table)
                continue
            end = self._sequences.length(feed.seq)
            if feed.pos.start != end:
                raise BadRequest(f"sequence {feed.seq} goes on at {end}, not at {feed.pos.start}")
            self._sequences.check_limit(feed.seq, feed.pos.end, "step")
        self._states.step_rows.admit(self.batch, self._sequences.length)
        need = self.batch.stored
        for store in self._stores.all:
            if store.cells.free < need and not store.group.of_input:
                raise CacheFull(store.group.name, need, store.cells.free)

    def _take(self, index: int) -> None:
        """Set aside the cells of a group, feed by feed: if that raises, `abandon` frees those that were taken."""
        store = self._stores.all[index]
        for feed in self.batch.feeds:
            table, n = self._sequences.known(feed.seq)[index], len(feed.pos)
            stores = feed.stores and not store.group.of_input
            self.taken[index].append(store.cells.take(n, table.last_cell, table.first_cell) if stores else [])

    def _plan_group(self, index: int) -> GroupPlan:
        group = self._stores.all[index].group
        tables = {feed.seq: self._sequences.known(feed.seq)[index] for feed in self.batch.feeds}
        return group_plan(group.name, group.layout, self.batch, tables, self.taken[index])

    def _lay_out(self, groups: Sequence[GroupPlan], states: tuple[StateSegment, ...]) -> None:
        """Make of plans what kernels read, in the tables of each group."""
        batch = self.batch
        self.plan = Plan(batch.tokens, batch.feeds, tuple(groups), batch.stored, batch.look_ahead, states)
        for store, plan, taken in zip(self._stores.all, groups, self.taken, strict=True):
            step = store.step
            step.plan, step.written = plan, self.written
            cells = [cell for runs in taken for run in runs for cell in range(run.cell, run.end)]
            step.cells = step.tables.fill("cells", [0] * batch.stored if self.reserved else cells)
            step.prepared = store.backend.prepare(plan, step.tables)
            step.columns = Columns(plan, batch.tokens, self._stores.device)
