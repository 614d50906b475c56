"""sequence_states: the rows that have the recurrent states of one sequence, at its end and at checkpoints. No torch.

Always true:
  * `row` is the state after `end` tokens; it is the null row 0 if there are none, or no recurrent layers;
  * checkpoints are in order, all behind position 0 and none beyond the end.
"""

from collections import Counter
from collections.abc import Iterable

from kvcellar.cache.rows import Rows


class SequenceStates:
    """`checkpoints` has the rows of states that are kept so that the sequence can be cut back to them, by position."""

    __slots__ = ("_rows", "checkpoints", "end", "row")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.end = self.row = 0
        self.checkpoints: dict[int, int] = {}

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The positions behind 0 whose state is there, in order; None without recurrent layers."""
        if self._rows.capacity is None:
            return None
        return (*self.checkpoints, *((self.end,) if self.end and self.end not in self.checkpoints else ()))

    def deepest(self, pos: int) -> int:
        """The largest position up to `pos` whose state is there."""
        if pos >= self.end:
            return self.end
        return pos if self._rows.capacity is None else max((at for at in self.checkpoints if at <= pos), default=0)

    def at(self, pos: int) -> int:
        """The row of a position whose state is there."""
        if pos == self.end:
            return self.row
        return self.checkpoints[pos] if pos and self._rows.capacity is not None else 0

    def advance(self, row: int, end: int) -> None:
        """From now on `row` is the state, of `end` tokens."""
        before, self.row, self.end = self.row, row, end
        self._rows.change_own(row, 1)
        self._rows.change_own(before, -1)

    def resume(self, row: int, end: int) -> None:
        """The same, from a row that was kept."""
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
        """Those of a sequence that shares what is up to `kept`, where both have a checkpoint from now on."""
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
        """Assert what is always true of one sequence; `Rows.check` asserts the references."""
        assert (self.row == 0) == (self.end == 0 or self._rows.capacity is None), f"row {self.row} is at {self.end}"
        assert all(0 < pos <= self.end for pos in self.checkpoints)
        assert self.checkpoints.get(self.end, self.row) == self.row


def check_all(rows: Rows, states: Iterable[SequenceStates], holds: Iterable[int]) -> None:
    """Assert what is always true, where these are the states of all sequences, and rows as often as they are held."""
    known = list(states)
    for one in known:
        one.check()
    rows.check([(one, one.row) for one in known], Counter(row for row in holds if row))
