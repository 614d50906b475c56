"""rows: reference counts of the rows of recurrent state, and the rows of each sequence and of the open step. No torch.

A row has what all recurrent layers of a model remember of one sequence at one position. The step that takes it writes
it, and no later one: forks share it, and steps that continue from it write another. So a fork copies nothing, a step
that is abandoned leaves nothing behind, and a sequence can be cut back to a position whose row was kept.

Always true:
  * row 0 is null, the state of a sequence without tokens; it is neither taken nor counted;
  * every other row is free or referenced: as the state of sequences, as their checkpoint, or by holds (of the open
    step, of claims, of what is being read out).

Nothing here decides what is kept: `policy` ranks what could be evicted, and the owner calls `trim`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from kvcellar.errors import BadRequest, CacheFull, shown
from kvcellar.memory.plan import Batch, StateSegment
from kvcellar.memory.policy import Candidate, first_to_go

NAME = "recurrent"  # the name of the rows in messages and reports


class Row:
    """A row that is referenced. `number` is the order in which rows were taken; `saves` are the tokens that would have
    to be computed again without its checkpoints."""

    __slots__ = ("checkpoint_of", "held", "number", "own", "saves", "stands_for", "used")

    def __init__(self, number: int) -> None:
        self.number = number
        self.held = 1  # by the open step, claims and readings
        self.own = 0  # sequences whose state it is
        self.checkpoint_of: dict[SequenceStates, int] = {}  # with the position of the checkpoint
        self.saves = 0
        self.stands_for = 1  # itself and the evicted checkpoints behind it, in place of which it is resumed from
        self.used = 0  # when it was kept or resumed from, as `Rows` counts that

    @property
    def kept(self) -> bool:
        """Whether it is referenced as a checkpoint only."""
        return bool(self.checkpoint_of) and not self.own and not self.held


class Rows:
    """The rows of one memory: `capacity` of them, the null row apart; None in a memory without recurrent layers, where
    every row is the null row."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._free = list(range(capacity or 0, 0, -1))
        self.used = 0  # rows that are the present state of sequences
        self.reserved = 0  # for the steps to come (see `Memory.reserve`)
        self._rows: dict[int, Row] = {}
        self._kept: set[int] = set()  # rows that are referenced as checkpoints only
        self._numbers = count()
        self._uses = 0

    @property
    def free(self) -> int | None:
        return None if self.capacity is None else len(self._free)

    @property
    def spare(self) -> int | None:
        """Free rows beside those that are reserved: below 0 if that are more than are free."""
        return None if self.capacity is None else len(self._free) - self.reserved

    # -- holds --------------------------------------------------------------------------------------------------

    def take(self) -> int:
        """A free row with one hold; the null row without recurrent layers. Raises `CacheFull` if none is free."""
        if self.capacity is None:
            return 0
        if not self._free:
            raise CacheFull(NAME, 1, 0, unit="rows")
        row = self._free.pop()
        self._rows[row] = Row(next(self._numbers))
        return row

    def hold(self, row: int) -> None:
        """One more hold on a row that is referenced."""
        self._change(row, held=1)

    def drop_hold(self, row: int) -> None:
        self._change(row, held=-1)

    def exclusive(self, rows: Iterable[int]) -> int:
        """How many rows would be free without these holds."""
        times = Counter(row for row in rows if row)
        found = {row: self._rows[row] for row in times}
        return sum(not one.own and not one.checkpoint_of and one.held == times[row] for row, one in found.items())

    # -- states of sequences ------------------------------------------------------------------------------------

    def change_own(self, row: int, by: int) -> None:
        """So many more sequences have this row as their state."""
        self._change(row, own=by)

    def keep(self, states: "SequenceStates", pos: int, row: int) -> None:
        """Make a row a checkpoint of a sequence at `pos`, behind its other ones."""
        found = self._rows[row]
        if not found.checkpoint_of:
            self.use(row)
        found.checkpoint_of[states] = pos
        found.saves += pos - next(reversed(states.checkpoints), 0)
        states.checkpoints[pos] = row
        self._change(row)

    def release(self, states: "SequenceStates", pos: int) -> None:
        """Remove the checkpoint of a sequence at `pos`. The tokens that it saved count for the next one then."""
        positions = list(states.checkpoints)
        i = positions.index(pos)
        saved = pos - (positions[i - 1] if i else 0)
        row = states.checkpoints.pop(pos)
        del self._rows[row].checkpoint_of[states]
        self._rows[row].saves -= saved
        self._change(row)
        if i + 1 < len(positions):
            self._rows[states.checkpoints[positions[i + 1]]].saves += saved

    def use(self, row: int) -> None:
        """Record that a row becomes a checkpoint, or that a sequence resumes from it."""
        if row:
            self._uses += 1
            self._rows[row].used = self._uses

    # -- eviction -----------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """How many rows are referenced as checkpoints only."""
        return len(self._kept)

    def candidates(self) -> list[Candidate]:
        """These rows, for the policy to rank. Costs the rows that are kept."""
        found = ((row, self._rows[row]) for row in self._kept)
        return [Candidate(row, one.saves, one.stands_for, self._uses - one.used, one.number) for row, one in found]

    def trim(self, *, most: int, spare: int) -> None:
        """Evict what is referenced as a checkpoint only, the one of least loss first, until no more than `most` are, or
        `spare` others are free."""
        while self.kept > most and (self.free or 0) < spare:
            self.evict(first_to_go(self.candidates()).key)

    def evict(self, row: int) -> None:
        """Free a row that is referenced as a checkpoint only. Sequences resume from the checkpoint before it then."""
        if row not in self._kept:
            raise BadRequest(f"row {shown(row)} is not just a checkpoint of sequences")
        found, heirs = self._rows[row], set[int]()
        for states, pos in list(found.checkpoint_of.items()):
            before = max((at for at in states.checkpoints if at < pos), default=None)
            if before is not None:
                heirs.add(states.checkpoints[before])
            self.release(states, pos)
        for heir in heirs:  # once, for however many sequences it is the one before: `saves` counts those
            self._rows[heir].stands_for += found.stands_for

    # -- inside -------------------------------------------------------------------------------------------------

    def _change(self, row: int, *, held: int = 0, own: int = 0) -> None:
        """Count the references to a row, and free it with the last. The null row is not counted."""
        if not row:
            return
        found = self._rows[row]
        self.used += (found.own + own > 0) - (found.own > 0)
        found.held += held
        found.own += own
        (self._kept.add if found.kept else self._kept.discard)(row)
        if not (found.held or found.own or found.checkpoint_of):
            del self._rows[row]
            self._free.append(row)

    def check(self, states: Iterable["SequenceStates"], holds: Iterable[int]) -> None:
        """Assert the invariants, given the states of all sequences, and each row as often as it is held."""
        own: Counter[int] = Counter()
        held = Counter(row for row in holds if row)
        checkpoint_of: dict[int, dict[SequenceStates, int]] = {}
        saves: Counter[int] = Counter()
        for one in states:
            one.check()
            own.update([one.row] if one.row else [])
            before = 0
            for pos, row in one.checkpoints.items():
                assert before < pos, f"checkpoints at {list(one.checkpoints)} are not in order"
                checkpoint_of.setdefault(row, {})[one] = pos
                saves[row] += pos - before
                before = pos
        assert self._rows.keys() == own.keys() | checkpoint_of.keys() | held.keys()
        for row, found in self._rows.items():
            assert found.own == own[row], f"row {row} is the state of {own[row]}, counted {found.own}"
            assert found.held == held[row], f"row {row} has {held[row]} holds, counted {found.held}"
            assert (found.checkpoint_of, found.saves) == (checkpoint_of.get(row, {}), saves[row])
            assert len(set(found.checkpoint_of.values())) <= 1, f"row {row} is a checkpoint at different positions"
            assert found.stands_for >= 1 and 0 <= found.used <= self._uses
        assert self.used == sum(found.own > 0 for found in self._rows.values())
        assert self._kept == {row for row, found in self._rows.items() if found.kept}
        assert sorted([*self._free, *self._rows]) == list(range(1, (self.capacity or 0) + 1))


