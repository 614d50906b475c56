"""parts: which rows of a step attend together, and to what. A plan in, slices and indices out.

A prompt is a part of its own, and so is a row that decodes over a long history. Rows over short histories are bundled,
padded to one length, because there the calls cost more than what they do. Rows whose sequences share their first cells
(samples of one prompt, conversations with one beginning) are bundled, too, and read what they share once.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.contracts import Layout
from kvcellar.plan import GroupPlan, Run, Segment

BLOCK = 128  # rows scored at once: bounds the scores, and skips the keys that no row of a block sees
LONG_RUN = 32  # cells of a run, on average, from which on runs are copied one by one instead of cell by cell
SHORT = 512  # most cells of a row in a bundle, beside those that are shared: with more, copying costs more than calls
SHARED = 64  # fewest cells that are worth being read once for several rows
BUNDLE, SCORED = 4096, 65536  # most cells of a bundle: copied, and scored (what is shared counts for each row)
SPREAD = 1.5  # the longest row of a bundle has at most so many times the cells of the shortest (and 32 more)

Cells = slice | tuple[slice, ...] | Tensor  # one run, a few long ones, or many short ones as an index [n]


class Veil(NamedTuple):
    """A stretch of keys that some rows must not see."""

    keys: slice
    hidden: Tensor  # True where the row must not see the key; [L,m] for a block, [B,1,m] for a bundle


class Block(NamedTuple):
    """Rows [start,end) of a part, and the stretch of its keys that they see, but for what veils hide."""

    start: int
    end: int
    keys: slice
    veils: tuple[Veil, ...]


class Part(NamedTuple):
    """One sequence: rows [start,end) of the step, and the cells of its keys in order of position."""

    start: int
    end: int
    cells: Cells
    blocks: tuple[Block, ...]  # none if there is nothing to see


class Bundle(NamedTuple):
    """One row of each of B sequences. All see `shared`, and each its own n cells, of which the last may be padding."""

    rows: Tensor  # [B]
    shared: slice | None
    cells: Tensor  # [B*n]; padding is cell 0
    veil: Veil  # hides the padding; its keys count from the first shared one


def parts(plan: GroupPlan, device: torch.device, *, bundles: bool) -> list[Part | Bundle]:
    """All rows of `plan`, each once. Without `bundles`, every sequence is a part of its own."""
    found: list[Part | Bundle] = []
    alone = list(plan.segments)
    if bundles:
        single = [segment for segment in plan.segments if len(segment.pos) == 1 and segment.runs]
        for shared, members in _companies(single):
            found.append(_bundle(shared, members, device))
            together = {segment.seq for segment in members}
            alone = [segment for segment in alone if segment.seq not in together]
    return found + [_part(plan.layout, segment, device) for segment in alone]


# -- bundles ----------------------------------------------------------------------------------------------------------


def _companies(single: Sequence[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """(how many of their first cells are shared, segments) of every bundle; of at least two."""
    apart: list[Segment] = []
    for _, group in groupby(sorted(single, key=_first_cell), key=_first_cell):
        members = list(group)
        common = min(segment.runs[0].n for segment in members)
        if len(members) > 1 and common >= SHARED:
            yield from _bunches(members, common)
        else:
            apart += members
    yield from _bunches(apart, 0)


def _bunches(segments: Sequence[Segment], shared: int) -> Iterator[tuple[int, list[Segment]]]:
    """Segments of about the same length, few enough for one bundle."""
    own = {segment.seq: segment.end - segment.first - shared for segment in segments}
    bunch: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: -own[segment.seq]):
        if own[segment.seq] > SHORT:
            continue
        if bunch:
            longest, count = own[bunch[0].seq], len(bunch) + 1
            uneven = longest > SPREAD * own[segment.seq] + 32
            if uneven or count * longest > BUNDLE or count * (shared + longest) > SCORED:
                if count > 2:
                    yield shared, bunch
                bunch = []
        bunch.append(segment)
    if len(bunch) > 1:
        yield shared, bunch


def _first_cell(segment: Segment) -> int:
    return segment.runs[0].cell


def _bundle(shared: int, segments: Sequence[Segment], device: torch.device) -> Bundle:
    """`shared` is how many of their first cells are the same."""
    lengths = [segment.end - segment.first - shared for segment in segments]
    own = [_behind(segment.runs, shared) for segment in segments]
    columns = torch.arange(max(lengths))
    cells = torch.tensor([runs[0].cell if runs else 0 for runs in own])[:, None] + columns  # [B,n]
    for row, runs in enumerate(own):
        at = runs[0].n if runs else 0
        for run in runs[1:]:
            cells[row, at : at + run.n] = torch.arange(run.cell, run.end)
            at += run.n
    hidden = columns >= torch.tensor(lengths)[:, None]
    first = segments[0].runs[0].cell
    return Bundle(
        torch.tensor([segment.row for segment in segments], device=device),
        slice(first, first + shared) if shared else None,
        cells.masked_fill_(hidden, 0).view(-1).to(device),
        Veil(slice(shared, shared + len(columns)), hidden[:, None].to(device)),
    )


def _behind(runs: Sequence[Run], n: int) -> list[Run]:
    """`runs` without their first `n` cells, all of which are in the first."""
    first = runs[0]
    return [*([Run(first.cell + n, first.n - n)] if first.n > n else []), *runs[1:]]


# -- parts ------------------------------------------------------------------------------------------------------------


def _part(layout: Layout, segment: Segment, device: torch.device) -> Part:
    start, end = segment.pos.start, segment.pos.end
    triangles: dict[int, Tensor] = {}
    blocks: list[Block] = []
    for a in range(start, end, BLOCK) if segment.runs else ():
        b = min(a + BLOCK, end)
        low = [layout.lowest(pos) for pos in range(a, b)]
        last = [segment.last(pos) for pos in range(a, b)]
        veils: list[Veil] = []
        if segment.ahead or last[-1] < b - 1:
            if last[-1] > last[0]:
                keys = torch.arange(last[0] + 1, last[-1] + 1, device=device)
                hidden = keys > torch.tensor(last, device=device)[:, None]
                veils.append(Veil(slice(last[0] + 1 - low[0], last[-1] + 1 - low[0]), hidden))
        elif b - a > 1:
            ahead = triangles.get(b - a)
            if ahead is None:
                ahead = triangles[b - a] = torch.ones(b - a, b - a, dtype=torch.bool, device=device).triu(1)
            veils.append(Veil(slice(a - low[0], b - low[0]), ahead))
        if low[-1] > low[0]:
            keys = torch.arange(low[0], low[-1], device=device)
            veils.append(Veil(slice(0, low[-1] - low[0]), keys < torch.tensor(low, device=device)[:, None]))
        seen = slice(low[0] - segment.first, last[-1] + 1 - segment.first)
        blocks.append(Block(a - start, b - start, seen, tuple(veils)))
    return Part(segment.row, segment.row + end - start, _cells(segment, device), tuple(blocks))


def _cells(segment: Segment, device: torch.device) -> Cells:
    """All that the segment sees."""
    runs = tuple(slice(run.cell, run.end) for run in segment.runs)
    if len(runs) == 1:
        return runs[0]
    if segment.end - segment.first >= LONG_RUN * len(runs):  # for no runs, too: nothing is read then
        return runs
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])
