"""tables: which cells of a group a sequence, a claim or a checkpoint holds, in order of position.

Always true:
  * `runs` are the cells of positions [first, end), in order; no run is empty, and no two neighbours could be one;
  * the table is one holder of each of its cells, for as long as it is open;
  * `Tables` knows each table by the cells that its runs begin at.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from kvcellar.cache.cells import Cells
from kvcellar.cache.layouts.moved import first_after
from kvcellar.plan import Run
from kvcellar.spans import Span


class Move(NamedTuple):
    """What is in the cells of `source` is now in those of `target`, of which there are as many."""

    source: Run
    target: Run


class Part(NamedTuple):
    """Cells of one run of a table, from position `pos` on. `shared`: others hold them, too."""

    pos: int
    run: Run
    shared: bool

    @property
    def n(self) -> int:
        return self.run.n

    def first(self, n: int) -> "Part":
        return Part(self.pos, Run(self.run.cell, n), self.shared)

    def last(self, n: int) -> "Part":
        skip = self.run.n - n
        return Part(self.pos + skip, Run(self.run.cell + skip, n), self.shared)


class Tables:
    """All tables of one group, found by cell."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.used = 0  # tables with cells
        self._at: dict[int, dict[Table, None]] = {}  # by the cell that a run of theirs begins at

    def enter(self, table: "Table", cell: int) -> None:
        """A run of `table` begins at `cell` from now on: the last of its runs, or one in place of another."""
        found = self._at.get(cell)
        if found is None:
            self._at[cell] = {table: None}
        else:
            found[table] = None

    def leave(self, table: "Table", cell: int) -> None:
        """None of its runs begins there any more."""
        found = self._at[cell]
        del found[table]
        if not found:
            del self._at[cell]

    def move(self, table: "Table", cell: int, to: int) -> None:
        """The run of `table` that began at `cell` begins at `to`."""
        if len(self._at[cell]) == 1 and to not in self._at:  # in a window that slides, at each step
            self._at[to] = self._at.pop(cell)
        else:
            self.leave(table, cell)
            self.enter(table, to)

    def over(self, run: Run) -> "dict[Table, None]":
        """The tables that hold any of these cells, all of which are held. Costs their runs, and the pieces back to
        where the runs over the first cell begin."""
        found: dict[Table, None] = {}
        missing, starts = self.cells.holders(run.cell)
        for start in starts:
            if not missing:
                break
            for table in self._at.get(start, ()):
                if any(one.cell == start and one.end > run.cell for one in table.runs):
                    found[table] = None
                    missing -= 1
        for start in self.cells.borders(run):
            found |= self._at.get(start, {})
        return found

    def check(self, tables: "Sequence[Table]") -> None:
        """Assert that `tables` are all that there are."""
        at: dict[int, set[Table]] = {}
        for table in tables:
            for run in table.runs:
                at.setdefault(run.cell, set()).add(table)
        assert {cell: set(found) for cell, found in self._at.items()} == at, "a table is not known by its cells"
        assert self.used == sum(bool(table.runs) for table in tables)


