"""sequences: the records of all sequences of a memory, and their changes.

Always true:
  * all tables of a sequence's tokens end at the same position, and so does its recurrent state; each begins no later
    than its layout needs to go on from there; all tables of its input have all of the input, or none of it;
  * `derived` lies within the sequence: from there on its K/V encode text that was removed from its middle;
  * all sequences with the same digest share every cell of their input;
  * an operation that raises has changed nothing: what can raise comes before all that changes something.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcellar.errors import BadRequest, UnknownSequence
from kvcellar.memory.cells.rows import SequenceStates
from kvcellar.memory.cells.tables import Table, close_all, share_all
from kvcellar.memory.kv.states import States
from kvcellar.memory.kv.storage import GroupStore
from kvcellar.memory.plan import Batch, Run
from kvcellar.memory.spans import Span, Spans, around, check_spans, closed_over, deepest, until


@dataclass(slots=True)
class Record:
    """The record of one sequence."""

    tables: list[Table]  # one for each group
    states: SequenceStates
    ahead: Spans = ()
    derived: int | None = None
    digest: str | None = None  # of its input

    def close(self) -> None:
        """Free what only this sequence holds."""
        close_all(self.tables)
        self.states.close()


class Sequences:
    """All sequences of one memory. In `stores`, groups of tokens come before those of an input."""

    def __init__(
        self, stores: Sequence[GroupStore], states: States, limits: int | Mapping[int, int] | None = None
    ) -> None:
        """`limits`: the most tokens of a sequence, for all or by sequence."""
        self._stores, self._states, self._limits = stores, states, limits
        self._inputs = [index for index, one in enumerate(stores) if one.group.of_input]
        self.records: dict[int, Record] = {}

    # -- looking ------------------------------------------------------------------------------------------------

    def record(self, seq: int) -> Record:
        """Raises `UnknownSequence`."""
        record = self.records.get(seq)
        if record is None:
            raise UnknownSequence(seq)
        return record

    def known(self, seq: int) -> list[Table]:
        """The tables of a sequence. Raises `UnknownSequence`."""
        return self.record(seq).tables

    def tables(self, index: int) -> list[Table]:
        """The tables of one group."""
        return [record.tables[index] for record in self.records.values()]

    def length(self, seq: int) -> int:
        """Number of tokens; 0 for an unknown sequence."""
        record = self.records.get(seq)
        return record.states.end if record is not None else 0

    def input_length(self, seq: int) -> int:
        """Number of positions of its input; 0 without one, and for an unknown sequence."""
        record = self.records.get(seq)
        return record.tables[self._inputs[0]].end if record is not None and self._inputs else 0

    def cells(self, index: int, seqs: Iterable[int] | None = None) -> int:
        """How many cells of one group these sequences hold, by default all; a shared one counts once. Costs their
        runs."""
        total = end = 0
        tables = self.tables(index) if seqs is None else [self.known(seq)[index] for seq in seqs]
        for run in sorted(run for table in tables for run in table.runs):
            total += max(0, run.end - max(end, run.cell))
            end = max(end, run.end)
        return total

    def input(self, digest: str) -> list[Table] | None:
        """The tables of the input with this digest; None if no sequence has it."""
        found = next((record for record in self.records.values() if record.digest == digest), None)
        return None if found is None else [found.tables[index] for index in self._inputs]

    def can_cut(self, seq: int, pos: int) -> int:
        """The largest position up to `pos` at which the sequence can resume."""
        record, kept = self.record(seq), min(pos, self.length(seq))
        while True:
            agreed = deepest(record.ahead, record.states.deepest(kept))
            for store, table in zip(self._stores, record.tables, strict=True):
                agreed = store.group.layout.can_cut(table.first, table.end, agreed)
            if agreed == kept:
                return kept
            kept = agreed

    def obstacle(self, seq: int, pos: int) -> str | None:
        """Why the sequence cannot resume at `pos`; None if it can. Without numbers, so that reasons can be counted."""
        record = self.record(seq)
        if around(record.ahead, pos) is not None:
            return "a span that looked ahead would be split"
        if record.states.deepest(pos) != pos:
            return "the recurrent state at that position was not kept"
        for store, table in zip(self._stores, record.tables, strict=True):
            if not store.group.layout.can_resume(table.first, table.end, pos):
                return f"{store.group.name} layers no longer hold what resuming at that position needs"
        return None

    def refusal(self, seq: int, gone: Span) -> str | None:
        """Why `gone` cannot be removed; None if it can."""
        record, length = self.record(seq), self.length(seq)
        if gone.end == length:
            return self.obstacle(seq, gone.start)
        if any(around(record.ahead, pos) is not None for pos in (gone.start, gone.end)):
            return "a span that looked ahead would be split"
        if record.states.positions is not None:
            return "tokens cannot be removed from a recurrent state"
        for store, table in zip(self._stores, record.tables, strict=True):
            group = store.group
            if group.no_shift is not None:
                return f"{group.name} layers cannot be shifted: {group.no_shift}"
            if not group.layout.can_shift(table.first, length, gone):
                return f"{group.name} layers would see other positions, or cells that they no longer hold"
        return None

    def check_limit(self, seq: int, length: int, what: str) -> None:
        """Raise `BadRequest` if `what` would exceed the limit of a sequence."""
        limit = self._limits.get(seq) if isinstance(self._limits, Mapping) else self._limits
        if limit is not None and length > limit:
            raise BadRequest(f"sequence {seq} may have {limit} tokens; after this {what} it would have {length}")

    # -- changes ------------------------------------------------------------------------------------------------

    def open(self, seq: int) -> None:
        """Add an empty sequence."""
        self.records[seq] = self._empty()

    def _empty(self) -> Record:
        return Record([store.tables.new() for store in self._stores], SequenceStates(self._states.rows))

    def give_input(self, seq: int, digest: str | None, make: Callable[[], Iterable[Table]]) -> None:
        """Set the input of `seq`, which may be new, to the tables that `make` returns, one for each input group.

        They hold cells, so `make` is called last of all that can raise.
        """
        record = self.records.get(seq) or self._empty()
        for index, table in zip(self._inputs, make(), strict=True):
            record.tables[index] = table
        record.digest = digest
        self.records[seq] = record

    def commit(self, batch: Batch, counts: Sequence[int], taken: Sequence[Sequence[Sequence[Run]]]) -> None:
        """Append the first `counts[feed]` tokens of each feed. Takes over their cells `taken[group][feed]`."""
        for feed, count in zip(batch.feeds, counts, strict=True):
            record, end = self.records[feed.seq], feed.pos.start + count
            if batch.look_ahead:
                record.ahead += until(batch.ahead(feed.seq), end)
            if feed.stores and count:
                record.states.advance(self._states.step_rows.new(feed.seq), end)
                if feed.keep_state and count == len(feed.pos):
                    record.states.keep()
        for index, store in enumerate(self._stores):
            for feed, runs, count in zip(batch.feeds, taken[index], counts, strict=True):
                if not feed.stores:
                    continue
                table = self.records[feed.seq].tables[index]
                kept, rest = store.cells.divide_all(runs, count)
                store.cells.drop(rest)
                table.append(kept)
                table.forget_below(store.group.layout.keep(table.end))

    def fork(self, src: int, dst: int, kept: int) -> None:
        """Replace `dst` by a sequence that shares the input and the first `kept` tokens of `src` (see `can_cut`)."""
        source, before = self.record(src), self.records.get(dst)
        shared = share_all(source.tables, kept)
        derived = source.derived if source.derived is not None and source.derived < kept else None
        states = source.states.fork(kept)
        self.records[dst] = Record(shared, states, until(source.ahead, kept), derived, source.digest)
        if before is not None:  # last: it may be the only holder of what is shared
            before.close()

    def cut(self, seq: int, kept: int) -> None:
        """Forget all but the first `kept` tokens (see `can_cut`)."""
        record = self.record(seq)
        for table in record.tables:
            table.cut(kept)
        record.states.cut(kept)
        record.ahead = until(record.ahead, kept)
        if record.derived is not None and record.derived >= kept:
            record.derived = None

    def close_over(self, seq: int, gone: Span, behind: Sequence[Iterable[Run]]) -> None:
        """Remove `gone`. Takes over the hold on the cells `behind`, by group, of the positions after it."""
        record = self.record(seq)
        for store, table, runs in zip(self._stores, record.tables, behind, strict=True):
            table.close_over(gone, runs)
            table.forget_below(store.group.layout.keep(table.end))
        record.ahead = closed_over(record.ahead, gone)
        record.derived = min(gone.start, record.derived if record.derived is not None else gone.start)
        record.states.advance(0, record.states.end - len(gone))  # no layer is recurrent, see `refusal`

    def drop(self, seq: int) -> None:
        """Free what only this sequence holds. Never fails for a known sequence."""
        self.record(seq).close()
        del self.records[seq]

    def check(self) -> None:
        """Assert the invariants of sequences; `Memory.check` asserts the holders of cells and rows."""
        inputs: dict[str, list[list[Run]]] = {}
        for seq, record in self.records.items():
            assert len(record.tables) == len(self._stores)
            check_spans(record.ahead, self.length(seq))
            assert record.derived is None or 0 <= record.derived < self.length(seq)
            for store, table in zip(self._stores, record.tables, strict=True):
                table.check()
                end = record.tables[self._inputs[0]].end if store.group.of_input else record.states.end
                assert table.end == end, f"sequence {seq} ends differently in {store.group.name}"
                lowest = store.group.layout.lowest(table.end)
                assert table.first <= lowest, f"sequence {seq} lacks [{lowest},{table.first}) in {store.group.name}"
            if record.digest is not None:
                cells = [list(record.tables[index].runs) for index in self._inputs]
                assert all(cells), f"the input of sequence {seq} is empty, and has a digest"
                assert inputs.setdefault(record.digest, cells) == cells, f"input {record.digest} has two sets of cells"
