"""states: what recurrent layers remember, in rows of fixed size. The only file that writes them.

    states = memory.states.read(layer, segments)         # in the forward: copies, as of before the step
    memory.states.write(layer, segments, states, at=...)  # as of after it

Always true:
  * row 0 of every plane is zero, which is what a layer that has read nothing remembers;
  * a row that a sequence holds has, in every plane of every layer, what the step that took it left there; steps write
    only to rows of their own. What the other rows hold is undefined: on a CPU they take no memory before they are used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.cache.rows import Rows
from kvcellar.cache.step_rows import StepRows
from kvcellar.errors import BadRequest, NotSupported, WrongStage
from kvcellar.plan import Batch, StateSegment
from kvcellar.shapes import Recurrent

# What planes [b,*shape] would be, had the segments of these b indices got so many of their tokens each, and no more.
# Who got most comes first.
At = Callable[[Sequence[int], Sequence[int]], Mapping[str, Tensor]]


@dataclass(slots=True)
class _Put:
    """What was put for a layer in the open step, and how to know what it would be after fewer tokens, if one can."""

    layer: int
    segments: Sequence[StateSegment]
    at: At | None


@dataclass(slots=True)
class _Write:
    """Values [n,*shape] for n rows [n] of a plane, ready to be copied there."""

    plane: Tensor
    rows: Tensor
    values: Tensor


class States:
    """The rows of all recurrent layers: `rows` of them and the null row.

    Where there are no such layers nothing is asked of a step, and nothing is kept.
    """

    def __init__(self, recurrent: Recurrent, *, rows: int, device: torch.device) -> None:
        self.device = device
        self.rows = Rows(rows if recurrent.layers else None)
        self.step_rows = StepRows(self.rows)
        self._planes: dict[int, dict[str, Tensor]] = {
            layer: {plane.name: _rows(rows + 1, plane.shape, getattr(torch, plane.kind), device) for plane in planes}
            for layer, planes in recurrent.layers.items()
        }
        self.end()

    def end(self) -> None:
        """No step is open any more: where one was kept, what `settle` has prepared holds from now on."""
        self._puts: list[_Put] = []
        self._written: dict[int, set[int]] = {layer: set() for layer in self._planes}  # the rows of the open step
        self._torn: set[int] = set()  # sequences whose rows are of a part of their tokens, or half so
        self._indices: dict[tuple[int, ...], Tensor] = {}  # the same for all layers: the device gets them once

    @property
    def bytes(self) -> int:
        """Of all rows, the null row included."""
        return sum(t.untyped_storage().nbytes() for planes in self._planes.values() for t in planes.values())

    def read(self, layer: int, segments: Sequence[StateSegment]) -> dict[str, Tensor]:
        """By plane, copies [B,*shape] of what a layer remembers, as of before the open step."""
        self._check_open("read")
        return self._read(layer, segments)

    def _check_open(self, what: str) -> None:
        if not self.step_rows.open:
            raise WrongStage(f"states.{what}() needs an open step: begin() one first")

    def _read(self, layer: int, segments: Sequence[StateSegment]) -> dict[str, Tensor]:
        planes, index = self._of(layer), self._index(tuple(segment.read for segment in segments))
        return {name: plane.index_select(0, index) for name, plane in planes.items()}

    def write(
        self, layer: int, segments: Sequence[StateSegment], planes: Mapping[str, Tensor], at: At | None = None
    ) -> None:
        """Store planes [B,*shape] of a layer, as of after the open step.

        `at(indices, counts)` returns what the segments of these indices would remember after so many of their tokens,
        the most first. Without it none of them can keep a part.
        """
        self._check_open("write")
        rows = [segment.write for segment in segments]
        writes = list(self._prepared(layer, rows, planes))
        written = self._written[layer]
        written.difference_update(rows)  # until all of it is there
        for write in writes:
            write.plane.index_copy_(0, write.rows, write.values)
        written.update(rows)
        self._puts.append(_Put(layer, segments, at))

    def content(self, row: int) -> list[Tensor]:
        """A copy of what a row holds, bit for bit, for `restore`: by layer, plane."""
        return [plane[row].clone() for planes in self._planes.values() for plane in planes.values()]

    def restore(self, row: int, content: Iterable[Tensor]) -> None:
        """Into a row that no step and no sequence reads yet."""
        stored = (plane for planes in self._planes.values() for plane in planes.values())
        for plane, values in zip(stored, content, strict=True):
            plane[row].copy_(values)

    def settle(self, batch: Batch, counts: Sequence[int]) -> None:
        """Let the rows of feeds that keep a part of their tokens be of that part.

        Raises `BadRequest` if it was not said beforehand that a part might be kept, `WrongStage` if a layer put nothing
        for a feed, `NotSupported` if it cannot say what a part would be. The step is still open where anything raises,
        and can be kept otherwise or given up: a row that was written to by then is asked for again, even if all of its
        tokens are kept.
        """
        self.step_rows.check_parts(batch, counts)
        self._check_written(batch, counts)
        partly = {
            feed.seq: count
            for feed, count in zip(batch.feeds, counts, strict=True)
            if feed.stores and count and (count < len(feed.pos) or feed.seq in self._torn)
        }
        for layer, seqs, planes in self._parts(partly) if partly else ():
            self._torn.update(partly)
            self._put_back(layer, [self.step_rows.new(seq) for seq in seqs], planes)
        self._settle_between(batch, counts)

    def _settle_between(self, batch: Batch, counts: Sequence[int]) -> None:
        """The rows of checkpoints inside feeds: at once those that are first in their feeds, then the second ones."""
        feeds = [(feed, feed.pos.start + count) for feed, count in zip(batch.feeds, counts, strict=True)]
        places = {feed.seq: [pos for pos in feed.between if pos < end] for feed, end in feeds}
        starts = {feed.seq: feed.pos.start for feed, _ in feeds}
        for turn in range(max(map(len, places.values()), default=0)):
            at = {seq: found[turn] for seq, found in places.items() if turn < len(found)}
            for layer, seqs, planes in self._parts({seq: pos - starts[seq] for seq, pos in at.items()}):
                self._put_back(layer, [self.step_rows.between(seq, at[seq]) for seq in seqs], planes)

    def _put_back(self, layer: int, rows: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        for write in self._prepared(layer, rows, planes):
            write.plane.index_copy_(0, write.rows, write.values)

    def _parts(self, partly: Mapping[int, int]) -> Iterator[tuple[int, list[int], Mapping[str, Tensor]]]:
        """Of every layer, sequences and what is in their planes [b,*shape] after so many tokens, by sequence. One layer
        is worked out after the other, so that there is never more than one at once."""
        last: dict[tuple[int, int], tuple[_Put, int]] = {}  # by layer and sequence, where it was put last
        for put in self._puts:
            for index, segment in enumerate(put.segments):
                if segment.seq in partly:
                    last[put.layer, segment.seq] = put, index
        together: dict[int, tuple[_Put, list[int]]] = {}  # by put: what can be asked at once
        for (layer, seq), (put, index) in last.items():
            if put.at is None:
                raise NotSupported(
                    f"a part of the new tokens of sequence {seq} cannot be kept, nor be a checkpoint: layer {layer} "
                    f"did not say what it would remember after them"
                )
            together.setdefault(id(put), (put, []))[1].append(index)
        for put, indices in together.values():
            assert put.at is not None
            indices.sort(key=lambda index, put=put: -partly[put.segments[index].seq])
            kept = [put.segments[index] for index in indices]
            yield put.layer, [one.seq for one in kept], put.at(indices, [partly[one.seq] for one in kept])

    def _check_written(self, batch: Batch, counts: Sequence[int]) -> None:
        """Else a row would have what somebody left there long ago."""
        writes = self.step_rows.writes(batch, counts)
        for layer, written in self._written.items():
            if missing := writes.keys() - written:
                seqs = sorted(writes[row] for row in missing)
                raise WrongStage(
                    f"commit() before layer {layer} has put its states of sequences {seqs}: run the whole model, or "
                    f"abandon() the step"
                )

    def _index(self, rows: tuple[int, ...]) -> Tensor:
        """[n], on the device."""
        index = self._indices.get(rows)
        if index is None:
            index = self._indices[rows] = torch.tensor(rows, dtype=torch.long, device=self.device)
        return index

    def _of(self, layer: int) -> dict[str, Tensor]:
        planes = self._planes.get(layer)
        if planes is None:
            raise BadRequest(f"layer {layer} is no recurrent layer: this memory has {sorted(self._planes) or 'none'}")
        return planes

    def _prepared(self, layer: int, rows: Sequence[int], planes: Mapping[str, Tensor]) -> Iterator[_Write]:
        """What it takes to store planes [n,*shape] in n rows. Row 0, where nothing is to be kept, is passed over."""
        stored = self._of(layer)
        if planes.keys() != stored.keys():
            raise BadRequest(f"layer {layer} was given {sorted(planes)}; it remembers {sorted(stored)}")
        kept = tuple(i for i, row in enumerate(rows) if row)
        for name, plane in stored.items():
            values = planes[name]
            if values.shape[1:] != plane.shape[1:] or len(values) != len(rows):
                wanted = [len(rows), *plane.shape[1:]]
                raise BadRequest(f"layer {layer} was given {name} {list(values.shape)}; it remembers {wanted}")
            if kept:
                values = values.detach().to(plane.dtype)
                if len(kept) < len(rows):
                    values = values.index_select(0, self._index(kept))
                yield _Write(plane, self._index(tuple(rows[i] for i in kept)), values)

    def check(self) -> None:
        """Assert what is always true of the planes."""
        for planes in self._planes.values():
            for name, plane in planes.items():
                assert self.rows.capacity is not None and len(plane) == self.rows.capacity + 1
                assert not plane[0].any(), f"somebody wrote to the null row of {name}"


def _rows(n: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n,*shape], of which only row 0 is defined: it is zero."""
    plane = torch.empty(n, *shape, dtype=dtype, device=device)
    plane[0] = 0
    return plane