class Table:
    """An ordered table of cells. Costs runs, not tokens."""

    __slots__ = ("_cells", "_starts", "_tables", "end", "first", "runs")

    def __init__(self, tables: Tables, first: int = 0) -> None:
        self._tables, self._cells = tables, tables.cells
        self.first = self.end = first
        self.runs: list[Run] = []
        self._starts: list[int] = []  # position of each run's first cell

    @property
    def last_cell(self) -> int | None:
        """The cell of the last position; a new token is best written right behind it."""
        return self.runs[-1].end - 1 if self.runs else None

    @property
    def first_cell(self) -> int | None:
        """The cell of the first position, if positions before it were forgotten; it will be, too, as others come."""
        return self.runs[0].cell if self.runs and self.first else None

    def since(self, pos: int) -> tuple[Run, ...]:
        """The cells of [pos, end), where first <= pos <= end."""
        if pos <= self.first:
            return tuple(self.runs)
        if pos >= self.end:
            return ()
        i = bisect_right(self._starts, pos) - 1
        skip = pos - self._starts[i]
        run = self.runs[i]
        return (Run(run.cell + skip, run.n - skip), *self.runs[i + 1 :])

    def within(self, span: Span) -> list[Run]:
        """The cells of a span of positions, all of which the table has, in order."""
        runs: list[Run] = []
        left = len(span)
        for run in Table.since(self, span.start):
            if left:
                runs.append(Run(run.cell, min(left, run.n)))
                left -= runs[-1].n
        return runs

    def parts_since(self, pos: int) -> list[Part]:
        """The cells of [pos, end), where first <= pos <= end, in order."""
        parts: list[Part] = []
        i = max(0, bisect_right(self._starts, pos) - 1)
        for start, run in zip(self._starts[i:], self.runs[i:], strict=True):
            for cells, shared in self._cells.parts(run):
                part = Part(start + cells.cell - run.cell, cells, shared)
                if part.pos + part.n > pos:
                    parts.append(part.last(min(part.n, part.pos + part.n - pos)))
        return parts

    def hold_part(self, part: Part) -> Run:
        """The cells of a part of this table, with one more holder: the caller."""
        i = bisect_right(self._starts, part.pos) - 1
        return self._cells.hold_part(self.runs[i], part.pos - self._starts[i], part.n)

    def append(self, runs: Iterable[Run]) -> None:
        """Take over the holding of `runs`: they become the next positions."""
        for run in runs:
            if self.runs and self.runs[-1].end == run.cell:
                last = self.runs[-1]
                self.runs[-1] = Run(last.cell, last.n + run.n)
                self._cells.weld(run.cell)
            else:
                self._add(run, self.end)
            self.end += run.n

    def _add(self, run: Run, pos: int) -> None:
        """One more run, from `pos` on."""
        self._tables.used += not self.runs
        self.runs.append(run)
        self._starts.append(pos)
        self._tables.enter(self, run.cell)

    def hand_over(self) -> list[Run]:
        """The cells, whose holder is the caller from now on; the table is empty."""
        runs, self.runs, self._starts = self.runs, [], []
        for run in runs:
            self._tables.leave(self, run.cell)
        self._tables.used -= bool(runs)
        self.end = self.first
        return runs

    def forget_below(self, pos: int) -> None:
        """Give back the cells of [first, pos); the table begins at `pos` afterwards."""
        while self.first < pos and self.runs:
            gone = self.runs[0]
            if gone.n > pos - self.first:
                gone, self.runs[0] = self._cells.divide(gone, pos - self.first)
                self._starts[0] = pos
                self._tables.move(self, gone.cell, self.runs[0].cell)
            else:
                del self.runs[0], self._starts[0]
                self._tables.leave(self, gone.cell)
                self._tables.used -= not self.runs
            self._cells.drop([gone])
            self.first += gone.n

    def cut(self, pos: int) -> None:
        """Give back the cells of [pos, end). Cut below `first`, the table is empty and begins at `pos`."""
        while self.runs and self._starts[-1] >= pos:
            gone = self.runs.pop()
            self._starts.pop()
            self._tables.leave(self, gone.cell)
            self._tables.used -= not self.runs
            self._cells.drop([gone])
        if self.runs:
            run, kept = self.runs[-1], pos - self._starts[-1]
            if kept < run.n:
                self.runs[-1] = self._cells.shorten(run, kept)
        self.end = min(self.end, pos)
        self.first = min(self.first, self.end)

    def close_over(self, gone: Span, behind: Iterable[Run]) -> None:
        """What lies behind `gone` is now in the cells `behind`, handed over by the caller, and begins at its start."""
        first = first_after(self.first, gone)
        self.cut(gone.start)
        if not self.runs:
            self.first = self.end = first
        self.append(behind)

    def relocate(self, moves: Sequence[Move], sources: Sequence[int]) -> None:
        """Hold the targets of `moves` instead of their sources, for which the caller has copied what is in them.

        They are in order of source, and each source is wholly in one of this table's runs, or in none. `sources` are
        the first cells of these.
        """
        spans = [(bisect_left(sources, run.cell), bisect_left(sources, run.end)) for run in self.runs]
        at = next((i for i, (start, end) in enumerate(spans) if start < end), None)
        if at is None:
            return
        runs, self.end = self.runs[at:], self._starts[at]
        del self.runs[at:], self._starts[at:]
        for run in runs:
            self._tables.leave(self, run.cell)
        self._tables.used -= not self.runs
        for run, (start, end) in zip(runs, spans[at:], strict=True):
            left = run
            for source, target in moves[start:end]:
                if source.cell > left.cell:
                    before, left = self._cells.divide(left, source.cell - left.cell)
                    self.append([before])
                rest = None
                if source.n < left.n:
                    _, rest = self._cells.divide(left, source.n)
                self._cells.hold([target])
                self._cells.drop([source])
                self.append([target])
                if rest is None:
                    break
                left = rest
            else:
                self.append([left])

    def close(self) -> None:
        """Give back all cells: the sequence is no more."""
        self.cut(0)

    def share(self, upto: int, start: int = 0) -> Self:
        """Another table over the same cells of [max(first, start), upto); every cell gets one more holder."""
        twin = type(self)(self._tables, min(max(self.first, start), upto))
        for pos, run in zip(self._starts, self.runs, strict=True):
            skip, n = max(0, twin.first - pos), min(run.n, upto - pos)
            if skip < n:
                twin._add(self._cells.hold_part(run, skip, n - skip), pos + skip)
        twin.end = upto
        return twin

    def check(self) -> None:
        """Assert what is always true of one table; `Memory.check` asserts the holders of all of them together."""
        assert len(self.runs) == len(self._starts)
        at = self.first
        for i, (start, run) in enumerate(zip(self._starts, self.runs, strict=True)):
            assert start == at, f"run {i} should be at position {at}, is at {start}"
            assert run.n > 0 and run.cell > 0, f"run {i} is {run}"
            assert i == 0 or self.runs[i - 1].end != run.cell, f"runs {i - 1} and {i} could be one"
            at += run.n
        assert at == self.end, f"the runs end at {at}, the table at {self.end}"


def share_all(tables: Iterable[Table], upto: int, start: int = 0) -> list[Table]:
    """Of each table what `share` returns: of all of them or, if that raises, of none."""
    twins: list[Table] = []
    try:
        for table in tables:
            twins.append(table.share(upto, start))
    except BaseException:
        for twin in twins:
            twin.close()
        raise
    return twins


class InputTable(Table):
    """The cells of a sequence's input, by place in the input. Whatever is done to the text leaves it whole."""

    __slots__ = ()

    def since(self, pos: int) -> tuple[Run, ...]:
        """Nothing of an input lies behind a position of the text."""
        return ()

    def parts_since(self, pos: int) -> list[Part]:
        """Nothing of an input lies behind a position of the text."""
        return []

    def cut(self, pos: int) -> None:
        """The text is cut; the input stays."""

    def close_over(self, gone: Span, behind: Iterable[Run]) -> None:
        """The text is shifted; the input stays."""

    def close(self) -> None:
        super().cut(0)

    def share(self, upto: int, start: int = 0) -> Self:
        """All of it, however much of the text is shared."""
        return super().share(self.end)