class SequenceStates:
    """The rows of one sequence: `row` has the state after `end` tokens, and `checkpoints`, by position and in order,
    those to which the sequence can be cut back."""

    __slots__ = ("_rows", "checkpoints", "end", "row")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.end = self.row = 0
        self.checkpoints: dict[int, int] = {}

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The positions behind 0 whose state is held, in order; None without recurrent layers."""
        if self._rows.capacity is None:
            return None
        return (*self.checkpoints, *((self.end,) if self.end and self.end not in self.checkpoints else ()))

    def deepest(self, pos: int) -> int:
        """The largest position up to `pos` whose state is held."""
        if pos >= self.end:
            return self.end
        return pos if self._rows.capacity is None else max((at for at in self.checkpoints if at <= pos), default=0)

    def at(self, pos: int) -> int:
        """The row of a position whose state is held."""
        if pos == self.end:
            return self.row
        return self.checkpoints[pos] if pos and self._rows.capacity is not None else 0

    def advance(self, row: int, end: int) -> None:
        """Make `row` the state, after `end` tokens."""
        before, self.row, self.end = self.row, row, end
        self._rows.change_own(row, 1)
        self._rows.change_own(before, -1)

    def resume(self, row: int, end: int) -> None:
        """The same, with a row that was kept."""
        self._rows.use(row)
        self.advance(row, end)

    def keep(self) -> None:
        """Keep the state at the end as a checkpoint."""
        self._keep(self.end, self.row)

    def _keep(self, pos: int, row: int) -> None:
        if row and pos not in self.checkpoints:
            self._rows.keep(self, pos, row)

    def release(self, pos: int) -> None:
        self._rows.release(self, pos)

    def fork(self, kept: int) -> "SequenceStates":
        """The states of a sequence that shares the first `kept` tokens; both get a checkpoint there."""
        twin = SequenceStates(self._rows)
        twin.resume(self.at(kept), kept)
        self._keep(kept, twin.row)
        for pos, row in self.checkpoints.items():
            if pos <= kept:
                twin._keep(pos, row)
        return twin

    def cut(self, kept: int) -> None:
        if kept < self.end:
            self.resume(self.at(kept), kept)
            for pos in [pos for pos in self.checkpoints if pos > kept]:
                self.release(pos)

    def close(self) -> None:
        """Free what only this sequence holds."""
        for pos in list(reversed(self.checkpoints)):
            self.release(pos)
        self.advance(0, 0)

    def check(self) -> None:
        """Assert the invariants of one sequence: row 0 is the state without tokens, and without recurrent layers."""
        assert (self.row == 0) == (self.end == 0 or self._rows.capacity is None), f"row {self.row} is at {self.end}"
        assert all(0 < pos <= self.end for pos in self.checkpoints)
        assert self.checkpoints.get(self.end, self.row) == self.row


class StepRows:
    """The rows that the open step writes: one for each feed that stores, and one for each checkpoint inside a feed.

    It holds them until it ends, and sequences and claims take further references before. None if no step is open, or
    without recurrent layers.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.open = False
        self._new: dict[int, int] = {}  # by sequence
        self._between: dict[tuple[int, int], int] = {}  # by sequence and position inside a feed

    def admit(self, batch: Batch, end: Callable[[int], int]) -> None:
        """Raise `BadRequest` if tokens that are not stored do not follow the `end` of their sequence, `CacheFull` if
        there are too few free rows."""
        if self._rows.free is None:
            return
        for feed in batch.feeds:
            if not feed.stores and feed.pos.start != end(feed.seq):
                raise BadRequest(
                    f"query-only rows of sequence {feed.seq} must begin at its end {end(feed.seq)}, not at "
                    f"{feed.pos.start}: recurrent layers have no state for other positions"
                )
        need = sum(feed.stores + len(feed.between) for feed in batch.feeds)
        if need > self._rows.free:
            raise CacheFull(NAME, need, self._rows.free, unit="rows")

    def begin(self, batch: Batch, row_of: Callable[[int], int]) -> tuple[StateSegment, ...]:
        """Take rows for a batch that was admitted. `row_of` returns the row of a sequence's state."""
        self.open = True
        if self._rows.capacity is None:
            return ()
        for feed in batch.feeds:
            if feed.stores:
                self._new[feed.seq] = self._rows.take()
            for pos in feed.between:
                self._between[feed.seq, pos] = self._rows.take()
        return _segments(batch, row_of, self.new, self.between)

    def null(self, batch: Batch) -> tuple[StateSegment, ...]:
        """As `begin`, for a reserved step: all sequences begin at the null row, and no row is taken."""
        self.open = True
        return () if self._rows.capacity is None else _segments(batch, lambda seq: 0, lambda seq: 0, lambda seq, pos: 0)

    def new(self, seq: int) -> int:
        """The row that becomes the state of a sequence."""
        return self._new.get(seq, 0)

    def between(self, seq: int, pos: int) -> int:
        """The row for a checkpoint inside a feed."""
        return self._between.get((seq, pos), 0)

    def held(self) -> list[int]:
        return [*self._new.values(), *self._between.values()]

    def check_parts(self, batch: Batch, counts: Sequence[int]) -> None:
        """Raise `BadRequest` for a part of a feed that is not `revertible`."""
        for feed, kept in zip(batch.feeds, counts, strict=True):
            if 0 < kept < len(feed.pos) and not feed.revertible and self._rows.capacity is not None:
                raise BadRequest(
                    f"{kept} of {len(feed.pos)} new tokens of sequence {feed.seq} cannot be kept: its feed was not "
                    f"begun as revertible"
                )

    def writes(self, batch: Batch, counts: Sequence[int]) -> dict[int, int]:
        """The rows that a commit of so many tokens of each feed keeps, with their sequences."""
        feeds = zip(batch.feeds, counts, strict=True)
        return {self._new[feed.seq]: feed.seq for feed, kept in feeds if kept and feed.seq in self._new}

    def inside(self, batch: Batch, counts: Sequence[int]) -> dict[int, int]:
        """The same of checkpoints inside feeds."""
        feeds = zip(batch.feeds, counts, strict=True)
        kept = ((feed.seq, pos) for feed, n in feeds for pos in feed.between if pos < feed.pos.start + n)
        return {self._between[one]: one[0] for one in kept if one in self._between}

    def end(self) -> None:
        """End the step: rows without other references are freed."""
        for row in self.held():
            self._rows.drop_hold(row)
        self._new, self._between, self.open = {}, {}, False


def _segments(
    batch: Batch, read: Callable[[int], int], write: Callable[[int], int], between: Callable[[int, int], int]
) -> tuple[StateSegment, ...]:
    segments: list[StateSegment] = []
    row = 0
    for feed in batch.feeds:
        length, written = len(feed.pos), write(feed.seq) if feed.stores else 0
        inside = tuple((pos - feed.pos.start, kept) for pos in feed.between if (kept := between(feed.seq, pos)))
        segments.append(StateSegment(feed.seq, row, length, read(feed.seq), written, inside))
        row += length
    return tuple(segments)
