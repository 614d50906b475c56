"""claim: the record of one claim and of its checkpoints. `claims` makes and changes them, and has their invariants."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcellar.errors import BadRequest
from kvcellar.memory.cells.rows import Rows
from kvcellar.memory.cells.tables import Table, close_all
from kvcellar.memory.kv.storage import GroupStore
from kvcellar.memory.spans import ByPosition, Span, around, check_spans, deepest


def within(mark: int | None, span: Span) -> int | None:
    """The first position in `span` of K/V that are derived from `mark` on; None if there is none."""
    return max(mark, span.start) if mark is not None and mark < span.end else None


def check_whole(spans: Sequence[Span], pos: int) -> None:
    """Raise `BadRequest` if `pos` is inside one of the spans that looked ahead."""
    if (span := around(spans, pos)) is not None:
        raise BadRequest(f"{pos} is inside {span}, which looked ahead and is kept whole")


@dataclass(slots=True)
class Checkpoint:
    """What resuming at a position needs beside the cells of unbounded groups. `windows` has a table for each bounded
    group, by index of the group; `row` is 0 in a model without recurrent layers."""

    windows: dict[int, Table]
    row: int

    def close(self, rows: Rows) -> None:
        """Free what only this checkpoint holds."""
        close_all(self.windows.values())
        rows.drop_hold(self.row)


@dataclass(slots=True)
class Claim:
    """One claim. `tables` has a table for each group, by index of the group: those of bounded groups begin at `tail`,
    which is within the span or at its end."""

    span: Span
    tables: dict[int, Table]
    tail: int
    checkpoints: ByPosition[Checkpoint] = field(default_factory=ByPosition[Checkpoint])
    ahead: tuple[Span, ...] = ()
    derived: int | None = None
    digest: str | None = None  # of the input

    @property
    def positions(self) -> list[int]:
        """The positions of the checkpoints, in order."""
        return list(self.checkpoints)

    def whole(self, pos: int) -> int:
        """The last position up to `pos` that is not inside a span that looked ahead, so that the claim can be split."""
        return deepest(self.ahead, pos)

    def close(self, rows: Rows) -> None:
        """Free what only this claim holds."""
        close_all(self.tables.values())
        for checkpoint in self.checkpoints.values():
            checkpoint.close(rows)

    def check(self, stores: Sequence[GroupStore]) -> None:
        """Assert the invariants of one claim."""
        for index, table in self.tables.items():
            table.check()
            if not stores[index].group.of_input:
                first = self.tail if stores[index].group.bounded else self.span.start
                assert (table.first, table.end) == (first, self.span.end)
        assert self.span.start <= self.tail <= self.span.end
        for pos, checkpoint in self.checkpoints.items():
            assert self.span.start < pos <= self.span.end
            assert around(self.ahead, pos) is None, f"a checkpoint at {pos} is inside a span that looked ahead"
            for index, table in checkpoint.windows.items():
                table.check()
                assert (table.first, table.end) == (stores[index].group.layout.lowest(pos), pos)
        check_spans(self.ahead, self.span.end)
        assert not self.ahead or self.ahead[0].start >= self.span.start
        assert self.derived is None or self.span.start <= self.derived < self.span.end
