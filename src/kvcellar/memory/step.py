"""step: the open step of a memory: its newly allocated cells, its plan, and the step tables made from it.

Always true:
  * `taken` are the cells that the step holds; `commit` hands them to the sequences, `abandon` frees them;
  * a reserved step has allocated nothing, writes to the null cell, and cannot be committed.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Self

from torch import Tensor

from kvcellar.errors import BadRequest, CacheFull, CapacityTooSmall, WrongStage, shown
from kvcellar.memory.cells.layouts import Input
from kvcellar.memory.cells.tables import Table, undone
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.history import Columns, LayerHistory
from kvcellar.memory.kv.pool import as_new
from kvcellar.memory.kv.sequences import Sequences
from kvcellar.memory.kv.states import States
from kvcellar.memory.kv.storage import Storage, pieces
from kvcellar.memory.layout import Layout
from kvcellar.memory.plan import Batch, Feed, GroupPlan, Plan, Run, Segment, StateSegment
from kvcellar.memory.shapes import Scoring
from kvcellar.memory.spans import Span, whole

SCATTERED = 8  # runs of a history in the worst case: enough to prevent reads by slice, few enough to list quickly


class Step:
    """An open step. `taken[group][feed]` are the runs allocated for it, `opened` the sequences that are new."""

    plan: Plan

    def __init__(self, storage: Storage, sequences: Sequences, states: States, batch: Batch) -> None:
        self.batch = batch
        self.taken: list[list[list[Run]]] = [[] for _ in storage.stores]
        self.opened: list[int] = []
        self.reserved = False
        self.written: set[tuple[int, str]] = set()  # layers and planes
        self._storage, self._sequences, self._states = storage, sequences, states

    @classmethod
    def open(cls, storage: Storage, sequences: Sequences, states: States, batch: Batch) -> Self:
        """See `Memory.begin`."""
        step = cls(storage, sequences, states, batch)
        step._admit()
        with undone(step.abandon):  # for one, a mask may be too large for the device
            for feed in batch.feeds:
                if feed.seq not in sequences.records:
                    step.opened.append(feed.seq)
                    sequences.open(feed.seq)
            for index in range(len(storage.stores)):
                step._take(index)
            groups = [step._plan_group(index) for index in range(len(storage.stores))]
            step._lay_out(groups, states.step_rows.begin(batch, lambda seq: sequences.record(seq).states.row))
        return step

    @classmethod
    def reserve(cls, storage: Storage, sequences: Sequences, states: States, batch: Batch) -> Self:
        """See `reserve` of `Memory.begin`."""
        step = cls(storage, sequences, states, batch)
        step.reserved = True
        groups = [_worst_case(one.group.name, one.group.layout, batch, one.cells.capacity) for one in storage.stores]
        step._lay_out(groups, states.step_rows.null(batch))
        return step

    # -- in the forward -----------------------------------------------------------------------------------------

    def put(self, layer: int, new: Mapping[str, Tensor]) -> None:
        store = self._storage.stores[self._storage.index_of(layer)]
        if store.group.of_input:
            raise BadRequest(f"layer {layer} remembers an input, which inputs.write() writes before the step")
        store.pool.check_new(layer, self.plan.stored, new)
        store.layers[layer].put({name: as_new(values) for name, values in new.items()})

    def get(self, layer: int) -> LayerHistory:
        return self._storage.stores[self._storage.index_of(layer)].layers[layer]

    def attend(self, layer: int, q: Tensor, scoring: Scoring, dense: tuple[Tensor, Tensor] | None) -> Tensor:
        history = self.get(layer)
        if dense is None:
            return history.backend.attend(q[None], history, scoring)[0]
        return history.backend.attend_dense(q, *dense, history.step, scoring)

    # -- at the end ---------------------------------------------------------------------------------------------

    def counts(self, accepted: Mapping[int, int]) -> list[int]:
        """How many tokens of each feed are kept. Raises `WrongStage` if the step cannot be committed."""
        if self.reserved:
            raise WrongStage("commit() of a reserved step, which stored nothing; abandon() it")
        counts = accepted_counts(self.batch, accepted)
        _check_written([store.group for store in self._storage.stores], self.written, self.batch, counts)
        return counts

    def end(self) -> None:
        """Free what belongs to this step alone; cells and rows have other holders by now."""
        self._states.end()
        self._states.step_rows.end()
        for store in self._storage.stores:
            store.step.end()

    def abandon(self) -> None:
        """Free all that was allocated so far."""
        for store, of_group in zip(self._storage.stores, self.taken, strict=True):
            for runs in of_group:
                store.cells.drop(runs)
        self.end()
        for seq in filter(self._sequences.records.__contains__, self.opened):  # the opening of the last may have failed
            self._sequences.drop(seq)

    def check(self) -> None:
        """Assert what is always true."""
        assert not any(map(self._sequences.length, self.opened)), "a new sequence has tokens before the commit"

    # -- inside -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Check the batch before anything is allocated: raises what `Memory.begin` raises."""
        for feed in self.batch.feeds:
            if not feed.stores:
                for store, table in zip(self._storage.stores, self._sequences.known(feed.seq), strict=True):
                    _check_query(store.group.name, store.group.layout, feed, table)
                continue
            end = self._sequences.length(feed.seq)
            if feed.pos.start != end:
                raise BadRequest(f"sequence {feed.seq} continues at {end}, not at {feed.pos.start}")
            self._sequences.check_limit(feed.seq, feed.pos.end, "step")
        self._states.step_rows.admit(self.batch, self._sequences.length)
        need = self.batch.stored
        for store in self._storage.stores:
            if store.cells.free < need and not store.group.of_input:
                raise CacheFull(store.group.name, need, store.cells.free)

    def _take(self, index: int) -> None:
        """Allocate the cells of a group, feed by feed: `abandon` frees those that were allocated if it raises."""
        store = self._storage.stores[index]
        for feed in self.batch.feeds:
            table, n = self._sequences.known(feed.seq)[index], len(feed.pos)
            stores = feed.stores and not store.group.of_input
            self.taken[index].append(store.cells.take(n, table.last_cell, table.first_cell) if stores else [])

    def _plan_group(self, index: int) -> GroupPlan:
        batch, group = self.batch, self._storage.stores[index].group
        name, layout = group.name, group.layout
        tables = [self._sequences.known(feed.seq)[index] for feed in batch.feeds]
        if isinstance(layout, Input):
            return _input_plan(name, layout, batch, [(table.end, tuple(table.runs)) for table in tables])
        segments: list[Segment] = []
        row = 0
        spans = batch.ahead if group.looks_ahead else lambda _: ()
        for feed, table, new in zip(batch.feeds, tables, self.taken[index], strict=True):
            first = max(table.first, layout.lowest(feed.pos.start))
            end = feed.pos.end if feed.stores else min(feed.pos.end, table.end)
            held = table.since(first)
            runs = _joined(held, new) if feed.stores else tuple(next(pieces(held, end - first)))  # a query sees a cell
            segments.append(Segment(feed.seq, row, feed.pos, first, end, runs, tuple(new), spans(feed.seq)))
            row += len(feed.pos)
        return GroupPlan(name, layout, tuple(segments))

    def _lay_out(self, groups: Sequence[GroupPlan], states: tuple[StateSegment, ...]) -> None:
        """Fill the step tables of each group from its plan."""
        batch = self.batch
        self.plan = Plan(batch.tokens, batch.feeds, tuple(groups), batch.stored, batch.look_ahead, states)
        for store, plan, taken in zip(self._storage.stores, groups, self.taken, strict=True):
            step = store.step
            step.plan, step.written = plan, self.written
            cells = [cell for runs in taken for run in runs for cell in range(run.cell, run.end)]
            step.cells = step.tables.fill("cells", [0] * batch.stored if self.reserved else cells)
            step.prepared = store.backend.prepare(plan, step.tables)
            step.columns = Columns(plan, batch.tokens, self._storage.device)


