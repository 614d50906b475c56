"""states: storage of recurrent state, in rows of fixed size. Only this file writes state rows.

    states = memory.states.read(layer, segments)         # in the forward: copies of the state before the step
    memory.states.write(layer, segments, states, at=...)  # the state after the step

Always true:
  * row 0 of every plane is zero, the initial state of every layer;
  * a row that a sequence holds contains, in every plane of every layer, the state written by the step that allocated
    it; a step writes only to rows that it allocated. Other rows are undefined: on a CPU they use no memory until then.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.errors import BadRequest, NotSupported, WrongStage
from kvcellar.kernels.uploads import uploaded
from kvcellar.memory.cells.rows import Rows, StepRows
from kvcellar.memory.plan import Batch, StateSegment
from kvcellar.memory.shapes import Recurrent

# (indices [b], counts [b]) -> planes [b,*shape]: state after the first `counts[i]` tokens of segment `indices[i]`;
# sorted by count in descending order.
At = Callable[[Sequence[int], Sequence[int]], Mapping[str, Tensor]]


class _Put(NamedTuple):
    """One `write` of a layer in the open step. `at` computes the state after fewer tokens; None: not supported."""

    layer: int
    segments: Sequence[StateSegment]
    at: At | None


class States:
    """The state rows of all recurrent layers: `rows` rows and the null row.

    In a model without recurrent layers it stores nothing, and steps allocate no rows.
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
        """Reset the data of the open step, after a commit or when it was abandoned."""
        self._puts: list[_Put] = []
        self._written: dict[int, set[int]] = {layer: set() for layer in self._planes}  # the rows of the open step
        self._torn: set[int] = set()  # sequences with rows (partly) overwritten by `settle`
        self._indices: dict[tuple[int, ...], Tensor] = {}  # on the device; shared by all layers

    @property
    def bytes(self) -> int:
        """Bytes of all rows, the null row included."""
        return sum(t.untyped_storage().nbytes() for planes in self._planes.values() for t in planes.values())

    def read(
        self, layer: int, segments: Sequence[StateSegment], names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """By plane, copies [B,*shape] of a layer's state before the open step. `names`: of these planes only."""
        self._check_open("read")
        planes, index = self._of(layer), self._index(tuple(segment.read for segment in segments))
        return {name: plane.index_select(0, index) for name, plane in planes.items() if names is None or name in names}

    def _check_open(self, what: str) -> None:
        if not self.step_rows.open:
            raise WrongStage(f"states.{what}() needs an open step: begin() one first")

    def write(
        self, layer: int, segments: Sequence[StateSegment], planes: Mapping[str, Tensor], at: At | None = None,
        between: At | None = None, stored: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Store planes [B,*shape]: a layer's state after the open step. A kernel has `stored` those of these names.

        `at(indices, counts)` returns the state after the first `counts[i]` tokens of segment `indices[i]`, where counts
        are in descending order. Without it, a commit cannot accept only a part of the tokens of a segment. `between`,
        or else `at`, computes the states of checkpoints inside segments, without the planes that are stored.
        """
        self._check_open("write")
        rows = [segment.write for segment in segments]
        inside = sorted(((n, i, row) for i, one in enumerate(segments) for n, row in one.between), reverse=True)
        copies = self._copies(layer, rows, planes, stored)
        written = self._written[layer]
        written.difference_update(rows)  # not valid until all planes are written
        for plane, index, values in copies:
            plane.index_copy_(0, index, values)
        if inside and (compute := between or at) is not None:
            counts, indices, more = zip(*inside, strict=True)
            for plane, index, values in self._copies(layer, more, compute(indices, counts), stored):
                plane.index_copy_(0, index, values)
            rows += more
        written.update(rows)
        self._puts.append(_Put(layer, segments, at))

    def planes(self, layer: int) -> Mapping[str, Tensor]:
        """The planes [rows + 1,*shape] of a layer, of which a kernel reads rows `StateSegment.read` and writes rows
        `StateSegment.write` of the open step. What it wrote counts after `written` only."""
        return self._of(layer)

    def written(self, layer: int, segments: Sequence[StateSegment]) -> None:
        """Note that a kernel stored all planes of these segments, of one token each: no part of them can be kept."""
        self._check_open("written")
        self._written[layer].update(segment.write for segment in segments)
        self._puts.append(_Put(layer, segments, None))

    def content(self, row: int) -> list[Tensor]:
        """A bitwise copy of a row for `restore`, ordered by layer, plane."""
        return [plane[row].clone() for planes in self._planes.values() for plane in planes.values()]

    def like(self, row: int) -> list[Tensor]:
        """Tensors with the shape, type and device of those of `content`: views of the row."""
        return [plane[row] for planes in self._planes.values() for plane in planes.values()]

    def restore(self, row: int, content: Iterable[Tensor]) -> None:
        """Write `content` to a row that no step and no sequence reads yet: each tensor before the next one is taken."""
        stored = (plane for planes in self._planes.values() for plane in planes.values())
        for plane, values in zip(stored, content, strict=True):
            plane[row].copy_(values)

    def settle(self, batch: Batch, counts: Sequence[int]) -> None:
        """Write the state after the accepted tokens to the rows of feeds that keep only a part of their tokens.

        Raises `BadRequest` if such a feed is not `revertible`, `WrongStage` if a layer wrote no state for a feed, and
        `NotSupported` if a layer passed no `at`. The step stays open if anything raises, and can be committed with
        other counts or abandoned: rows that were already overwritten are recomputed then, even for all tokens.
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
            for plane, index, values in self._copies(layer, [self.step_rows.new(seq) for seq in seqs], planes):
                plane.index_copy_(0, index, values)

    def _parts(self, partly: Mapping[int, int]) -> Iterator[tuple[int, list[int], Mapping[str, Tensor]]]:
        """Per layer: sequences, and their planes [b,*shape] after `partly[seq]` tokens. Layers are computed one after
        the other, so that only one result is in memory at a time."""
        last: dict[tuple[int, int], tuple[_Put, int]] = {}  # by layer and sequence: the last write, and the index in it
        for put in self._puts:
            for index, segment in enumerate(put.segments):
                if segment.seq in partly:
                    last[put.layer, segment.seq] = put, index
        together: dict[int, tuple[_Put, list[int]]] = {}  # by write: the indices for one call of `at`
        for (layer, seq), (put, index) in last.items():
            if put.at is None:
                raise _no_part(seq, layer)
            together.setdefault(id(put), (put, []))[1].append(index)
        for put, indices in together.values():
            assert put.at is not None
            indices.sort(key=lambda index, put=put: -partly[put.segments[index].seq])
            kept = [put.segments[index] for index in indices]
            yield put.layer, [one.seq for one in kept], put.at(indices, [partly[one.seq] for one in kept])

    def _check_written(self, batch: Batch, counts: Sequence[int]) -> None:
        """Raise `WrongStage` if a layer wrote no state for a row that is being committed (stale content)."""
        writes = self.step_rows.writes(batch, counts)
        for layer, written in self._written.items():
            if missing := writes.keys() - written:
                seqs = sorted(writes[row] for row in missing)
                raise WrongStage(
                    f"commit() before layer {layer} wrote its states of sequences {seqs}: run the whole model, or "
                    f"abandon() the step"
                )
            inside = self.step_rows.inside(batch, counts)
            if missing := inside.keys() - written:
                raise _no_part(inside[min(missing)], layer)

    def _index(self, rows: tuple[int, ...]) -> Tensor:
        """[n], on the device."""
        index = self._indices.get(rows)
        if index is None:
            index = self._indices[rows] = uploaded(rows, torch.int64, self.device)
        return index

    def _of(self, layer: int) -> dict[str, Tensor]:
        planes = self._planes.get(layer)
        if planes is None:
            raise BadRequest(
                f"layer {layer} is not recurrent; the recurrent layers are {sorted(self._planes) or 'none'}"
            )
        return planes

    def _copies(
        self, layer: int, rows: Sequence[int], planes: Mapping[str, Tensor], without: Collection[str] = ()
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What stores planes [n,*shape] in n rows: planes, their rows [m] and the values [m,*shape] for these. Row 0
        (null) is skipped."""
        copies: list[tuple[Tensor, Tensor, Tensor]] = []
        stored = {name: plane for name, plane in self._of(layer).items() if name not in without}
        if planes.keys() != stored.keys():
            raise BadRequest(f"layer {layer} has state planes {sorted(stored)}, not {sorted(planes)}")
        kept = tuple(i for i, row in enumerate(rows) if row)
        for name, plane in stored.items():
            values = planes[name]
            if values.shape[1:] != plane.shape[1:] or len(values) != len(rows):
                wanted = [len(rows), *plane.shape[1:]]
                raise BadRequest(f"plane {name} of layer {layer} has shape {wanted}, not {list(values.shape)}")
            if kept:
                values = values.detach().to(plane.dtype)
                if len(kept) < len(rows):
                    values = values.index_select(0, self._index(kept))
                copies.append((plane, self._index(tuple(rows[i] for i in kept)), values))
        return copies

    def check(self) -> None:
        """Assert the invariants of the planes."""
        for planes in self._planes.values():
            for name, plane in planes.items():
                assert self.rows.capacity is not None and len(plane) == self.rows.capacity + 1
                assert not plane[0].any(), f"the null row of {name} was written"


def _no_part(seq: int, layer: int) -> NotSupported:
    return NotSupported(
        f"a part of the new tokens of sequence {seq} cannot be kept, nor be a checkpoint: layer {layer} passed no `at` "
        f"that computes its state after them"
    )


def _rows(n: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n,*shape]; row 0 is zero, the others are uninitialised."""
    plane = torch.empty(n, *shape, dtype=dtype, device=device)
    plane[0] = 0
    return plane
