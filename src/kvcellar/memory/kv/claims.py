"""claims: reference-counted holds on cells and state rows that are not sequences.

A claim covers a span [a,b) of a text. It holds the cells of the span in unbounded groups, those of the last positions
of the span, its *tail*, in bounded ones, and checkpoints: the window of each bounded group and the state row at a
position. A claim is made from a sequence, and a sequence can be assembled from claims again: at a checkpoint, and, in a
model without recurrent layers, where tails have what the next token sees. Operations cost runs, not tokens, and copy
integers, no K/V.

Always true:
  * the tables of a claim hold exactly the cells of its span, in bounded groups those of its tail; in groups of an
    input, all of the input or nothing;
  * in a model with recurrent layers, and in claims that were written back, tails are empty;
  * the checkpoints of a claim are at positions in (a,b], none of them inside a span that looks ahead; each holds, in
    every bounded group, the cells [lowest(pos),pos), which may begin before the claim does, and the state row of `pos`
    in a model with recurrent layers;
  * `derived` lies within the span: from there on K/V encode text that was removed;
  * an operation that raises has changed nothing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from torch import Tensor

from kvcellar.errors import BadRequest, shown
from kvcellar.memory.cells.rows import SequenceStates
from kvcellar.memory.cells.tables import Table, share_all, undone
from kvcellar.memory.kv.claim import Checkpoint, Claim, check_whole, within
from kvcellar.memory.kv.readout import Reading, check_record, written
from kvcellar.memory.kv.record import Record
from kvcellar.memory.kv.sequences import Record as SequenceRecord
from kvcellar.memory.kv.sequences import Sequences
from kvcellar.memory.kv.states import States
from kvcellar.memory.kv.storage import GroupStore
from kvcellar.memory.plan import Batch, Run
from kvcellar.memory.spans import Span, reach_back, until, whole


class Claims:
    """The claims of one memory, by number."""

    def __init__(
        self,
        stores: Sequence[GroupStore],
        sequences: Sequences,
        states: States,
        shape: str,
        idle: Callable[[str], None],
    ) -> None:
        """`shape` is the memory's (see `readout`). `idle(operation)` raises `WrongStage` while a step is open."""
        self._stores, self._sequences, self._states, self._rows = stores, sequences, states, states.rows
        self.shape = shape
        self._idle = idle
        self._bounded = [index for index, one in enumerate(stores) if one.group.bounded]
        self._unbounded = [index for index, one in enumerate(stores) if not one.group.bounded]
        self._tails = self._rows.capacity is None  # a window without its state serves no request
        self._claims: dict[int, Claim] = {}
        self._readings: list[Reading] = []
        self._numbers = count(1)

    # -- looking ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._claims))

    def of(self, claim: int) -> Claim:
        """The record of a claim, to be read only. Raises `BadRequest` for an unknown number."""
        found = self._claims.get(claim)
        if found is None:
            raise BadRequest(f"there is no claim {shown(claim)}")
        return found

    def lowest(self, pos: int) -> int:
        """The lowest position that a token at `pos` sees in bounded groups; `pos` if it sees none before it there."""
        return min((self._stores[index].group.layout.lowest(pos) for index in self._bounded), default=pos)

    def input(self, digest: str) -> list[Table] | None:
        """The tables of the input with this digest; None if no claim holds it."""
        found = next((claim for claim in self._claims.values() if claim.digest == digest), None)
        if found is None:
            return None
        return [found.tables[index] for index in self._unbounded if self._stores[index].group.of_input]

    def tables(self, index: int) -> list[Table]:
        """All tables of claims and readings in one group."""
        found = [claim.tables[index] for claim in self._claims.values() if index in claim.tables]
        for claim in self._claims.values():
            found += [one.windows[index] for one in claim.checkpoints.values() if index in one.windows]
        parts = [part for reading in self._readings for part in reading.parts]
        return found + [part.table for part in parts if part.store is self._stores[index]]

    def exclusive(self, claim: int, checkpoint: int | None = None) -> tuple[dict[str, int], int]:
        """Cells by group, and state rows, that dropping the claim frees; or only its checkpoint at a position."""
        found = self.of(claim)
        some = found.checkpoints if checkpoint is None else {checkpoint: self._checkpoint(found, checkpoint)}
        cells: dict[str, int] = {}
        for index, store in enumerate(self._stores):
            tables = [one.windows[index] for one in some.values() if index in one.windows]
            if checkpoint is None and index in found.tables:
                tables.append(found.tables[index])
            cells[store.group.name] = store.cells.exclusive(run for table in tables for run in table.runs)
        return cells, self._rows.exclusive([one.row for one in some.values()])

    # -- changes ------------------------------------------------------------------------------------------------

    def make(self, seq: int, span: Span, checkpoints: Iterable[int] = ()) -> int:
        """Make a claim on `span` of a sequence, with checkpoints at these positions; returns its number. Its tail is
        what the sequence still holds of the span.

        Raises `BadRequest` if the span is empty or not in the sequence, if one of its ends or checkpoints is inside a
        span that looked ahead, or if the sequence no longer holds what resuming at a checkpoint needs.
        """
        self._idle("make")
        record, length = self._sequences.record(seq), self._sequences.length(seq)
        if type(span) is not Span or not len(span) or span.end > length:
            raise BadRequest(f"a claim is a span of the {length} tokens of sequence {seq}, not {shown(span)}")
        positions = sorted({whole(pos, "the position of a checkpoint") for pos in checkpoints})
        if positions and not span.start < positions[0] <= positions[-1] <= span.end:
            raise BadRequest(f"checkpoints of a claim on {span} are at positions behind {span.start}, not {positions}")
        for pos in (span.start, span.end):
            check_whole(record.ahead, pos)
        for pos in positions:
            if (obstacle := self._sequences.obstacle(seq, pos)) is not None:
                raise BadRequest(f"sequence {seq} has no checkpoint at {pos}: {obstacle}")
        first = max((record.tables[index].first for index in self._bounded), default=span.start)
        tail = min(max(first, span.start), span.end) if self._tails else span.end
        claim = Claim(span, {}, tail, derived=within(record.derived, span), digest=record.digest)
        claim.ahead = tuple(one for one in record.ahead if span.start <= one.start < span.end)
        with undone(lambda: claim.close(self._rows)):
            self._share_span(claim, record.tables)
            for pos in positions:
                windows = {index: record.tables[index] for index in self._bounded}
                self._hold(claim, pos, windows, record.states.at(pos))
        return self.enter(claim)

    def of_step(
        self, batch: Batch, counts: Sequence[int], taken: Sequence[Sequence[Sequence[Run]]]
    ) -> dict[int, Claim]:
        """The claims that the feeds of an open step request, by sequence; the caller enters them after the commit.
        `taken[group][feed]` are the cells of new tokens, of which the first `counts[feed]` are accepted."""
        made: dict[int, Claim] = {}

        def undo() -> None:
            for claim in made.values():
                claim.close(self._rows)

        with undone(undo):
            for number, (feed, count) in enumerate(zip(batch.feeds, counts, strict=True)):
                if not (feed.claims and count):
                    continue
                record, kept = self._sequences.record(feed.seq), Span(feed.pos.start, feed.pos.start + count)
                tail = kept if self._tails else Span(kept.end, kept.end)
                claim = Claim(kept, {}, tail.start, derived=within(record.derived, kept), digest=record.digest)
                made[feed.seq] = claim
                claim.ahead = until(batch.ahead(feed.seq), kept.end)
                for index in (*self._unbounded, *self._bounded):
                    span = tail if index in self._bounded else kept
                    claim.tables[index] = self._with_new(index, record, span, taken[index][number])
                for pos in feed.checkpoints:
                    if pos > kept.end:
                        break
                    rows = self._states.step_rows
                    row = rows.new(feed.seq) if pos == kept.end else rows.between(feed.seq, pos)
                    self._rows.hold(row)
                    checkpoint = claim.checkpoints[pos] = Checkpoint({}, row)
                    for index in self._bounded:
                        seen = Span(self._stores[index].group.layout.lowest(pos), pos)
                        checkpoint.windows[index] = self._with_new(index, record, seen, taken[index][number])
        return made

    def _with_new(self, index: int, record: SequenceRecord, span: Span, new: Sequence[Run]) -> Table:
        """A table over the cells of `span`: those of a sequence, followed by the `new` ones that the commit appends."""
        table, store = record.tables[index], self._stores[index]
        if store.group.of_input:
            return table.share(0)
        if span.start < table.end:
            found = table.share(min(table.end, span.end), span.start)
        else:
            found = store.tables.new(span.start)
        at = table.end
        for run in new:
            skip, n = max(0, span.start - at), min(run.n, span.end - at)
            if skip < n:
                found.append([store.cells.hold_part(run, skip, n - skip)])
            at += run.n
        return found

    def assemble(self, seq: int, path: Sequence[int], pos: int) -> None:
        """Make the new sequence `seq` of the first `pos` tokens of claims that are consecutive from position 0 on.

        The windows and the state are those of the checkpoint at `pos` of the last claim, or else the windows are those
        of tails; a model without bounded groups and recurrent layers needs none. Raises `BadRequest` if the claims are
        not consecutive or have different inputs, if `seq` exists, or if there is no checkpoint at `pos` that is needed.
        """
        self._idle("assemble")
        seq, pos = whole(seq, "a sequence"), whole(pos, "a position")
        claims = [self.of(number) for number in path]
        if seq in self._sequences.records:
            raise BadRequest(f"sequence {seq} exists; drop it before")
        ends = [0, *(claim.span.end for claim in claims)]
        if not claims or any(claim.span.start != end for claim, end in zip(claims, ends, strict=False)):
            spans = ", ".join(str(claim.span) for claim in claims)
            raise BadRequest(f"assemble() needs claims that are consecutive from position 0 on, not {spans or 'none'}")
        last = claims[-1]
        if not last.span.start < pos <= last.span.end:
            raise BadRequest(f"a sequence of {pos} tokens does not end in the last claim, which is on {last.span}")
        self._sequences.check_limit(seq, pos, "assembly")
        check_whole(last.ahead, pos)
        for claim in claims[1:]:
            self._check_same_input(claims[0], claim)
        checkpoint = last.checkpoints.get(pos)
        if checkpoint is None and not self._have_window(claims, pos):
            there = last.positions
            raise BadRequest(f"the last claim has no checkpoint at {pos}, only at {there or 'no position'}")
        whole_claim = Claim(Span(0, pos), {}, pos)
        with undone(lambda: whole_claim.close(self._rows)):
            for claim in claims:
                self._append(whole_claim, claim, Span(claim.span.start, min(pos, claim.span.end)))
            if checkpoint is not None:
                self._hold(whole_claim, pos, checkpoint.windows, checkpoint.row)
            else:
                found = whole_claim.checkpoints[pos] = Checkpoint({}, 0)
                for index in self._bounded:
                    found.windows[index] = self._window(claims, index, pos)
        resumed = whole_claim.checkpoints.pop(pos)
        marks = [claim.derived for claim in claims if claim.derived is not None and claim.derived < pos]
        states = SequenceStates(self._rows)
        states.resume(resumed.row, pos)
        self._rows.drop_hold(resumed.row)
        self._sequences.records[seq] = SequenceRecord(
            [(whole_claim.tables | resumed.windows)[index] for index in range(len(self._stores))],
            states,
            until([span for claim in claims for span in claim.ahead], pos),
            min(marks, default=None),
            claims[0].digest,
        )

    def split(self, claim: int, pos: int) -> int:
        """Split a claim at `pos`: it keeps the first part; returns the number of a new claim with the second part.

        No checkpoint is made at `pos`. Raises `BadRequest` if `pos` is not inside the claim,
        or is inside a span that looked ahead.
        """
        self._idle("split")
        left, pos = self.of(claim), whole(pos, "a position")
        if not left.span.start < pos < left.span.end:
            raise BadRequest(f"a claim on {left.span} cannot be split at {pos}")
        check_whole(left.ahead, pos)
        right = Claim(Span(pos, left.span.end), {}, max(pos, left.tail), digest=left.digest)
        with undone(lambda: right.close(self._rows)):
            self._share_span(right, left.tables)
        for table in left.tables.values():
            table.cut(pos)
        right.checkpoints = left.checkpoints.cut(pos)
        right.ahead = tuple(span for span in left.ahead if span.start >= pos)
        left.ahead = tuple(span for span in left.ahead if span.start < pos)
        right.derived, left.span = within(left.derived, right.span), Span(left.span.start, pos)
        left.derived, left.tail = within(left.derived, left.span), min(left.tail, pos)
        return self.enter(right)

    def join(self, claim: int, following: int) -> None:
        """Extend a claim by the claim that follows it, which is removed. The tail of the first is dropped unless that
        of the second has all of its span.

        Raises `BadRequest` if the second does not begin where the first ends, or if their inputs differ.
        """
        self._idle("join")
        left, right = self.of(claim), self.of(following)
        if left.span.end != right.span.start:
            raise BadRequest(f"a claim on {right.span} does not follow one on {left.span}")
        self._check_same_input(left, right)
        if right.tail > right.span.start:
            left.tail = right.tail
            for index in self._bounded:
                left.tables[index].close()
                left.tables[index] = right.tables.pop(index)
        for index, table in right.tables.items():
            if self._stores[index].group.of_input:
                table.close()
            else:
                left.tables[index].append(table.hand_over())
        left.checkpoints.update(right.checkpoints)
        left.ahead += right.ahead
        left.span = Span(left.span.start, right.span.end)
        left.derived = left.derived if left.derived is not None else right.derived
        del self._claims[following]

    def drop(self, claim: int) -> None:
        """Free what only this claim holds. Never fails for a known claim."""
        self._idle("drop")
        found = self.of(claim)
        del self._claims[claim]
        found.close(self._rows)

    def forget(self, claim: int, tokens: int) -> None:
        """Drop the first tokens of the tail of a claim, so many or all that it has."""
        self._idle("forget")
        found = self.of(claim)
        found.tail = min(found.tail + tokens, found.span.end)
        for index in self._bounded:
            found.tables[index].forget_below(found.tail)

    def drop_checkpoint(self, claim: int, pos: int) -> None:
        """Drop the checkpoint of a claim at `pos`. Raises `BadRequest` if there is none."""
        self._idle("drop_checkpoint")
        found = self.of(claim)
        checkpoint = self._checkpoint(found, pos)
        del found.checkpoints[pos]
        checkpoint.close(self._rows)

    def move_checkpoint(self, claim: int, pos: int, to: int) -> None:
        """Move the checkpoint of a claim at `pos` to another claim on the same tokens.

        Raises `BadRequest` if there is none, if the other claim has one there or does not contain `pos`.
        """
        self._idle("move_checkpoint")
        source, target = self.of(claim), self.of(to)
        self._checkpoint(source, pos)
        if not target.span.start < pos <= target.span.end or pos in target.checkpoints:
            raise BadRequest(f"a claim on {target.span} cannot have the checkpoint at {pos}")
        check_whole(target.ahead, pos)
        target.checkpoints[pos] = source.checkpoints.pop(pos)

    def share_with(self, seq: int, claim: int) -> None:
        """Replace cells of a sequence by those of a claim on the same tokens, in the span that both have. The caller
        has compared the tokens."""
        self._idle("share_with")
        found, record = self.of(claim), self._sequences.record(seq)
        end = min(found.span.end, self._sequences.length(seq))
        if end <= found.span.start:
            return
        shared: dict[int, Table] = {}
        indices = [index for index in self._unbounded if not self._stores[index].group.of_input]
        self._share(shared, found.tables, indices, Span(found.span.start, end))
        for index, table in shared.items():
            record.tables[index].replace(found.span.start, table)

    def clear(self) -> None:
        """Drop all claims, and close all readings."""
        for reading in self._readings:
            reading.close()
        for claim in self:
            self.drop(claim)

    # -- bytes --------------------------------------------------------------------------------------------------

    def reading(self, claim: int, span: Span | None = None, *, without: Collection[int] = ()) -> Reading:
        """A reading of the content of a claim, or of a span within it, in chunks, `without` the checkpoints at some
        positions. Steps may run meanwhile, and the claim may be dropped."""
        found = self.of(claim)
        span = span or found.span
        points = {
            pos: one for pos, one in found.checkpoints.items() if span.start < pos <= span.end and pos not in without
        }
        reading = Reading.of(found, span, points, self._stores, self._states, self.shape)
        self._readings = [one for one in self._readings if one.parts or one.rows] + [reading]
        return reading

    def write_back(self, record: Record, chunks: Iterable[Tensor], after: int | None = None) -> int:
        """Make a claim of what was read out of one, here or in a memory of the same shape; returns its number. Its
        cells follow those of the claim `after`, if they are free.

        Raises `BadRequest` if the record does not fit or is inconsistent, or if the chunks do not match it, `CacheFull`
        if there are too few free cells or rows; nothing has changed then.
        """
        self._idle("write_back")
        check_record(record, self.shape, self._stores)
        tables = self.of(after).tables if after is not None else {}
        last = {index: cell for index, table in tables.items() if (cell := table.last_cell) is not None}
        claim = written(record, chunks, self._stores, self._states, last)
        if claim.digest is not None and (self._sequences.input(claim.digest) or self.input(claim.digest)):
            claim.digest = None  # sequences and claims with the same digest share cells
        return self.enter(claim)

    # -- inside -------------------------------------------------------------------------------------------------

    def enter(self, claim: Claim) -> int:
        """Register a claim; returns its number."""
        number = next(self._numbers)
        self._claims[number] = claim
        return number

    @staticmethod
    def _checkpoint(claim: Claim, pos: int) -> Checkpoint:
        found = claim.checkpoints.get(pos)
        if found is None:
            raise BadRequest(f"there is no checkpoint at {shown(pos)}, only at {claim.positions or 'no position'}")
        return found

    def _check_same_input(self, one: Claim, other: Claim) -> None:
        for index in self._unbounded:
            if self._stores[index].group.of_input and one.tables[index].runs != other.tables[index].runs:
                raise BadRequest(f"claims on {one.span} and {other.span} have different inputs")

    def _share_span(self, claim: Claim, tables: Mapping[int, Table] | Sequence[Table]) -> None:
        """Let a claim that has no tables yet share the cells of its span and its tail."""
        self._share(claim.tables, tables, self._unbounded, claim.span)
        self._share(claim.tables, tables, self._bounded, Span(claim.tail, claim.span.end))

    def _share(
        self, into: dict[int, Table], tables: Mapping[int, Table] | Sequence[Table], indices: Sequence[int], span: Span
    ) -> None:
        """Add tables over the cells of `span` in the groups of these indices: all of them, or none if it raises."""
        shared = share_all([tables[index] for index in indices], span.end, span.start)
        into.update(zip(indices, shared, strict=True))

    def _hold(self, claim: Claim, pos: int, tables: Mapping[int, Table], row: int) -> None:
        """Add a checkpoint at `pos` to a claim, which holds the cells of these tables and `row`."""
        windows: dict[int, Table] = {}
        with undone(lambda: Checkpoint(windows, 0).close(self._rows)):
            for index, table in tables.items():
                windows[index] = table.share(pos, self._stores[index].group.layout.lowest(pos))
        self._rows.hold(row)
        claim.checkpoints[pos] = Checkpoint(windows, row)

    def _have_window(self, claims: Sequence[Claim], pos: int) -> bool:
        """Whether resuming at `pos`, in the last of consecutive claims, needs no more than their tails."""
        lowest = self.lowest(pos)
        parts = ((claim.span.start, claim.tail) for claim in reversed(claims))
        return self._tails and (lowest == pos or reach_back(lowest, parts))

    def _window(self, claims: Iterable[Claim], index: int, pos: int) -> Table:
        """A table over what a token at `pos` sees before it in a bounded group, of the tails of consecutive claims."""
        table = self._stores[index].tables.new(self._stores[index].group.layout.lowest(pos))
        with undone(table.close):
            for claim in claims:
                if claim.span.end > table.end:
                    table.append(claim.tables[index].share(min(pos, claim.span.end), table.end).hand_over())
        return table

    def _append(self, whole_claim: Claim, claim: Claim, span: Span) -> None:
        """Append the cells of `span` in `claim` to `whole_claim`."""
        more: dict[int, Table] = {}
        self._share(more, claim.tables, self._unbounded, span)
        for index, table in more.items():
            if index not in whole_claim.tables:
                whole_claim.tables[index] = table
            elif self._stores[index].group.of_input:
                table.close()
            else:
                whole_claim.tables[index].append(table.hand_over())

    def held_rows(self) -> list[int]:
        """All rows that claims and readings hold, once per hold."""
        rows = [one.row for claim in self._claims.values() for one in claim.checkpoints.values()]
        return rows + [row for reading in self._readings for row in reading.rows]

    def check(self) -> None:
        """Assert the invariants of claims; `Memory.check` asserts the holders of cells."""
        for claim in self._claims.values():
            assert claim.tables.keys() == set(self._unbounded) | set(self._bounded)
            assert self._tails or claim.tail == claim.span.end
            assert all(one.windows.keys() == set(self._bounded) for one in claim.checkpoints.values())
            assert all((one.row > 0) == (self._rows.capacity is not None) for one in claim.checkpoints.values())
            claim.check(self._stores)
