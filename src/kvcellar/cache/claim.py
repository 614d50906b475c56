"""claim: one hold on cells and state rows that is no sequence. `claims` makes and changes them, and says what is always
true of them. No torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvcellar.cache.rows import Rows
from kvcellar.cache.tables import Table
from kvcellar.spans import Span


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` if the block raises."""
    try:
        yield
    except BaseException:
        undo()
        raise


@dataclass(slots=True)
class Checkpoint:
    """What resuming at a position needs beside the cells of the span. `windows` has a table for each group with a
    window, by index of the group; `row` is 0 in a model without recurrent layers."""

    windows: dict[int, Table]
    row: int

    def close(self, rows: Rows) -> None:
        """Free what only this checkpoint holds."""
        for table in self.windows.values():
            table.close()
        rows.drop_hold(self.row)


@dataclass(slots=True)
class Claim:
    """One claim. `tables` has a table for each group without a window, by index of the group."""

    span: Span
    tables: dict[int, Table]
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)  # by position
    ahead: tuple[Span, ...] = ()
    derived: int | None = None
    digest: str | None = None  # of the input

    def close(self, rows: Rows) -> None:
        """Free what only this claim holds."""
        for table in self.tables.values():
            table.close()
        for checkpoint in self.checkpoints.values():
            checkpoint.close(rows)
