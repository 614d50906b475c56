"""rows: how often each row of recurrent state is referenced, and which rows are free. No torch.

A row is what all recurrent layers of a model remember of one sequence at one position. It is written by the step that
took it, and never again: forks share it, and steps that go on from it write another. So a fork copies nothing, a step
that is abandoned leaves nothing behind, and a sequence can be cut back to where a row was kept.

Always true:
  * row 0 is null, the state of a sequence that has read nothing; it is neither taken nor counted;
  * every other row is free or referenced: as the state of sequences, as their checkpoint, or by holds (of the open
    step, of claims, of what is being read out).

Nothing here decides what is kept: rows are only counted, and `policy` ranks what could go.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Protocol

from kvcellar.errors import BadRequest, CacheFull, shown
from kvcellar.policy import Candidate

NAME = "recurrent"  # what messages and reports call the rows


class Keeper(Protocol):
    """The states of a sequence, some of which it keeps as checkpoints: rows by position, in order."""

    checkpoints: dict[int, int]

    def release(self, pos: int) -> None: ...


class Row:
    """A row that is referenced. `number` is the order in which rows were taken; `saves` are the tokens that would have
    to be read again without its checkpoints."""

    __slots__ = ("held", "keepers", "number", "own", "saves", "stands_for", "used")

    def __init__(self, number: int) -> None:
        self.number = number
        self.held = 1  # by the open step, claims and readings
        self.own = 0  # sequences whose state it is
        self.keepers: dict[Keeper, int] = {}  # sequences that keep it as a checkpoint, and at which position
        self.saves = 0
        self.stands_for = 1  # itself and the checkpoints behind it that were evicted: what wanted these resumes here
        self.used = 0  # when it was kept or resumed from, as `Rows` counts that

    @property
    def kept(self) -> bool:
        """Is it a checkpoint of sequences, and nothing else?"""
        return bool(self.keepers) and not self.own and not self.held


class Rows:
    """The rows of one memory: `capacity` of them, the null row apart; None in a memory without recurrent layers, where
    everything is the null row."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._free = list(range(capacity or 0, 0, -1))
        self._rows: dict[int, Row] = {}
        self._kept: set[int] = set()  # rows that are checkpoints of sequences, and nothing else
        self._numbers = count()
        self._uses = 0

    @property
    def free(self) -> int | None:
        return None if self.capacity is None else len(self._free)

    @property
    def used(self) -> int:
        """How many rows are the present state of sequences. Costs the rows that are referenced."""
        return sum(row.own > 0 for row in self._rows.values())

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
        return sum(not one.own and not one.keepers and one.held == times[row] for row, one in found.items())

    # -- states of sequences ------------------------------------------------------------------------------------

    def change_own(self, row: int, by: int) -> None:
        """So many more sequences have this row as their state."""
        self._change(row, own=by)

    def keep(self, keeper: Keeper, pos: int, row: int) -> None:
        """From now on a row is a checkpoint of a sequence, at `pos`, behind all others."""
        found = self._rows[row]
        if not found.keepers:
            self.use(row)
        found.keepers[keeper] = pos
        found.saves += pos - next(reversed(keeper.checkpoints), 0)
        keeper.checkpoints[pos] = row
        self._change(row)

    def release(self, keeper: Keeper, pos: int) -> None:
        """A sequence keeps its checkpoint at `pos` no longer. What it saved is saved by the next one from now on."""
        positions = list(keeper.checkpoints)
        i = positions.index(pos)
        saved = pos - (positions[i - 1] if i else 0)
        row = keeper.checkpoints.pop(pos)
        del self._rows[row].keepers[keeper]
        self._rows[row].saves -= saved
        self._change(row)
        if i + 1 < len(positions):
            self._rows[keeper.checkpoints[positions[i + 1]]].saves += saved

    def use(self, row: int) -> None:
        """It becomes a checkpoint, or a sequence resumes from it."""
        if row:
            self._uses += 1
            self._rows[row].used = self._uses

    # -- what could go ------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """How many rows are checkpoints of sequences, and nothing else."""
        return len(self._kept)

    def candidates(self) -> list[Candidate]:
        """These, as the policy ranks them. Costs the rows that are kept."""
        found = ((row, self._rows[row]) for row in self._kept)
        return [Candidate(row, one.saves, one.stands_for, self._uses - one.used, one.number) for row, one in found]

    def evict(self, row: int) -> None:
        """Free a row that is only a checkpoint: what wanted it resumes from the one before."""
        if row not in self._kept:
            raise BadRequest(f"row {shown(row)} is not just a checkpoint of sequences")
        found, heirs = self._rows[row], set[int]()
        for keeper, pos in list(found.keepers.items()):
            before = max((at for at in keeper.checkpoints if at < pos), default=None)
            if before is not None:
                heirs.add(keeper.checkpoints[before])
            self.release(keeper, pos)
        for heir in heirs:  # once, for however many sequences it is the one before: `saves` counts those
            self._rows[heir].stands_for += found.stands_for

    # -- inside -------------------------------------------------------------------------------------------------

    def _change(self, row: int, *, held: int = 0, own: int = 0) -> None:
        """Count what references a row; free it if nothing does. The null row is not counted."""
        if not row:
            return
        found = self._rows[row]
        found.held += held
        found.own += own
        (self._kept.add if found.kept else self._kept.discard)(row)
        if not (found.held or found.own or found.keepers):
            del self._rows[row]
            self._free.append(row)

    def check(self, states: Sequence[tuple[Keeper, int]], holds: Mapping[int, int]) -> None:
        """Assert what is always true, where `states` are those of all sequences, with the row of each, and `holds` all
        holds on rows."""
        own = Counter(row for _, row in states if row)
        keepers: dict[int, dict[Keeper, int]] = {}
        saves: Counter[int] = Counter()
        for keeper, _ in states:
            before = 0
            for pos, row in keeper.checkpoints.items():
                assert before < pos, f"checkpoints at {list(keeper.checkpoints)} are not in order"
                keepers.setdefault(row, {})[keeper] = pos
                saves[row] += pos - before
                before = pos
        assert self._rows.keys() == own.keys() | keepers.keys() | holds.keys()
        for row, found in self._rows.items():
            assert found.own == own[row], f"row {row} is the state of {own[row]}, counted {found.own}"
            assert found.held == holds.get(row, 0), f"row {row} has {holds.get(row, 0)} holds, counted {found.held}"
            assert (found.keepers, found.saves) == (keepers.get(row, {}), saves[row])
            assert len(set(found.keepers.values())) <= 1, f"row {row} is a checkpoint at different positions"
            assert found.stands_for >= 1 and 0 <= found.used <= self._uses
        assert self._kept == {row for row, found in self._rows.items() if found.kept}
        assert sorted([*self._free, *self._rows]) == list(range(1, (self.capacity or 0) + 1))