def _input_plan(name: str, layout: Input, batch: Batch, inputs: Sequence[tuple[int, tuple[Run, ...]]]) -> GroupPlan:
    """The plan of an input group: every row of a sequence sees all of its input. `inputs` has, per feed, the length and
    the cells of the input.

    The rows have positions behind the input (see `Input`). Rows of a sequence without input see nothing.
    """
    segments: list[Segment] = []
    row = 0
    for feed, (n, runs) in zip(batch.feeds, inputs, strict=True):
        segments.append(Segment(feed.seq, row, Span(n, n + len(feed.pos)), 0, n, runs, ()))
        row += len(feed.pos)
    return GroupPlan(name, layout, tuple(segments))


def _check_query(name: str, layout: Layout, feed: Feed, table: Table) -> None:
    """Raise `BadRequest` unless every row of `feed`, which stores nothing, sees a cell, and all it may see is held."""
    if isinstance(layout, Input):
        return
    lowest = layout.lowest(feed.pos.start)
    if lowest < table.first:
        raise BadRequest(
            f"a query at {feed.pos.start} of sequence {feed.seq} looks back to {lowest}; its {name} layers hold "
            f"[{table.first},{table.end})"
        )
    if layout.lowest(feed.pos.end - 1) >= table.end:
        raise BadRequest(
            f"a query at {feed.pos.end - 1} of sequence {feed.seq} sees nothing in its {name} layers, which end at "
            f"{table.end}"
        )


