"""plans: builds a step's plan from tables and newly allocated cells. Its functions have no side effects."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvcellar.cache.layouts.encoder import Input
from kvcellar.cache.tables import Table
from kvcellar.errors import BadRequest, CapacityTooSmall, shown
from kvcellar.layout import Layout
from kvcellar.plan import Batch, Feed, GroupPlan, Run, Segment
from kvcellar.spans import Span, whole

SCATTERED = 8  # runs of a history in the worst case: enough to prevent reads by slice, few enough to list quickly

Taken = Sequence[Sequence[Run]]  # per feed, the runs allocated for it; empty for a feed that stores nothing


def group_plan(name: str, layout: Layout, batch: Batch, tables: Mapping[int, Table], taken: Taken) -> GroupPlan:
    """The plan of one group for `batch`; `tables` are those of its sequences."""
    if isinstance(layout, Input):
        return _input_plan(name, layout, batch, [(tables[f.seq].end, tuple(tables[f.seq].runs)) for f in batch.feeds])
    segments: list[Segment] = []
    row = 0
    for feed, new in zip(batch.feeds, taken, strict=True):
        table = tables[feed.seq]
        first = max(table.first, layout.lowest(feed.pos.start))
        end = feed.pos.end if feed.stores else min(feed.pos.end, table.end)
        held = table.since(first)
        runs = _joined(held, new) if feed.stores else _first(held, end - first)
        segments.append(Segment(feed.seq, row, feed.pos, first, end, runs, tuple(new), batch.ahead(feed.seq)))
        row += len(feed.pos)
    return GroupPlan(name, layout, tuple(segments))


def _input_plan(name: str, layout: Input, batch: Batch, inputs: Sequence[tuple[int, tuple[Run, ...]]]) -> GroupPlan:
    """The plan of an input group: every row of a sequence sees all of its input. `inputs` has, per feed, the length and
    the cells of the input.

    The rows have positions behind the input (see `Input`). Rows of a sequence without input see nothing.
    """
    segments: list[Segment] = []
    row = 0
    for feed, (n, runs) in zip(batch.feeds, inputs, strict=True):
        segments.append(Segment(feed.seq, row, Span(n, n + len(feed.pos)), 0, n, runs, ()))
        row += len(feed.pos)
    return GroupPlan(name, layout, tuple(segments))


def check_query(name: str, layout: Layout, feed: Feed, table: Table) -> None:
    """Raise `BadRequest` unless every row of `feed`, which stores nothing, sees a cell, and all it may see is held."""
    if isinstance(layout, Input):
        return
    lowest = layout.lowest(feed.pos.start)
    if lowest < table.first:
        raise BadRequest(
            f"a query at {feed.pos.start} of sequence {feed.seq} looks back to {lowest}; its {name} layers hold "
            f"[{table.first},{table.end})"
        )
    if layout.lowest(feed.pos.end - 1) >= table.end:
        raise BadRequest(
            f"a query at {feed.pos.end - 1} of sequence {feed.seq} sees nothing in its {name} layers, which end at "
            f"{table.end}"
        )


def accepted_counts(batch: Batch, accepted: Mapping[int, int]) -> list[int]:
    """Number of rows of each feed to keep: as in `accepted` by sequence, otherwise all. Raises `BadRequest`."""
    if not isinstance(accepted, Mapping):
        raise BadRequest(f"what is accepted is numbers of new tokens by sequence, not {shown(accepted)}")
    if strangers := accepted.keys() - {feed.seq for feed in batch.feeds if feed.stores}:
        raise BadRequest(f"sequences {shown(list(strangers))} store nothing in this step; nothing can be accepted")
    counts = [whole(accepted.get(feed.seq, len(feed.pos)), "a number of new tokens") for feed in batch.feeds]
    for feed, count in zip(batch.feeds, counts, strict=True):
        if not 0 <= count <= len(feed.pos):
            raise BadRequest(f"{count} of {len(feed.pos)} new tokens of sequence {feed.seq} cannot be accepted")
        for span in batch.ahead(feed.seq):
            if span.start < feed.pos.start + count < span.end:
                raise BadRequest(
                    f"{count} new tokens of sequence {feed.seq} end within {span}, which looks ahead: accept all of it "
                    f"or nothing"
                )
    return counts


def worst_case(name: str, layout: Layout, batch: Batch, capacity: int) -> GroupPlan:
    """Like `group_plan`, for sequences that hold everything visible to them, in runs scattered over all cells.

    It uses no tables. Sequences share as few cells as `capacity` allows. Raises `CapacityTooSmall`.
    """
    segments: list[Segment] = []
    row = at = 0
    if isinstance(layout, Input):
        if layout.most > capacity:
            raise CapacityTooSmall(
                f"an input has up to {layout.most} positions; group {name} has {capacity} cells. Raise cache_bytes."
            )
        inputs = [_scattered(layout.most * i % capacity, layout.most, capacity) for i in range(len(batch.feeds))]
        return _input_plan(name, layout, batch, [(layout.most, runs) for runs in inputs])
    for feed in batch.feeds:
        first = layout.lowest(feed.pos.start)
        need = feed.pos.end - first
        if need > capacity:
            raise CapacityTooSmall(
                f"a sequence whose step ends at position {feed.pos.end} needs {need} cells in group {name}, which has "
                f"{capacity}. Raise cache_bytes, or lower context or step_tokens."
            )
        runs = _scattered(at, need, capacity)
        new = _last(runs, len(feed.pos)) if feed.stores else ()
        segments.append(Segment(feed.seq, row, feed.pos, first, feed.pos.end, runs, new, batch.ahead(feed.seq)))
        row += len(feed.pos)
        at = (at + need) % capacity
    return GroupPlan(name, layout, tuple(segments))


def indices(runs: Iterable[Run], device: torch.device) -> Tensor:
    """[n], the cells of `runs` in order, as an int64 tensor."""
    cells = [torch.arange(run.cell, run.end, device=device) for run in runs]
    return torch.cat(cells) if cells else torch.zeros(0, dtype=torch.long, device=device)


def pieces(runs: Iterable[Run], size: int) -> Iterator[list[Run]]:
    """`runs` in order, in pieces of `size` cells; the last may be smaller."""
    piece: list[Run] = []
    room = size
    for run in runs:
        while run.n:
            here = min(run.n, room)
            piece.append(Run(run.cell, here))
            run, room = Run(run.cell + here, run.n - here), room - here
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def _joined(held: tuple[Run, ...], new: Sequence[Run]) -> tuple[Run, ...]:
    if held and new and held[-1].end == new[0].cell:
        return (*held[:-1], Run(held[-1].cell, held[-1].n + new[0].n), *new[1:])
    return (*held, *new)


def _first(runs: Iterable[Run], n: int) -> tuple[Run, ...]:
    """The first `n` cells of `runs`."""
    found: list[Run] = []
    for run in runs:
        if n <= 0:
            break
        found.append(Run(run.cell, min(run.n, n)))
        n -= run.n
    return tuple(found)


def _last(runs: Sequence[Run], n: int) -> tuple[Run, ...]:
    """The last `n` cells of `runs`."""
    found: list[Run] = []
    for run in reversed(runs):
        if n <= 0:
            break
        got = min(run.n, n)
        found.append(Run(run.end - got, got))
        n -= got
    return tuple(reversed(found))


def _scattered(at: int, n: int, capacity: int) -> tuple[Run, ...]:
    """`n` cells of the ring [1, capacity], from offset `at` on, as runs in reverse order."""
    size = -(-n // SCATTERED)
    pieces: list[Run] = []
    for start in range(0, n, size):
        here = 1 + (at + start) % capacity
        length = min(size, n - start)
        until_end = min(length, capacity + 1 - here)
        pieces.append(Run(here, until_end))
        if until_end < length:
            pieces.append(Run(1, length - until_end))
    return tuple(reversed(pieces))
