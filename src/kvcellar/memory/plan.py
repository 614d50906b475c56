"""plan: a step as integers: the new tokens, the cells they are written to, and the cells they may see.

`Memory.begin` makes the plan. Kernels read nothing else about sequences. It is immutable, and valid while its step is
open. Cell 0 is null: it is never visible.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvcellar.errors import BadRequest, shown
from kvcellar.memory.layout import Layout
from kvcellar.memory.spans import Span, whole


class Run(NamedTuple):
    """`n` consecutive cells, from `cell` on."""

    cell: int
    n: int

    @property
    def end(self) -> int:
        return self.cell + self.n


class Feed(NamedTuple):
    """New tokens of one sequence, by their positions. They are consecutive rows of the step.

    If `stores` is False, the rows are queries only: they read the stored cells of the sequence, get no cells, and leave
    the sequence unchanged. Any positions are allowed at which a stored cell is visible.

    For recurrent layers: `keep_state` keeps the state at `pos.end` as a checkpoint of the sequence, if all tokens are
    kept; the commit may keep a part of the tokens only if the feed is `revertible`.

    `checkpoints` are positions in (pos.start, pos.end], in order: the commit makes a claim of the kept tokens, with a
    checkpoint at each of these positions that is not behind the kept tokens. With `claimed` it makes one without, too.

    `adapter` is the number of the adapter that the tokens are computed with; 0: none.
    """

    seq: int
    pos: Span
    stores: bool = True
    keep_state: bool = False
    revertible: bool = False
    checkpoints: tuple[int, ...] = ()
    adapter: int = 0
    claimed: bool = False

    @property
    def claims(self) -> bool:
        """Whether the commit makes a claim of the kept tokens, if there are any."""
        return self.claimed or bool(self.checkpoints)

    @property
    def between(self) -> tuple[int, ...]:
        """The checkpoints before `pos.end`, which need recurrent state after only a part of the tokens."""
        return tuple(pos for pos in self.checkpoints if pos < self.pos.end)

    @property
    def in_parts(self) -> bool:
        """Whether recurrent layers must be able to compute their state after only a part of the tokens."""
        return self.revertible or bool(self.between)


Ahead = tuple[int, Span]  # a sequence, and a span of it in which every query sees the whole span


@dataclass(frozen=True, slots=True)
class Batch:
    """The feeds of a step, in the order of its rows.

    The tokens of a `look_ahead` span also see the later tokens of that span (an image, a bidirectional prefix). Only
    causality is lifted: windows and chunks still limit the lowest visible position. Such a span is processed in one
    step, and is never split afterwards.
    """

    feeds: tuple[Feed, ...]
    look_ahead: tuple[Ahead, ...] = ()

    def __post_init__(self) -> None:
        if type(self.feeds) is not tuple or not self.feeds:
            raise BadRequest(f"a batch is a tuple of one Feed or more, not {shown(self.feeds)}")
        for feed in self.feeds:
            if type(feed) is not Feed or type(feed.pos) is not Span:
                raise BadRequest(f"a batch is made of Feed(seq, Span(start, end)), not of {shown(feed)}")
            if feed.pos.start == feed.pos.end:
                raise BadRequest("every sequence of a batch needs at least one new token")
        if any(type(feed.seq) is not int for feed in self.feeds):
            plain = tuple(feed._replace(seq=whole(feed.seq, "a sequence")) for feed in self.feeds)
            object.__setattr__(self, "feeds", plain)
        if len({feed.seq for feed in self.feeds}) != len(self.feeds):
            raise BadRequest("a sequence may appear only once in a batch, with consecutive positions")
        if self.look_ahead:
            self._check_look_ahead()
        for feed in self.feeds:
            if feed.claims:
                self._check_checkpoints(feed)

    def _check_checkpoints(self, feed: Feed) -> None:
        places = [whole(pos, "the position of a checkpoint") for pos in feed.checkpoints]
        within = all(feed.pos.start < pos <= feed.pos.end for pos in places)
        if not feed.stores or not within or places != sorted(set(places)):
            raise BadRequest(
                f"a feed of {feed.pos} that stores its tokens has checkpoints behind {feed.pos.start} up to its end, "
                f"in order and each once, not {shown(feed.checkpoints)}"
            )
        for span in self.ahead(feed.seq):
            for pos in places:
                if span.start < pos < span.end:
                    raise BadRequest(f"{pos} is inside {span}, which looks ahead: there can be no checkpoint")

    def _check_look_ahead(self) -> None:
        new = {feed.seq: feed.pos for feed in self.feeds if feed.stores}
        before: dict[int, Span] = {}
        if any(type(span) is not Span for _, span in self.look_ahead):
            raise BadRequest(f"what looks ahead is named by a sequence and a Span, not by {shown(self.look_ahead)}")
        for seq, span in sorted(self.look_ahead, key=lambda ahead: (ahead[0], ahead[1].start)):
            pos = new.get(seq)
            if not len(span) or pos is None or span.start < pos.start or span.end > pos.end:
                fed = f"gives it {pos}" if pos else "gives it no new tokens"
                raise BadRequest(f"{span} of sequence {seq} must be whole to look ahead; the step {fed}")
            if seq in before and before[seq].end > span.start:
                raise BadRequest(f"{before[seq]} and {span} of sequence {seq} overlap; they cannot both look ahead")
            before[seq] = span

    @property
    def tokens(self) -> int:
        """Number of rows of the step."""
        return sum(len(feed.pos) for feed in self.feeds)

    @property
    def stored(self) -> int:
        """Number of rows that get a cell."""
        return sum(len(feed.pos) for feed in self.feeds if feed.stores)

    def ahead(self, seq: int) -> tuple[Span, ...]:
        """The look-ahead spans of `seq`, in order."""
        return tuple(sorted(span for of, span in self.look_ahead if of == seq)) if self.look_ahead else ()


class Segment(NamedTuple):
    """One sequence's part of a step, in one group.

    `runs` are the cells of positions `[first, end)` in order of position: all cells that the rows may see, including
    those of the new tokens. Row `row + i` of the step has position `pos.start + i`. `new` are the cells of the new
    tokens, empty if the feed stores nothing. In a group with the layout `Input`, `[0,end)` is the sequence's input, and
    the rows have positions behind it.
    """

    seq: int
    row: int
    pos: Span
    first: int
    end: int
    runs: tuple[Run, ...]
    new: tuple[Run, ...]
    ahead: tuple[Span, ...] = ()  # in order; a row in one of these spans sees the whole span

    def last(self, pos: int) -> int:
        """The highest position that the row at `pos` sees; non-decreasing in `pos`."""
        for span in self.ahead:
            if span.start <= pos < span.end:
                return span.end - 1
        return min(pos, self.end - 1)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's part of a plan. A row at `q` sees its sequence's `[layout.lowest(q), segment.last(q)]`."""

    name: str
    layout: Layout
    segments: tuple[Segment, ...]