def accepted_counts(batch: Batch, accepted: Mapping[int, int]) -> list[int]:
    """Number of rows of each feed to keep: as in `accepted` by sequence, otherwise all. Raises `BadRequest`."""
    if not isinstance(accepted, Mapping):
        raise BadRequest(f"accepted is numbers of new tokens by sequence, not {shown(accepted)}")
    if unknown := accepted.keys() - {feed.seq for feed in batch.feeds if feed.stores}:
        raise BadRequest(f"sequences {shown(list(unknown))} store nothing in this step; nothing can be accepted")
    counts = [whole(accepted.get(feed.seq, len(feed.pos)), "a number of new tokens") for feed in batch.feeds]
    for feed, count in zip(batch.feeds, counts, strict=True):
        if not 0 <= count <= len(feed.pos):
            raise BadRequest(f"{count} of {len(feed.pos)} new tokens of sequence {feed.seq} cannot be accepted")
        for span in batch.ahead(feed.seq):
            if span.start < feed.pos.start + count < span.end:
                raise BadRequest(
                    f"{count} new tokens of sequence {feed.seq} end within {span}, which looks ahead: accept all of it "
                    f"or nothing"
                )
    return counts


def _worst_case(name: str, layout: Layout, batch: Batch, capacity: int) -> GroupPlan:
    """Like `Step._plan_group`, for sequences that hold everything they see, in runs scattered over all cells.

    It uses no tables. Sequences share as few cells as `capacity` allows. Raises `CapacityTooSmall`.
    """
    segments: list[Segment] = []
    row = at = 0
    if isinstance(layout, Input):
        if layout.most > capacity:
            raise CapacityTooSmall(
                f"an input has up to {layout.most} positions; group {name} has {capacity} cells. Raise cache_bytes."
            )
        inputs = [_scattered(layout.most * i % capacity, layout.most, capacity) for i in range(len(batch.feeds))]
        return _input_plan(name, layout, batch, [(layout.most, runs) for runs in inputs])
    for feed in batch.feeds:
        first = layout.lowest(feed.pos.start)
        need = feed.pos.end - first
        if need > capacity:
            raise CapacityTooSmall(
                f"a sequence whose step ends at position {feed.pos.end} needs {need} cells in group {name}, which has "
                f"{capacity}. Raise cache_bytes, or lower context or step_tokens."
            )
        runs = _scattered(at, need, capacity)
        new = _last(runs, len(feed.pos)) if feed.stores else ()
        segments.append(Segment(feed.seq, row, feed.pos, first, feed.pos.end, runs, new, batch.ahead(feed.seq)))
        row += len(feed.pos)
        at = (at + need) % capacity
    return GroupPlan(name, layout, tuple(segments))


def _joined(held: tuple[Run, ...], new: Sequence[Run]) -> tuple[Run, ...]:
    if held and new and held[-1].end == new[0].cell:
        return (*held[:-1], Run(held[-1].cell, held[-1].n + new[0].n), *new[1:])
    return (*held, *new)


def _last(runs: Sequence[Run], n: int) -> tuple[Run, ...]:
    """The last `n` cells of `runs`."""
    found: list[Run] = []
    for run in reversed(runs):
        if n <= 0:
            break
        got = min(run.n, n)
        found.append(Run(run.end - got, got))
        n -= got
    return tuple(reversed(found))


def _scattered(at: int, n: int, capacity: int) -> tuple[Run, ...]:
    """`n` cells of the ring [1, capacity], from offset `at` on, as runs in reverse order."""
    size = -(-n // SCATTERED)
    pieces: list[Run] = []
    for start in range(0, n, size):
        here = 1 + (at + start) % capacity
        length = min(size, n - start)
        until_end = min(length, capacity + 1 - here)
        pieces.append(Run(here, until_end))
        if until_end < length:
            pieces.append(Run(1, length - until_end))
    return tuple(reversed(pieces))


def _check_written(groups: Sequence[Group], written: Set[tuple[int, str]], batch: Batch, counts: Sequence[int]) -> None:
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
    which = "; ".join(f"layers {', '.join(layers)} of group {name}" for name, layers in missing.items())
    raise WrongStage(f"commit() before all planes were put: {which}. Run the whole model, or abandon() the step")
