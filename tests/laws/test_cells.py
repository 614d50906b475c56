"""Cells and tables against an array of counts: random lives of lines that take, share, shorten and forget cells.

A line's cells are written down one by one, and a cell is free when no line has it. Pieces never say more than that:
what two lines shared and one gave back is one piece again, so an operation costs the runs that live, not the past.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.memory.cells.cells import Cells
from kvcellar.memory.cells.tables import Table, Tables
from kvcellar.memory.plan import Run
from tests.laws.watch import pieces


def spelled(runs: list[Run] | tuple[Run, ...]) -> list[int]:
    return [cell for run in runs for cell in range(run.cell, run.end)]


class Lives(RuleBasedStateMachine):
    """Tables over one pool of cells; `known[i]` are the cells of table i by position."""

    @initialize(capacity=st.integers(1, 60))
    def start(self, capacity: int) -> None:
        self.cells = Cells(capacity)
        self.all = Tables(self.cells)
        self.tables: list[Table] = []
        self.known: list[dict[int, int]] = []

    def _grow(self, which: int, count: int) -> None:
        count = min(count, self.cells.free)
        table, before = self.tables[which], set().union(*(known.values() for known in self.known))
        runs = self.cells.take(count, after=table.last_cell, before=table.first_cell)
        new = spelled(runs)
        assert len(set(new)) == count
        assert before.isdisjoint(new)
        assert all(1 <= cell <= self.cells.capacity for cell in new)
        if runs and table.last_cell is not None and table.last_cell + 1 not in before | {self.cells.capacity + 1}:
            assert new[0] == table.last_cell + 1, "the cell behind the last one was free"
        self.known[which].update(enumerate(new, table.end))
        table.append(runs)

    @rule(count=st.integers(0, 20))
    def open(self, count: int) -> None:
        if len(self.tables) < 6:
            self.tables.append(Table(self.all))
            self.known.append({})
            self._grow(-1, count)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 5), count=st.integers(1, 12))
    def grow(self, which: int, count: int) -> None:
        self._grow(which % len(self.tables), count)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 5), upto=st.integers(0, 40))
    def share(self, which: int, upto: int) -> None:
        which %= len(self.tables)
        upto = min(upto, self.tables[which].end)
        if len(self.tables) < 6:
            self.tables.append(self.tables[which].share(upto))
            self.known.append({pos: cell for pos, cell in self.known[which].items() if pos < upto})

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 5), count=st.integers(0, 9))
    def forget(self, which: int, count: int) -> None:
        which %= len(self.tables)
        pos = min(self.tables[which].first + count, self.tables[which].end)
        self.tables[which].forget_below(pos)
        self.known[which] = {at: cell for at, cell in self.known[which].items() if at >= pos}
        assert self.tables[which].first == pos

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 5), pos=st.integers(0, 40))
    def cut(self, which: int, pos: int) -> None:
        which %= len(self.tables)
        self.tables[which].cut(pos)
        self.known[which] = {at: cell for at, cell in self.known[which].items() if at < pos}
        assert self.tables[which].end <= pos or not self.known[which]

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 5))
    def close(self, which: int) -> None:
        which %= len(self.tables)
        self.tables.pop(which).cut(0)
        self.known.pop(which)

    @invariant()
    def every_cell_is_accounted_for(self) -> None:
        self.cells.check()
        self.cells.check_holders([run for table in self.tables for run in table.runs])
        counts = Counter(cell for known in self.known for cell in known.values())
        found = [holders for start, end, holders in pieces(self.cells) for _ in range(start, end)]
        assert found == [counts[cell] for cell in range(1, self.cells.capacity + 1)]
        assert self.cells.free == self.cells.capacity - len(counts)
        assert self.cells.used == len(counts)
        for table, known in zip(self.tables, self.known, strict=True):
            table.check()
            assert spelled(table.runs) == [known[pos] for pos in sorted(known)]
            assert sorted(known) == list(range(table.first, table.end))
            for pos in range(table.first, table.end + 1):
                assert spelled(table.since(pos)) == spelled(table.runs)[pos - table.first :]

    @invariant()
    def the_tables_over_any_held_cells_are_found(self) -> None:
        self.all.check(self.tables)
        held = sorted({cell for known in self.known for cell in known.values()})
        for cell in held:
            for run in (Run(cell, 1), Run(cell, next(n for n in range(1, 99) if cell + n not in held))):
                over = [t for t, known in zip(self.tables, self.known, strict=True)
                        if not set(spelled([run])).isdisjoint(known.values())]  # fmt: skip
                assert set(self.all.over(run)) == set(over)

    @invariant()
    def a_piece_begins_where_a_run_begins_or_ends(self) -> None:
        borders = {border for table in self.tables for run in table.runs for border in (run.cell, run.end)}
        assert {start for start, _, _ in pieces(self.cells)} <= borders | {1}

    def teardown(self) -> None:
        for table in self.tables:
            table.cut(0)
        self.cells.check()
        assert pieces(self.cells) == [(1, self.cells.capacity + 1, 0)]


TestLives = Lives.TestCase
TestLives.settings = settings(derandomize=True, deadline=None, stateful_step_count=40)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 30))
@settings(derandomize=True, deadline=None)
def test_forks_that_come_and_go_leave_the_pieces_as_they_were(uptos: list[int], length: int) -> None:
    cells = Cells(60)
    tables = Tables(cells)
    line, other = Table(tables), Table(tables)
    line.append(cells.take(length))
    other.append(cells.take(3))
    before = pieces(cells)
    twins = [line.share(min(upto, length)) for upto in uptos]
    for twin in twins[::2] + twins[1::2]:
        twin.cut(0)
        cells.check()
    assert pieces(cells) == before


def test_a_line_that_grows_by_one_stays_one_run_and_one_piece_while_there_is_room() -> None:
    cells = Cells(1000)
    lines = [Table(tables) for tables in [Tables(cells)] for _ in range(4)]
    for line in lines:
        line.append(cells.take(1))
    for _ in range(100):
        for line in lines:
            line.append(cells.take(1, after=line.last_cell))
            assert len(line.runs) == 1
    assert sum(holders > 0 for _, _, holders in pieces(cells)) == len(lines)


@pytest.mark.parametrize("room", [2000, 4 * 64 + 4])
def test_a_long_life_behind_a_window_leaves_no_more_pieces_than_runs(room: int) -> None:
    """40 000 tokens are written; what counts is the runs that live. A line goes round in its own cells."""
    cells = Cells(room)
    lines = [Table(tables) for tables in [Tables(cells)] for _ in range(4)]
    for step in range(10_000):
        for line in lines:
            line.append(cells.take(1, line.last_cell, line.first_cell))
            line.forget_below(line.end - 64)
        if step % 100 == 0:
            held = sum(holders > 0 for _, _, holders in pieces(cells))
            assert held == sum(len(line.runs) for line in lines) <= 4 * len(lines)
    cells.check()


def test_the_whole_pool_is_given_out_however_it_is_broken_up() -> None:
    cells = Cells(40)
    single = [cells.take(1)[0] for _ in range(40)]
    assert sorted(run.cell for run in single) == list(range(1, 41))
    cells.drop(single[::2])
    assert cells.free == 20
    assert sum(run.n for run in cells.take(20)) == 20
    assert cells.free == 0
    assert cells.take(0) == []
    cells.check()


def test_cells_are_not_given_back_twice() -> None:
    cells = Cells(8)
    (run,) = cells.take(3)
    cells.drop([run])
    with pytest.raises(AssertionError):
        cells.drop([run])


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 300))
def test_new_runs_are_below_the_near_cell_while_the_wide_piece_there_has_them(sizes: list[int], near: int) -> None:
    cells = Cells(1000)
    cells.near = near
    for n in sizes:
        start = cells._widest().start
        (run,) = cells.take(n)
        if start + n <= near:
            assert run.end <= near
        cells.check()


def test_no_cells_at_all() -> None:
    cells = Cells(0)
    cells.check()
    cells.check_holders([])
    assert (cells.free, cells.used, cells.take(0)) == (0, 0, [])
    with pytest.raises(AssertionError, match="1 cells are needed, 0 are free"):
        cells.take(1)


def test_the_null_cell_is_never_given_out() -> None:
    cells = Cells(5)
    assert 0 not in spelled(cells.take(5))
