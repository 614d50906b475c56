"""compact: move held cells together at the low end of a group, a bounded number of cells at a time.

A pass places the tables of a group one after the other from cell 1 on, each in order of position, so that each becomes
one run, or a few if it is shared. Cells in the target window are first moved to free cells, so a pass moves no cell
more than twice. Steps may run between two calls of `piece`: cells that they allocate or free are handled by this pass
or the next one.

Always true:
  * `at` is the frontier of the pass: cells below it are final for this pass;
  * `table` is the table that is being placed; None: the next one is not chosen yet;
  * a piece either evacuates or places: its targets are free, and its sources stay intact until all is copied.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from kvcellar.memory.cells.tables import Move, Table, Tables, undone
from kvcellar.memory.plan import Run


class Compaction:
    """The pass over one group."""

    def __init__(self) -> None:
        self.at = 1
        self.table: Table | None = None  # if it was closed since, it has no cells and the next one is chosen

    def piece(self, tables: Tables, budget: int) -> list[Move]:
        """Moves of at most `budget` cells. Empty if the group is compact, or if no cell is free."""
        if not tables.cells.free:
            return []
        began = self.at > 1
        moves = self._advance(tables, budget)
        if not moves:
            self.at, self.table = 1, None  # end of the pass; a new one may find cells freed behind the frontier
            if began:
                moves = self._advance(tables, budget)
        return moves

    def _advance(self, tables: Tables, budget: int) -> list[Move]:
        free = tables.cells.free_runs()
        while extents := self._unsettled(tables, free):
            for number, run in enumerate(extents):
                if run.cell != self.at:
                    left = extents[number:]
                    return self._lay_out(left, free, budget) or self._clear(left, free, min(budget, tables.cells.free))
                self.at = run.end
            self.table = None
        return []

    def _unsettled(self, tables: Tables, free: Sequence[Run]) -> list[Run]:
        """The runs above the frontier of the current table, or of the next one; empty at the end of the pass."""
        if self.table is not None and (extents := self._above(self.table)):
            return extents
        self.table = self._next(tables, free)
        return [] if self.table is None else self._above(self.table)

    def _next(self, tables: Tables, free: Sequence[Run]) -> Table | None:
        """The table to place next: one that holds the first held cell above the frontier, or a table that shares cells
        with it and has an earlier position above the frontier."""
        cell = self.at + _room(free, self.at)  # the first one that is held
        if cell > tables.cells.capacity:
            return None
        lowest: tuple[int, int] | None = None
        while True:
            extents = {table: self._above(table) for table in tables.over(Run(cell, 1))}
            first = {table: (self._position(table), runs[0].cell) for table, runs in extents.items()}
            before, lowest = lowest, min(first.values())
            if lowest == before:
                return _heaviest({table: runs for table, runs in extents.items() if first[table] == lowest})
            cell = lowest[1]

    def _position(self, table: Table) -> int:
        """Position of the table's first cell above the frontier."""
        pos = table.first
        for run in table.runs:
            if run.end > self.at:
                return pos + max(0, self.at - run.cell)
            pos += run.n
        return pos

    def _above(self, table: Table) -> list[Run]:
        """The runs of a table above the frontier, in order of position."""
        runs = [run for run in table.runs if run.end > self.at]
        return [run if run.cell >= self.at else Run(self.at, run.end - self.at) for run in runs]

    def _lay_out(self, extents: Sequence[Run], free: Sequence[Run], budget: int) -> list[Move]:
        """Moves of `extents` to their target cells, as far as these are free."""
        moves: list[Move] = []
        here = self.at
        for run in extents:
            if run.cell != here:
                n = min(run.n, _room(free, here), budget)
                if n:
                    moves.append(Move(Run(run.cell, n), Run(here, n)))
                if n < run.n:
                    break
                budget -= n
            here += run.n
        return moves

    def _clear(self, extents: Sequence[Run], free: Sequence[Run], budget: int) -> list[Move]:
        """Evacuate the target window of `extents`, except cells already in place. `budget` <= number of free cells."""
        end = self.at + min(budget, sum(run.n for run in extents))
        settled: list[Run] = []
        here = self.at
        for run in extents:
            if run.cell == here:
                settled.append(run)
            here += run.n
        window = Run(self.at, end - self.at)
        sources = _without(window, sorted([*free, *settled]))
        spare = [run for stretch in free for run in _without(stretch, [window])]
        spare.sort(key=lambda run: (run.cell < self.at, -run.n))
        return _paired(sources, spare)


def _heaviest(sharing: Mapping[Table, list[Run]]) -> Table:
    """Select the table to place as one run, of tables whose extents begin with the same cell.

    Where the tables branch, follow the branch with the most tables: each of the others gets one more run.
    """
    left = {table: list(reversed(extents)) for table, extents in sharing.items()}
    while len(left) > 1:
        n = min(extents[-1].n for extents in left.values())
        branches: dict[int, list[Table]] = {}  # by their next cell
        for table, extents in left.items():
            run = extents.pop()
            if run.n > n:
                extents.append(Run(run.cell + n, run.n - n))
            if extents:
                branches.setdefault(extents[-1].cell, []).append(table)
        if not branches:
            break
        most = min(branches, key=lambda cell: (-len(branches[cell]), cell))
        left = {table: left[table] for table in branches[most]}
    return next(iter(left))


def relocate(tables: Tables, moves: Sequence[Move], copy: Callable[[Sequence[Move]], None]) -> None:
    """`copy` the cells of `moves`, then update all tables. If `copy` raises, nothing has changed."""
    cells, moves = tables.cells, sorted(moves)
    holding = {table: None for move in moves for table in tables.over(move.source)}
    moves = [part for move in moves for part in _cut(move, cells.borders(move.source))]
    targets: list[Run] = []
    with undone(lambda: cells.drop(targets)):
        for move in moves:
            cells.take_exact(move.target)
            targets.append(move.target)
        copy(moves)
    sources = [move.source.cell for move in moves]
    for table in holding:
        table.relocate(moves, sources)
    cells.drop(targets)


def _cut(move: Move, borders: Sequence[int]) -> Iterator[Move]:
    """The move, split at `borders` of its source."""
    source, target = move
    for a, b in pairwise([source.cell, *borders, source.end]):
        yield Move(Run(a, b - a), Run(target.cell + a - source.cell, b - a))


def _room(free: Sequence[Run], cell: int) -> int:
    """Number of consecutive free cells from `cell` on."""
    at = bisect_right(free, cell, key=lambda run: run.cell) - 1
    return max(0, free[at].end - cell) if at >= 0 else 0


def _without(run: Run, others: Iterable[Run]) -> list[Run]:
    """The parts of `run` outside `others`, which are sorted."""
    left: list[Run] = []
    at = run.cell
    for other in others:
        if other.cell > at:
            left.append(Run(at, min(other.cell, run.end) - at))
        at = max(at, other.end)
        if at >= run.end:
            break
    if at < run.end:
        left.append(Run(at, run.end - at))
    return [part for part in left if part.n > 0]


def _paired(sources: Sequence[Run], targets: Sequence[Run]) -> list[Move]:
    """Moves of all cells of `sources` to the first cells of `targets`."""
    moves: list[Move] = []
    spare = list(reversed(targets))
    for source in sources:
        while source.n:
            target = spare.pop()
            n = min(source.n, target.n)
            moves.append(Move(Run(source.cell, n), Run(target.cell, n)))
            source = Run(source.cell + n, source.n - n)
            if n < target.n:
                spare.append(Run(target.cell + n, target.n - n))
    return moves
