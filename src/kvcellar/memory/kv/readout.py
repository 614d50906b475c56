"""readout: export the content of a claim as bytes, and import it bit for bit, also into another memory.

    with memory.claims.reading(claim) as reading:
        record, chunks = reading.record, list(reading)
    other.claims.write_back(record, chunks)            # a new claim, in newly allocated cells and rows

A record describes the chunks in integers. Chunks have a fixed order: by stretch, piece, layer, plane (codes, then
scales), then the state rows by checkpoint, layer, plane. A chunk contains the elements as stored, ordered by cell and
head, in native byte order, independent of the arrangement of the planes.

Always true:
  * a chunk is of one plane of one layer, and of at most `PIECE` cells;
  * a cell that several windows of a claim share is exported once, and is shared again after the import;
  * a chunk is written before the next one is taken;
  * an open reading holds its cells and rows: no step overwrites them, but compaction may move the cells.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvcellar.errors import BadRequest, CacheFull
from kvcellar.memory.cells.layouts import Input
from kvcellar.memory.cells.rows import NAME
from kvcellar.memory.cells.tables import Table, undone
from kvcellar.memory.kv.claim import Checkpoint, Claim, check_whole, within
from kvcellar.memory.kv.group import PIECE, Group
from kvcellar.memory.kv.history import StoredPlane, indices
from kvcellar.memory.kv.record import Mark, Record, Stretch
from kvcellar.memory.kv.states import States
from kvcellar.memory.kv.storage import GroupStore
from kvcellar.memory.layout import Layout
from kvcellar.memory.shapes import Recurrent
from kvcellar.memory.spans import Span


def shape_of(groups: Sequence[Group], dtype: torch.dtype, recurrent: Recurrent) -> str:
    """Digest of everything that determines the stored bytes of a memory of these groups. Memories with equal digests
    can import each other's claims."""
    own = str(dtype).removeprefix("torch.")
    described = {
        "groups": [
            [
                group.name,
                repr(group.layout),
                group.layers,
                [[plane.name, plane.heads, plane.size, str(plane.storage or own)] for plane in group.planes],
            ]
            for group in groups
        ],
        "recurrent": [
            [layer, [[plane.name, plane.shape, plane.kind] for plane in planes]]
            for layer, planes in sorted(recurrent.layers.items())
        ],
    }
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


class Part(NamedTuple):
    """A stretch with its cells. They are held by `table`, which the owner of the part closes."""

    store: GroupStore
    table: Table

    @property
    def span(self) -> Span:
        return Span(self.table.first, self.table.end)

    def planes(self, device: torch.device) -> Iterator[tuple[StoredPlane, Tensor | slice, int]]:
        """By piece, layer and plane: the plane, the current cells of the piece, and how many they are."""
        for start in range(self.table.first, self.table.end, PIECE):
            piece = Span(start, min(start + PIECE, self.table.end))
            for layer in self.store.group.layers:
                for plane in self.store.group.planes:
                    runs = self.table.within(piece)
                    cells = slice(runs[0].cell, runs[0].end) if len(runs) == 1 else indices(runs, device)
                    yield self.store.pool.planes(layer)[plane.name], cells, len(piece)


def distinct(store: GroupStore, windows: Mapping[int, Table], parts: list[Part]) -> dict[int, list[tuple[int, Span]]]:
    """Add the cells of `windows` (by checkpoint position) to `parts`, each cell once. Returns per window its spans,
    each with the index of its part.

    Windows are processed in order of position, so a window that shares cells with an earlier one extends its part.
    """
    spans: dict[int, list[tuple[int, Span]]] = {}
    last: dict[int, int] = {}  # by (cell - position), the index of the newest part
    for pos, window in sorted(windows.items()):
        spans[pos] = []
        start = window.first
        for run in window.runs:
            span, diagonal = Span(start, start + run.n), run.cell - start
            number = last.get(diagonal)
            if number is None or parts[number].table.end < span.start:
                number = last[diagonal] = len(parts)
                parts.append(Part(store, window.share(span.end, span.start)))
            elif parts[number].table.end < span.end:
                more = window.share(span.end, parts[number].table.end)
                parts[number].table.append(more.hand_over())
            spans[pos].append((number, span))
            start += run.n
    return spans


