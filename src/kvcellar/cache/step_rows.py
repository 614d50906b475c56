"""step_rows: the rows of recurrent state that an open step writes. No torch.

Always true: a step holds one row for each feed that stores, and one for each checkpoint inside a feed; sequences and
claims take further references before it ends.
"""

from collections.abc import Callable, Sequence

from kvcellar.cache.rows import NAME, Rows
from kvcellar.errors import BadRequest, CacheFull
from kvcellar.plan import Batch, StateSegment


class StepRows:
    """The rows of the open step; none if no step is open, or there are no recurrent layers."""

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
                    f"rows of sequence {feed.seq} that only ask must follow its end at {end(feed.seq)}, not begin "
                    f"at {feed.pos.start}: recurrent layers know no other place"
                )
        need = sum(feed.stores + len(feed.between) for feed in batch.feeds)
        if need > self._rows.free:
            raise CacheFull(NAME, need, self._rows.free, unit="rows")

    def begin(self, batch: Batch, row_of: Callable[[int], int]) -> tuple[StateSegment, ...]:
        """Take rows for a batch that was admitted. `row_of` returns the state that a sequence has."""
        self.open = True
        if self._rows.capacity is None:
            return ()
        for feed in batch.feeds:
            if feed.stores:
                self._new[feed.seq] = self._rows.take()
            for pos in feed.between:
                self._between[feed.seq, pos] = self._rows.take()
        return _segments(batch, row_of, self.new)

    def null(self, batch: Batch) -> tuple[StateSegment, ...]:
        """As `begin`, of a step that is only tried: every sequence begins, and no row is taken."""
        self.open = True
        return () if self._rows.capacity is None else _segments(batch, lambda seq: 0, lambda seq: 0)

    def new(self, seq: int) -> int:
        """The row that becomes the state of a sequence."""
        return self._new.get(seq, 0)

    def between(self, seq: int, pos: int) -> int:
        """The row for a checkpoint inside a feed."""
        return self._between.get((seq, pos), 0)

    def held(self) -> list[int]:
        return [*self._new.values(), *self._between.values()]

    def check_parts(self, batch: Batch, counts: Sequence[int]) -> None:
        """Raise `BadRequest` if a part of a feed is kept that was not begun as revertible."""
        for feed, kept in zip(batch.feeds, counts, strict=True):
            if 0 < kept < len(feed.pos) and not feed.revertible and self._rows.capacity is not None:
                raise BadRequest(
                    f"{kept} of {len(feed.pos)} new tokens of sequence {feed.seq} cannot be kept: its feed was not "
                    f"begun as revertible"
                )

    def writes(self, batch: Batch, counts: Sequence[int]) -> dict[int, int]:
        """The rows that would be kept, with so many tokens of each feed, and whose they are."""
        feeds = zip(batch.feeds, counts, strict=True)
        return {self._new[feed.seq]: feed.seq for feed, kept in feeds if kept and feed.seq in self._new}

    def end(self) -> None:
        """The step is over: what nothing else has a reference to is free."""
        for row in self.held():
            self._rows.drop_hold(row)
        self._new, self._between, self.open = {}, {}, False


def _segments(batch: Batch, read: Callable[[int], int], write: Callable[[int], int]) -> tuple[StateSegment, ...]:
    segments: list[StateSegment] = []
    row = 0
    for feed in batch.feeds:
        segments.append(
            StateSegment(feed.seq, row, len(feed.pos), read(feed.seq), write(feed.seq) if feed.stores else 0)
        )
        row += len(feed.pos)
    return tuple(segments)