class StateSegment(NamedTuple):
    """One sequence's part of a step in the recurrent layers.

    Rows `[row, row + length)` of the step start from state row `read`, and the state after them is written to state row
    `write`. State row 0 is null: `read` 0 is the initial state, with `write` 0 the state is not kept.
    """

    seq: int
    row: int
    length: int
    read: int
    write: int
    between: tuple[tuple[int, int], ...] = ()  # (tokens, state row): the state after the first so many goes there, too


@dataclass(frozen=True, slots=True)
class Plan:
    """A step of `tokens` rows, with a plan per group. `stored` of the rows get a cell.

    `states` has a segment for each feed, in a model with recurrent layers.
    """

    tokens: int
    feeds: tuple[Feed, ...]
    groups: tuple[GroupPlan, ...]
    stored: int
    look_ahead: tuple[Ahead, ...] = ()
    states: tuple[StateSegment, ...] = ()

    @property
    def positions(self) -> list[int]:
        """Position of every row, [T]."""
        return [pos for feed in self.feeds for pos in range(feed.pos.start, feed.pos.end)]

    @property
    def storing(self) -> list[int]:
        """The rows that get a cell, in order; the rows of `put`'s tensors."""
        stores = [feed.stores for feed in self.feeds for _ in range(len(feed.pos))]
        return [row for row, kept in enumerate(stores) if kept]
