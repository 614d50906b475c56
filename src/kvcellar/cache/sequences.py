"""sequences: all that a memory knows of its sequences, changed in one place, so that nothing of it can be forgotten.

A sequence has a table of cells in every group, and is known to every part: where its recurrent state is, which of its
spans looked ahead, whose input it has, where something was removed.

Always true:
  * all tables of a sequence's tokens end at the same position, and so does its recurrent state; each begins no later
    than its layout needs to go on from there; all tables of its input have all of the input, or none of it;
  * an operation that raises has changed nothing: what can raise comes before all that changes something.
"""

from collections.abc import Callable, Iterable, Sequence

from kvcellar.cache.ahead import Ahead
from kvcellar.cache.derived import Derived
from kvcellar.cache.group import Held
from kvcellar.cache.inputs import Digests
from kvcellar.cache.parts import Part
from kvcellar.cache.rows import NoRows, Rows
from kvcellar.cache.tables import Table, share_all
from kvcellar.errors import UnknownSequence
from kvcellar.plan import Batch, Run
from kvcellar.spans import Span


class Sequences:
    """Every sequence of one memory, whose groups are `held`: those of tokens first, then those of an input."""

    def __init__(self, held: Sequence[Held], rows: Rows | NoRows) -> None:
        self._held, self._rows = held, rows
        self._inputs = [index for index, one in enumerate(held) if one.group.of_input]
        self.tables: dict[int, list[Table]] = {}  # of each sequence one a group
        self.ahead, self.digests, self.derived = Ahead(), Digests(), Derived()
        self._parts: tuple[Part, ...] = (rows, self.ahead, self.digests, self.derived)

    # -- looking ------------------------------------------------------------------------------------------------

    def known(self, seq: int) -> list[Table]:
        """The tables of a sequence. Raises `UnknownSequence`."""
        tables = self.tables.get(seq)
        if tables is None:
            raise UnknownSequence(seq)
        return tables

    def length(self, seq: int) -> int:
        """How many tokens it has; 0 if it is not there. Its state says so where no layer has cells for tokens."""
        tables = self.tables.get(seq)
        return tables[0].end if tables else self._rows.end(seq)

    def input_length(self, seq: int) -> int:
        """How many positions its input has; 0 without, or if it is not there."""
        tables = self.tables.get(seq)
        return tables[self._inputs[0]].end if tables and self._inputs else 0

    def input(self, digest: str) -> list[Table] | None:
        """The tables of an input that a sequence has; None if no sequence has it."""
        source = self.digests.holder(digest)
        return None if source is None else [self.tables[source][index] for index in self._inputs]

    def can_cut(self, seq: int, pos: int) -> int:
        """The largest `kept <= pos` at which all groups and parts could go on. Changes nothing."""
        kept = min(pos, self.length(seq))
        while True:
            agreed = kept
            for part in self._parts:
                agreed = part.deepest(seq, agreed)
            for held, table in zip(self._held, self.tables.get(seq, ()), strict=False):
                agreed = held.group.layout.can_cut(table.first, table.end, agreed)
            if agreed == kept:
                return kept
            kept = agreed

    def can_close_over(self, seq: int, gone: Span) -> bool:
        """Do all parts allow that `gone` is removed, with something behind it? Layouts are not asked."""
        return all(part.can_close_over(seq, gone) for part in self._parts)

    # -- changes ------------------------------------------------------------------------------------------------

    def open(self, seq: int) -> None:
        """A sequence that has read nothing."""
        self._enter(seq, self._empty())

    def enter(
        self, seq: int, tables: list[Table], *, ahead: Iterable[Span], derived: int | None, digest: str | None
    ) -> None:
        """A sequence that is not there yet, with these tables, which are handed over here, and what is known of it."""
        self._enter(seq, tables)
        self.ahead.add(seq, ahead)
        self.derived.mark(seq, derived)
        if digest is not None:
            self.digests.add(seq, digest)

    def give_input(self, seq: int, digest: str | None, make: Callable[[], Iterable[Table]]) -> None:
        """`seq`, which may be new, has the tables that `make` answers, one for each group of an input.

        They hold cells, so `make` comes last of what can raise.
        """
        tables = self.tables.get(seq) or self._empty()
        for index, table in zip(self._inputs, make(), strict=True):
            tables[index] = table
        self._enter(seq, tables)
        if digest is not None:
            self.digests.add(seq, digest)

    def commit(self, batch: Batch, counts: Sequence[int], taken: Sequence[Sequence[Sequence[Run]]]) -> None:
        """So many tokens of each feed are kept. `taken[group][feed]` are the cells they are in, handed over here."""
        for part in self._parts:
            part.commit(batch, counts)
        for index, held in enumerate(self._held):
            for feed, runs, count in zip(batch.feeds, taken[index], counts, strict=True):
                if not feed.stores:
                    continue
                table = self.tables[feed.seq][index]
                kept, rest = held.cells.divide_all(runs, count)
                held.cells.drop(rest)
                table.append(kept)
                table.forget_below(held.group.layout.keep(table.end))

    def fork(self, src: int, dst: int, kept: int) -> None:
        """`dst`, whatever it was, shares the first `kept` tokens of `src`, which `can_cut` answered, and its input."""
        shared = share_all(self.known(src), kept)
        for table in self.tables.pop(dst, ()):
            table.close()
        self.tables[dst] = shared
        for part in self._parts:
            part.fork(src, dst, kept)

    def cut(self, seq: int, kept: int) -> None:
        """The first `kept` tokens stay, which `can_cut` answered."""
        for table in self.known(seq):
            table.cut(kept)
        for part in self._parts:
            part.cut(seq, kept)

    def close_over(self, seq: int, gone: Span, behind: Sequence[Iterable[Run]]) -> None:
        """What lies behind `gone` is now in the cells `behind`, by group, handed over here, and begins at its start."""
        for held, table, runs in zip(self._held, self.known(seq), behind, strict=True):
            table.close_over(gone, runs)
            table.forget_below(held.group.layout.keep(table.end))
        for part in self._parts:
            part.close_over(seq, gone)

    def drop(self, seq: int) -> None:
        """Forget a whole sequence. Never fails for one that is there."""
        for table in self.known(seq):
            table.close()
        del self.tables[seq]
        for part in self._parts:
            part.drop(seq)

    # -- inside -------------------------------------------------------------------------------------------------

    def _empty(self) -> list[Table]:
        return [held.table() for held in self._held]

    def _enter(self, seq: int, tables: list[Table]) -> None:
        self.tables[seq] = tables
        for part in self._parts:
            part.open(seq)

    def check(self) -> None:
        """Assert what is always true of sequences; who holds which cells is not asked."""
        self._rows.check({seq: self.length(seq) for seq in self.tables})
        self.ahead.check(self.length)
        self.derived.check(self.length)
        self.digests.check({seq: [tables[index] for index in self._inputs] for seq, tables in self.tables.items()})
        for seq, tables in self.tables.items():
            assert len(tables) == len(self._held)
            for held, table in zip(self._held, tables, strict=True):
                table.check()
                end = tables[self._inputs[0] if held.group.of_input else 0].end
                assert table.end == end, f"sequence {seq} ends differently in {held.group.name}"
                lowest = held.group.layout.lowest(table.end)
                assert table.first <= lowest, f"sequence {seq} lacks [{lowest},{table.first}) in {held.group.name}"
