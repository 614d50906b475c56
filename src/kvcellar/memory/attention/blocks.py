"""blocks: a step of one group as blocks of rows, for kernels on a GPU: tables at fixed addresses, and sizes of grids.

A block is some rows of one sequence. The cells that a segment sees are listed in order of position, once a step for all
layers, so a kernel finds a key's cell by one read however many runs there are.

Always true:
  * every row that sees something is in one block, and rows of a block are in order of position;
  * a launch depends on `Prepared.key` only: steps with equal keys differ only in what tables contain.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.memory.kv.history import StepTables, StoredPlane
from kvcellar.memory.layout import Layout
from kvcellar.memory.plan import GroupPlan, Segment
from kvcellar.memory.shapes import Scoring

SPLIT = 512  # keys with a softmax of their own
PARTIAL_BYTES = 1 << 26  # that the results of divided histories may take in a layer
FEWEST = 1 << 12  # cells that the table of keys has room for: so that few steps need a larger one
FEW, MANY = 4, 16  # rows of a block at most: of a segment that has no more, and of others


class Launch(NamedTuple):
    """Blocks of up to `rows` rows each, a power of two. Blocks behind the last are empty."""

    blocks: Tensor  # [B,3]: first row, number of rows, and what is added to a position to get its place in `cells`
    rows: int
    splits: int  # that the rows of a block see at most, rounded up to a power of two


class Prepared(NamedTuple):
    """A step of one group in integers, int64."""

    launches: tuple[Launch, ...]
    bounds: Tensor  # [T,2]: the positions [low,end) that each row sees; rows behind the last see nothing
    cells: Tensor  # [N]: all that segments see, in order of position, one segment after the other, and others behind

    @property
    def key(self) -> tuple[int, ...]:
        sizes = [(one.blocks.data_ptr(), len(one.blocks), one.rows, one.splits) for one in self.launches]
        return (self.bounds.data_ptr(), self.cells.data_ptr(), *(number for some in sizes for number in some))


class Call(NamedTuple):
    """Attention of one layer: q [T,H,D] into out [T,H,Dv], whose elements lie side by side. Rows of no block stay."""

    q: Tensor
    out: Tensor
    keys: StoredPlane
    values: StoredPlane
    scoring: Scoring
    prepared: Prepared


def prepared(plan: GroupPlan, tables: StepTables) -> Prepared:
    """Segments of few rows are a block each, apart from blocks of others."""
    bounds = [bound for segment in plan.segments for bound in _bounds(plan.layout, segment)]
    short: list[tuple[int, int, int]] = []
    long: list[tuple[int, int, int]] = []
    at = 0
    for segment in plan.segments:
        rows = len(segment.pos)
        if segment.runs:
            blocks, most = (short, FEW) if rows <= FEW else (long, MANY)
            starts = range(segment.row, segment.row + rows, most)
            blocks += [(row, min(most, segment.row + rows - row), at - segment.first) for row in starts]
            at += segment.end - segment.first
    launches = [_launch(name, blocks, bounds, tables) for name, blocks in (("short", short), ("long", long)) if blocks]
    return Prepared(tuple(launches), _table("bounds", bounds, tables), _cells(plan.segments, at, tables))


def _bounds(layout: Layout, segment: Segment) -> list[tuple[int, int]]:
    return [(layout.lowest(pos), segment.last(pos) + 1) for pos in range(segment.pos.start, segment.pos.end)]


def _launch(
    name: str, blocks: Sequence[tuple[int, int, int]], bounds: Sequence[tuple[int, int]], tables: StepTables
) -> Launch:
    splits = max(-(-bounds[row + count - 1][1] // SPLIT) - bounds[row][0] // SPLIT for row, count, _ in blocks)
    most = max(count for _, count, _ in blocks)
    return Launch(_table(f"{name} blocks", blocks, tables), power_of_two(most), power_of_two(splits))


def _table(name: str, rows: Sequence[tuple[int, ...]], tables: StepTables) -> Tensor:
    """[n,width] with n a power of two; rows behind the last are zero."""
    width = len(rows[0])
    missing = [0] * (width * (power_of_two(len(rows)) - len(rows)))
    return tables.fill(name, [*(number for row in rows for number in row), *missing]).view(-1, width)


def _cells(segments: Sequence[Segment], n: int, tables: StepTables) -> Tensor:
    """[N] from the runs, on the device. N is `n` rounded up to a power of two; what is behind `n` is undefined."""
    runs = [run for segment in segments for run in segment.runs]
    starts = list(accumulate((run.n for run in runs), initial=0))[:-1]
    shifts = [run.cell - start for run, start in zip(runs, starts, strict=True)]
    first, shift = tables.fill("runs", [*starts, *shifts]).view(2, -1)
    places = torch.arange(n, device=tables.device)
    run = torch.searchsorted(first, places, right=True) - 1
    cells = tables.empty("cells of keys", (power_of_two(max(n, FEWEST)),), torch.int64)
    cells[:n] = places + shift[run]
    return cells


def power_of_two(n: int) -> int:
    """The smallest that is not less than n."""
    return 1 << (n - 1).bit_length()