class Reading(AbstractContextManager["Reading"]):
    """Iterates over the chunks of one claim, as flat uint8 tensors on the CPU. Close it, or use it in `with`."""

    record: Record

    def __init__(self, states: States) -> None:
        self.parts: list[Part] = []
        self.rows: list[int] = []
        self._states = states

    @classmethod
    def of(
        cls,
        claim: Claim,
        span: Span,
        checkpoints: Mapping[int, Checkpoint],
        stores: Sequence[GroupStore],
        states: States,
        shape: str,
    ) -> Self:
        """A reading of `span` of a claim, and of `checkpoints` that it has there, in a memory of this shape."""
        check_whole(claim.ahead, span.start)
        check_whole(claim.ahead, span.end)
        reading = cls(states)
        windows: dict[int, list[tuple[str, tuple[tuple[int, Span], ...]]]] = {pos: [] for pos in checkpoints}
        with undone(reading.close):
            for index, table in sorted(claim.tables.items()):
                if stores[index].group.bounded:
                    continue  # checkpoints have what is kept in tiers
                reading.parts.append(Part(stores[index], table.share(span.end, span.start)))
            for index in (index for index, store in enumerate(stores) if store.group.bounded):
                tables = {pos: checkpoint.windows[index] for pos, checkpoint in checkpoints.items()}
                for pos, spans in distinct(stores[index], tables, reading.parts).items():
                    windows[pos].append((stores[index].group.name, tuple(spans)))
            for row in (checkpoints[pos].row for pos in sorted(windows)):
                if row:  # 0 in a model without recurrent layers
                    states.rows.hold(row)
                    reading.rows.append(row)
        stretches = tuple(Stretch(part.store.group.name, part.span) for part in reading.parts)
        marks = tuple(Mark(pos, tuple(windows[pos])) for pos in sorted(windows))
        ahead = tuple(one for one in claim.ahead if span.start <= one.start < span.end)
        reading.record = Record(shape, span, stretches, marks, ahead, within(claim.derived, span), claim.digest)
        return reading

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Tensor]:
        for part in self.parts:
            for plane, cells, _ in part.planes(self._states.device):
                yield from map(as_bytes, plane.content(cells))
        for row in self.rows:
            yield from map(as_bytes, self._states.content(row))

    def sizes(self) -> tuple[int, ...]:
        """Bytes of the chunks, in order."""
        planes = (plane.like(n) for part in self.parts for plane, _, n in part.planes(self._states.device))
        states = self._states.like(0)
        return tuple(one.nbytes for some in (*planes, *[states] * len(self.rows)) for one in some)

    def close(self) -> None:
        """May be called again."""
        for part in self.parts:
            part.table.close()
        for row in self.rows:
            self._states.rows.drop_hold(row)
        self.parts, self.rows = [], []


def as_bytes(content: Tensor) -> Tensor:
    """Flat, as uint8, on the CPU."""
    return content.detach().cpu().contiguous().view(-1).view(torch.uint8)


def from_bytes(chunk: Tensor, like: Tensor) -> Tensor:
    """A chunk as a tensor with the shape, type and device of `like`. Raises `BadRequest` if its size differs."""
    if chunk.dtype is not torch.uint8 or chunk.numel() != like.nbytes:
        raise BadRequest(f"the next chunk has {like.nbytes} bytes, not {chunk.numel()} elements of {chunk.dtype}")
    if chunk.data_ptr() % like.itemsize or chunk.storage_offset() % like.itemsize:
        chunk = chunk.clone()  # which is aligned
    return chunk.view(-1).view(like.dtype).view(like.shape).to(like.device)


def check_record(record: Record, shape: str, stores: Sequence[GroupStore]) -> None:
    """Raise `BadRequest` unless a record has this shape and is consistent. It may come from an untrusted file, so this
    runs before anything is allocated."""
    if record.shape != shape:
        raise BadRequest(f"the record is of a memory of another shape ({record.shape[:12]}, not {shape[:12]})")
    of_group = {store.group.name: store.group for store in stores}
    bounded = [store.group for store in stores if store.group.bounded]
    whole = [one for one in record.stretches if one.group in of_group and not of_group[one.group].bounded]
    wanted = [store.group.name for store in stores if not store.group.bounded]
    positions = [mark.pos for mark in record.checkpoints]
    sound = (
        len(record.span) > 0
        and [one.group for one in whole] == wanted
        and all(one.span == record.span for one in whole if not of_group[one.group].of_input)
        and all(_is_input(one.span, of_group[one.group].layout) for one in whole if of_group[one.group].of_input)
        and all(one.group in of_group for one in record.stretches)
        and positions == sorted(set(positions))
        and all(record.span.start < pos <= record.span.end for pos in positions)
        and all(record.span.start <= one.start < one.end <= record.span.end for one in record.ahead)
        and all(one.end <= two.start for one, two in pairwise(record.ahead))
        and not any(one.start < pos < one.end for one in record.ahead for pos in positions)
        and (record.derived is None or record.span.start <= record.derived < record.span.end)
        and all(_is_window(record, mark, bounded) for mark in record.checkpoints)
    )
    if not sound:
        raise BadRequest("the record is inconsistent")


