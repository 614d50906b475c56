"""tables: which cells of a group a sequence, a claim or a checkpoint holds, in order of position.

Always true:
  * `runs` are the cells of positions [first, end), in order; no run is empty, and no two neighbours could be one;
  * the table is one holder of each of its cells, for as long as it is open;
  * `Tables` indexes each table by the first cells of its runs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

from kvcellar.memory.cells.cells import Cells
from kvcellar.memory.cells.layouts import first_after
from kvcellar.memory.plan import Run
from kvcellar.memory.spans import Span


class Move(NamedTuple):
    """Move the content of the cells of `source` to those of `target`; both have the same length."""

    source: Run
    target: Run


class Part(NamedTuple):
    """Cells of one run of a table, from position `pos` on. `shared`: they have other holders too."""

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

    def __init__(self, cells: Cells, *, of_input: bool = False) -> None:
        self.cells, self._of_input = cells, of_input
        self.used = 0  # tables with cells
        self._at: dict[int, dict[Table, None]] = {}  # by the first cell of each of their runs

    def new(self, first: int = 0) -> "Table":
        """An empty table that begins at position `first`."""
        return InputTable(self, first) if self._of_input else Table(self, first)

    def enter(self, table: "Table", cell: int) -> None:
        """Register that a run of `table` begins at `cell`."""
        found = self._at.get(cell)
        if found is None:
            self._at[cell] = {table: None}
        else:
            found[table] = None

    def leave(self, table: "Table", cell: int) -> None:
        """Unregister the run of `table` that began at `cell`."""
        found = self._at[cell]
        del found[table]
        if not found:
            del self._at[cell]

    def move(self, table: "Table", cell: int, to: int) -> None:
        """Register that the run of `table` that began at `cell` now begins at `to`."""
        if len(self._at[cell]) == 1 and to not in self._at:  # fast path: a sliding window does this at each step
            self._at[to] = self._at.pop(cell)
        else:
            self.leave(table, cell)
            self.enter(table, to)

    def over(self, run: Run) -> "dict[Table, None]":
        """The tables that hold any cell of `run`, all of whose cells are held. Linear in the runs of these tables and
        in the pieces back to the earliest start of a run that contains the first cell."""
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
        """Assert that the index contains exactly `tables`."""
        at: dict[int, set[Table]] = {}
        for table in tables:
            for run in table.runs:
                at.setdefault(run.cell, set()).add(table)
        assert {cell: set(found) for cell, found in self._at.items()} == at, (
            "the index by cells does not match the tables"
        )
        assert self.used == sum(bool(table.runs) for table in tables)


class Table:
    """An ordered table of cells. Its operations are linear in runs, not in tokens."""

    __slots__ = ("_cells", "_starts", "_tables", "end", "first", "runs")

    def __init__(self, tables: Tables, first: int = 0) -> None:
        self._tables, self._cells = tables, tables.cells
        self.first = self.end = first
        self.runs: list[Run] = []
        self._starts: list[int] = []  # position of each run's first cell

    @property
    def last_cell(self) -> int | None:
        """The cell of the last position; None if empty. The preferred cell for a new token is the next one."""
        return self.runs[-1].end - 1 if self.runs else None

    @property
    def first_cell(self) -> int | None:
        """The first cell of a window that has slid, which is freed next as the window slides on; otherwise None."""
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
        """The cells of `span`, in order; the table contains all its positions."""
        runs: list[Run] = []
        left = len(span)
        for run in Table.since(self, span.start):
            if left:
                runs.append(Run(run.cell, min(left, run.n)))
                left -= runs[-1].n
        return runs

    def parts_since(self, pos: int) -> list[Part]:
        """The cells of [pos, end) in order, split where sharing changes; first <= pos <= end."""
        parts: list[Part] = []
        i = max(0, bisect_right(self._starts, pos) - 1)
        for start, run in zip(self._starts[i:], self.runs[i:], strict=True):
            for cells, shared in self._cells.parts(run):
                part = Part(start + cells.cell - run.cell, cells, shared)
                if part.pos + part.n > pos:
                    parts.append(part.last(min(part.n, part.pos + part.n - pos)))
        return parts

    def hold_part(self, part: Part) -> Run:
        """Add the caller as a holder of the cells of a part of this table."""
        i = bisect_right(self._starts, part.pos) - 1
        return self._cells.hold_part(self.runs[i], part.pos - self._starts[i], part.n)

    def append(self, runs: Iterable[Run]) -> None:
        """Append `runs` as the next positions. The table takes over their hold from the caller."""
        for run in runs:
            if self.runs and self.runs[-1].end == run.cell:
                last = self.runs[-1]
                self.runs[-1] = Run(last.cell, last.n + run.n)
                self._cells.weld(run.cell)
            else:
                self._add(run, self.end)
            self.end += run.n

    def _add(self, run: Run, pos: int) -> None:
        """Add a run whose first position is `pos`."""
        self._tables.used += not self.runs
        self.runs.append(run)
        self._starts.append(pos)
        self._tables.enter(self, run.cell)

    def hand_over(self) -> list[Run]:
        """Transfer the hold on all cells to the caller and leave the table empty."""
        runs, self.runs, self._starts = self.runs, [], []
        for run in runs:
            self._tables.leave(self, run.cell)
        self._tables.used -= bool(runs)
        self.end = self.first
        return runs

    def forget_below(self, pos: int) -> None:
        """Free the cells of [first, pos); the table then begins at `pos`."""
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
        """Free the cells of [pos, end). If `pos` is below `first`, the table is then empty and begins at `pos`."""
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
        """Remove the span `gone`. `behind` are the cells of the positions after it, whose hold the caller transfers."""
        first = first_after(self.first, gone)
        self.cut(gone.start)
        if not self.runs:
            self.first = self.end = first
        self.append(behind)

    def replace(self, start: int, other: "Table") -> None:
        """Hold the cells of `other` from position `start` on, as many as it has, in place of those held there.

        `other` is handed over. The table goes on behind it as before.
        """
        end = start + other.end - other.first
        behind = self.share(self.end, end)
        self.cut(start)
        self.append(other.hand_over())
        self.append(behind.hand_over())

    def relocate(self, moves: Sequence[Move], sources: Sequence[int]) -> None:
        """Replace the sources of `moves` by their targets. The caller has copied the content.

        Moves are sorted by source, and each source is inside one of this table's runs or outside all of them.
        `sources` are the first cells of the sources.
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
        """Free all cells; the sequence is dropped."""
        self.cut(0)

    def share(self, upto: int, start: int = 0) -> Self:
        """A new table that shares the cells of [max(first, start), upto); each gets one more holder."""
        twin = type(self)(self._tables, min(max(self.first, start), upto))
        first, end = max(0, bisect_right(self._starts, twin.first) - 1), bisect_left(self._starts, upto)
        for pos, run in zip(self._starts[first:end], self.runs[first:end], strict=True):
            skip, n = max(0, twin.first - pos), min(run.n, upto - pos)
            if skip < n:
                twin._add(self._cells.hold_part(run, skip, n - skip), pos + skip)
        twin.end = upto
        return twin

    def check(self) -> None:
        """Assert the invariants of this table; `Memory.check` asserts the holders over all tables."""
        assert len(self.runs) == len(self._starts)
        at = self.first
        for i, (start, run) in enumerate(zip(self._starts, self.runs, strict=True)):
            assert start == at, f"run {i} should be at position {at}, is at {start}"
            assert run.n > 0 and run.cell > 0, f"run {i} is {run}"
            assert i == 0 or self.runs[i - 1].end != run.cell, f"runs {i - 1} and {i} could be one"
            at += run.n
        assert at == self.end, f"the runs end at {at}, the table at {self.end}"


