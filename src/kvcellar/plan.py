"""plan: a step as integers. What a batch asks for, where each new token goes, and what it may look at.

A plan is made by `Memory.begin` and is the only thing about sequences that kernels ever see. It is immutable: it stays
right for as long as its step is open. Cell 0 is null: nothing is ever stored there that somebody may see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvcellar.contracts import Layout
from kvcellar.errors import BadRequest
from kvcellar.spans import Span


class Run(NamedTuple):
    """`n` cells in a row, the first of them `cell`."""

    cell: int
    n: int

    @property
    def end(self) -> int:
        return self.cell + self.n


class Feed(NamedTuple):
    """New tokens of one sequence: the positions they will have. They are consecutive rows of the step."""

    seq: int
    pos: Span


@dataclass(frozen=True, slots=True)
class Batch:
    """Which sequences get new tokens in a step, in the order of the step's rows."""

    feeds: tuple[Feed, ...]

    def __post_init__(self) -> None:
        if len({feed.seq for feed in self.feeds}) != len(self.feeds):
            raise BadRequest("a sequence may appear only once in a batch, with consecutive positions")
        if any(not len(feed.pos) for feed in self.feeds):
            raise BadRequest("every sequence of a batch needs at least one new token")

    @classmethod
    def of(cls, seqs: Sequence[int], positions: Sequence[int]) -> "Batch":
        """From one sequence and one position per token. Each sequence's tokens must follow one another."""
        if len(seqs) != len(positions):
            raise BadRequest(f"{len(seqs)} sequences for {len(positions)} positions")
        cuts = [i for i in range(1, len(seqs)) if seqs[i] != seqs[i - 1]]
        feeds: list[Feed] = []
        for a, b in pairwise([0, *cuts, len(seqs)]):
            if list(positions[a:b]) != list(range(positions[a], positions[a] + b - a)):
                raise BadRequest(f"the positions of sequence {seqs[a]} are not consecutive: {list(positions[a:b])}")
            feeds.append(Feed(seqs[a], Span(positions[a], positions[a] + b - a)))
        return cls(tuple(feeds))

    @property
    def tokens(self) -> int:
        return sum(len(feed.pos) for feed in self.feeds)


class Segment(NamedTuple):
    """One sequence's part of a step, in one group.

    `runs` are the cells of positions `[first, pos.end)` in order of position: all that the lowest new token may see,
    and the new tokens themselves. Row `row + i` of the step is position `pos.start + i`.
    """

    seq: int
    row: int
    pos: Span
    first: int
    runs: tuple[Run, ...]
    new: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's part of a plan. A new token at `q` sees its sequence's positions `[layout.lowest(q), q]`."""

    name: str
    layout: Layout
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: `tokens` rows, and for every group where they go and what they see."""

    tokens: int
    feeds: tuple[Feed, ...]
    groups: tuple[GroupPlan, ...]

    @property
    def positions(self) -> list[int]:
        """Position of every row, [T]."""
        return [pos for feed in self.feeds for pos in range(feed.pos.start, feed.pos.end)]