def _is_input(span: Span, layout: Layout) -> bool:
    return isinstance(layout, Input) and span.start == 0 and len(span) <= layout.most


def _is_window(record: Record, mark: Mark, bounded: Sequence[Group]) -> bool:
    """Whether a checkpoint has exactly the window of each bounded group, in stretches of that group."""
    if [name for name, _ in mark.windows] != [group.name for group in bounded]:
        return False
    for group, (_, pieces) in zip(bounded, mark.windows, strict=True):
        at = group.layout.lowest(mark.pos)
        for number, span in pieces:
            known = record.stretches[number] if 0 <= number < len(record.stretches) else None
            if known is None or known.group != group.name or span.start != at or not len(span):
                return False
            if span.start < known.span.start or span.end > known.span.end:
                return False
            at = span.end
        if at != mark.pos:
            return False
    return True


def written(
    record: Record, chunks: Iterable[Tensor], stores: Sequence[GroupStore], states: States, last: Mapping[int, int]
) -> Claim:
    """Import `chunks` into new cells and rows, as a claim. The caller has called `check_record`. `last`: by index of a
    group, the cell that new ones follow if possible.

    Raises `CacheFull` before anything is written, and `BadRequest` for chunks that do not match the record.
    """
    _check_free(record, stores, states)
    indices_of = {store.group.name: index for index, store in enumerate(stores)}
    claim = Claim(record.span, {}, record.span.end, ahead=record.ahead, derived=record.derived, digest=record.digest)
    with Reading(states) as new, undone(lambda: claim.close(states.rows)):
        for stretch in record.stretches:
            store = stores[indices_of[stretch.group]]
            new.parts.append(Part(store, store.tables.new(stretch.span.start)))
            after = last.get(indices_of[stretch.group])
            new.parts[-1].table.append(store.cells.take(len(stretch.span), after))
        for _ in record.checkpoints:
            if row := states.rows.take():
                new.rows.append(row)
        _fill(new, iter(chunks), states)
        for index in (index for index, store in enumerate(stores) if store.group.bounded):
            claim.tables[index] = stores[index].tables.new(claim.tail)
        for part, stretch in zip(new.parts, record.stretches, strict=True):
            if not part.store.group.bounded:
                claim.tables[indices_of[stretch.group]] = part.table.share(part.table.end, part.table.first)
        for mark, row in zip(record.checkpoints, new.rows or [0] * len(record.checkpoints), strict=True):
            checkpoint = claim.checkpoints[mark.pos] = Checkpoint({}, row)
            states.rows.hold(row)
            for name, pieces in mark.windows:
                store = stores[indices_of[name]]
                window = checkpoint.windows[indices_of[name]] = store.tables.new(store.group.layout.lowest(mark.pos))
                for number, span in pieces:
                    window.append(new.parts[number].table.share(span.end, span.start).hand_over())
    return claim


def _check_free(record: Record, stores: Sequence[GroupStore], states: States) -> None:
    need = dict.fromkeys((store.group.name for store in stores), 0)
    for stretch in record.stretches:
        need[stretch.group] += len(stretch.span)
    for store in stores:
        if need[store.group.name] > store.cells.spare:
            raise CacheFull(store.group.name, need[store.group.name], store.cells.spare)
    rows = states.rows.spare
    if rows is not None and len(record.checkpoints) > rows:
        raise CacheFull(NAME, len(record.checkpoints), rows, unit="rows")


def _fill(reading: Reading, chunks: Iterator[Tensor], states: States) -> None:
    def following() -> Tensor:
        chunk = next(chunks, None)
        if chunk is None:
            raise BadRequest("there are fewer chunks than in the record")
        return chunk

    for part in reading.parts:
        for plane, cells, n in part.planes(states.device):
            plane.restore(cells, (from_bytes(following(), like) for like in plane.like(n)))
    for row in reading.rows:
        states.restore(row, (from_bytes(following(), like) for like in states.like(row)))
    if next(chunks, None) is not None:
        raise BadRequest("there are more chunks than in the record")