def share_all(tables: Iterable[Table], upto: int, start: int = 0) -> list[Table]:
    """`share` every table. If one raises, no cell gets a holder."""
    twins: list[Table] = []
    with undone(lambda: close_all(twins)):
        for table in tables:
            twins.append(table.share(upto, start))
    return twins


def close_all(tables: Iterable[Table]) -> None:
    for table in tables:
        table.close()


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` if the block raises."""
    try:
        yield
    except BaseException:
        undo()
        raise


class InputTable(Table):
    """The cells of a sequence's input, by index in the input. Cuts and shifts of the text leave it unchanged."""

    __slots__ = ()

    def since(self, pos: int) -> tuple[Run, ...]:
        """Always empty: the cells of an input have no text positions."""
        return ()

    def parts_since(self, pos: int) -> list[Part]:
        """Always empty: the cells of an input have no text positions."""
        return []

    def cut(self, pos: int) -> None:
        """Does nothing: the input stays when the text is cut."""

    def close_over(self, gone: Span, behind: Iterable[Run]) -> None:
        """Does nothing: the input stays when the text is shifted."""

    def close(self) -> None:
        super().cut(0)

    def share(self, upto: int, start: int = 0) -> Self:
        """Share all of the input, independent of how much of the text is shared."""
        return super().share(self.end)
