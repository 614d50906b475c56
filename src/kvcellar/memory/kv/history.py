"""history: what attention reads and writes in a step: stored planes of each layer, and tables at fixed addresses; and
what an attention backend is.

Only this file writes K/V.

Always true:
  * what is read is what is stored: new tokens are read back quantised, too;
  * all but the content of planes belongs to the open step; the objects outlive it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcellar.errors import BadRequest
from kvcellar.kernels.uploads import upload
from kvcellar.memory.kv.quantise import dequantise, quantise, rotate
from kvcellar.memory.plan import GroupPlan, Run
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Kind, Plane, Scoring, Storage

HOST = torch.device("cpu")
SMALLEST = 16  # elements of the smallest bucket of a step table
PLAIN: Mapping[Kind, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Bytes of fp8 are kept as uint8: torch copies float8 by index on no CPU.
CODES: Mapping[Kind, torch.dtype] = {**PLAIN, "fp8": torch.uint8, "int8": torch.int8, "int4": torch.uint8}


class StoredPlane:
    """One plane of one layer: the stored data and methods to read it.

    Kernels read `codes` (or `rows`) and `scales` in place; all other code calls `read` or `at`. `codes` are the
    elements of all cells, in the plane's arrangement. A byte stores two int4: element i in the low bits, element
    i + (size + 1) // 2 in the high bits, each plus 8. `scales` are float16, arranged like `codes`, one per `BLOCK`
    elements; None if the plane is not quantised.
    """

    def __init__(
        self,
        plane: Plane,
        storage: Storage,
        places: int,
        arrangement: Arrangement,
        device: torch.device,
        rotation: Tensor | None,
    ) -> None:
        """`rotation` [size,size] is the matrix of `hadamard`, which the pool owns, if the storage needs it."""
        self.plane, self.storage = plane, storage
        self.arrangement: Arrangement = arrangement
        self._rotation = rotation
        kind, size = storage.kind, plane.size
        width = (size + 1) // 2 if kind == "int4" else size
        tensors = [self._allocated(places, width, CODES[kind], device)]
        if storage.quantised:
            tensors.append(self._allocated(places, storage.scales(size), torch.float16, device))
        self._bind(tensors)

    def _allocated(self, places: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[places,heads,width] in the plane's arrangement; undefined but for the null place."""
        heads = self.plane.heads
        shape = (heads, places, width) if self.arrangement == "head" else (places, heads, width)
        made = torch.empty(shape, dtype=dtype, device=device)
        self._rows(made)[0] = 0
        return made

    def _bind(self, tensors: Sequence[Tensor]) -> None:
        """Use these tensors for codes (and scales). Views that steps use are made once, here."""
        self._tensors = list(tensors)
        codes = tensors[0]
        self.codes = codes.view(torch.float8_e4m3fn) if self.storage.kind == "fp8" else codes
        self.scales = tensors[1] if len(tensors) > 1 else None
        self.rows = self._rows(codes)  # [places,heads,width]
        self.by_head = self.rows.transpose(0, 1)[None]  # [1,heads,places,width]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def read(self, cells: Tensor | slice, dtype: torch.dtype, *, rotated: bool = False) -> Tensor:
        """[heads,n,size] of `cells`: a view where they are a slice and stored in `dtype`. Keys that were rotated before
        they were quantised are rotated back, unless `rotated`."""
        codes = self._by_head(self._tensors[0], cells)
        scales = None if self.scales is None else self._by_head(self.scales, cells)
        return self._values(codes, scales, dtype, rotated=rotated)

    def values(self, cells: Tensor) -> Tensor:
        """A copy [n,heads,size] of what is stored in `cells`: float32 where it is quantised."""
        return self.read(cells, PLAIN.get(self.storage.kind, torch.float32)).transpose(0, 1)

    def at(self, cells: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
        """[*,size] of these cells and heads, which broadcast to [*]; rotated keys as they were rotated."""
        scales = None if self.scales is None else self._rows(self.scales)[cells, heads]
        return self._values(self.rows[cells, heads], scales, dtype, rotated=True)

    def _values(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype, *, rotated: bool) -> Tensor:
        if scales is None:
            return codes.to(dtype)
        values = dequantise(codes, scales, self.storage.kind, self.plane.size)
        if self._rotation is not None and not rotated:
            values = values @ self._rotation
        return values.to(dtype)

    def meet(self, q: Tensor) -> Tensor:
        """Rotate queries [...,size] like the keys that `read` returns if `rotated`."""
        return q if self._rotation is None else (q.float() @ self._rotation).to(q.dtype)

    def quantise(self, cells: Tensor, values: Tensor) -> None:
        """Store `values` [1,heads,n,size] in cells [n] as codes and scales."""
        made = quantise(rotate(values) if self.storage.hadamard else values, self.storage.kind)
        for tensor, new in zip(self._tensors, made, strict=True):
            self._rows(tensor).index_copy_(0, cells, new[0].transpose(0, 1))

    def content(self, cells: Tensor | slice) -> list[Tensor]:
        """A copy of what is stored in `cells`, bit for bit, for `restore`."""
        if isinstance(cells, slice):
            return [self._rows(tensor)[cells].clone(memory_format=torch.contiguous_format) for tensor in self._tensors]
        return [self._rows(tensor).index_select(0, cells) for tensor in self._tensors]

    def like(self, n: int) -> list[Tensor]:
        """Tensors with the shape, type and device of those of `content` for n cells: views of other cells."""
        return [self._rows(tensor)[:n] for tensor in self._tensors]

    def zero(self, run: Run) -> None:
        for tensor in self._tensors:
            self._rows(tensor)[run.cell : run.end].zero_()

    def restore(self, cells: Tensor | slice, content: Iterable[Tensor]) -> None:
        """Write `content` to `cells`: each tensor before the next one is taken."""
        for tensor, rows in zip(self._tensors, content, strict=True):
            if isinstance(cells, slice):
                self._rows(tensor)[cells].copy_(rows)
            else:
                self._rows(tensor).index_copy_(0, cells, rows)

    def _rows(self, tensor: Tensor) -> Tensor:
        """[C,heads,width], a view."""
        return tensor.transpose(0, 1) if self.arrangement == "head" else tensor

    def _by_head(self, tensor: Tensor, cells: Tensor | slice) -> Tensor:
        """[heads,n,width]: a view of a slice."""
        if isinstance(cells, slice):
            return self._rows(tensor)[cells].transpose(0, 1)
        if self.arrangement == "head":
            return tensor.index_select(1, cells)
        return tensor.index_select(0, cells).transpose(0, 1)


def write_planes(planes: Mapping[str, StoredPlane], cells: Tensor, new: Mapping[str, Tensor]) -> None:
    """Store `new` planes [1,heads,n,size] by name in cells [n], without their graph."""
    for name, values in new.items():
        plane = planes[name]
        if values.requires_grad:
            values = values.detach()  # else the plane would keep the graph of every step that wrote it
        if plane.scales is not None:
            plane.quantise(cells, values)
            continue
        if values.dtype is not plane.codes.dtype:
            values = values.to(plane.codes.dtype)
        plane.by_head.index_copy_(2, cells, values)


def indices(runs: Iterable[Run], device: torch.device) -> Tensor:
    """[n], the cells of `runs` in order, as an int64 tensor."""
    cells = [torch.arange(run.cell, run.end, device=device) for run in runs]
    return torch.cat(cells) if cells else torch.zeros(0, dtype=torch.long, device=device)


class StepTables:
    """The tensors of one group, or of all groups together, at the same addresses in every step, so that a step can be
    recorded and replayed.

    Each has a name and a bucket: its number of elements, rounded up to a power of two. A tensor that was returned has
    the same address in every later step with the same name, type and bucket; its content belongs to the open step.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: int = 0) -> None:
        """`dtype` is the memory's own type, `heads` the number of KV heads of the group."""
        self.device, self.dtype, self.heads = device, dtype, heads
        self._buckets: dict[tuple[str, torch.dtype, int], Tensor] = {}

    def fill(self, name: str, values: Sequence[int] | Tensor) -> Tensor:
        """int64 [n] on the device; the rest of its bucket is zero: the null cell."""
        n = len(values)
        there = self._bucket(name, n, torch.int64)
        if isinstance(values, Tensor):
            there[:n].copy_(values)
            there[n:].zero_()
        elif self.device.type == "cpu":
            row = there.numpy()
            row[:n] = values
            row[n:] = 0
        else:
            upload(values, there)
        return there[:n]

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of this shape on the device, for the caller to fill."""
        n = math.prod(shape)
        return self._bucket(name, n, dtype)[:n].view(*shape)

    @property
    def bytes(self) -> int:
        """Bytes of all buckets on the device."""
        return sum(there.nbytes for there in self._buckets.values())

    def _bucket(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        size = max(SMALLEST, 1 << (n - 1).bit_length())
        found = self._buckets.get((name, dtype, size))
        if found is None:
            with torch.inference_mode(False):  # it is filled in any mode
                found = self._buckets[name, dtype, size] = torch.zeros(size, dtype=dtype, device=self.device)
        return found


class Columns:
    """The cells that a group's segments may see, as columns of a dense mask. Shared cells are there once.

    Computed at the first access and kept until the step ends: only dense attention needs it.
    """

    def __init__(self, plan: GroupPlan, tokens: int, device: torch.device) -> None:
        self._plan, self._tokens, self._device = plan, tokens, device

    @cached_property
    def _of_all(self) -> Tensor:
        merged: list[tuple[int, int]] = []
        for start, end in sorted((run.cell, run.end) for segment in self._plan.segments for run in segment.runs):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        return indices((Run(start, end - start) for start, end in merged), HOST)

    @cached_property
    def cells(self) -> Tensor:
        """[N], ascending."""
        return self._of_all.to(self._device)

    @cached_property
    def visible(self) -> Tensor:
        """[T,N], True where the row may see the cell."""
        cells = self._of_all
        out = torch.zeros(self._tokens, len(cells), dtype=torch.bool, device=HOST)
        for segment in self._plan.segments:
            own = indices(segment.runs, HOST)
            key = segment.first + torch.arange(len(own), device=HOST)
            positions = range(segment.pos.start, segment.pos.end)
            lowest = torch.tensor([self._plan.layout.lowest(pos) for pos in positions], device=HOST)[:, None]
            last = torch.tensor([segment.last(pos) for pos in positions], device=HOST)[:, None]
            rows = slice(segment.row, segment.row + len(positions))
            out[rows, torch.searchsorted(cells, own)] = (key >= lowest) & (key <= last)
        return out.to(self._device)


class GroupStep:
    """Data of the open step that the layers of a group share: one object per group, refilled by `begin`."""

    plan: GroupPlan
    prepared: Any  # the return value of the backend's `prepare`
    cells: Tensor  # [t], where the new tokens are written
    columns: Columns
    written: set[tuple[int, str]]  # layers and planes of the step, in all groups

    def __init__(self, tables: StepTables) -> None:
        self.tables = tables

    def end(self) -> None:
        """End the step: free what belongs to it alone."""
        vars(self).pop("columns", None)  # missing if laying out the step failed


class LayerHistory:
    """One layer in the open step: its planes by name ("k", "v"), its backend, its group's step. The object is the same
    in all steps."""

    def __init__(self, planes: Mapping[str, StoredPlane], layer: int, backend: "Backend", step: GroupStep) -> None:
        self.planes, self.layer, self.backend, self.step = planes, layer, backend, step

    def put(self, new: Mapping[str, Tensor]) -> None:
        """Store new planes [1,heads,t,size] by name, of the sizes that the layer has."""
        written = self.step.written
        for name in new:
            if (self.layer, name) in written:
                names = " and ".join(new)
                raise BadRequest(f"layer {self.layer} was given its {names} of this step before: they are stored once")
        write_planes(self.planes, self.step.cells, new)
        for name in new:
            written.add((self.layer, name))

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """(k [N,G,D], v [N,G,Dv], visible [T,N]): each cell that any row may see, once, in order of cell."""
        k, v = (self.planes[name].values(self.step.columns.cells) for name in ("k", "v"))
        return k, v, self.step.columns.visible

    def in_order(self) -> tuple[Tensor, Tensor]:
        """(k [n,G,D], v [n,G,Dv]) of the only sequence in the step, in order of position."""
        ((k, v),) = self.each_in_order()
        return k, v

    def each_in_order(self) -> list[tuple[Tensor, Tensor]]:
        """(k [n,G,D], v [n,G,Dv]) of every sequence in the step, each in order of position."""
        return list(zip(self.plane_in_order("k"), self.plane_in_order("v"), strict=True))

    def plane_in_order(self, name: str) -> list[Tensor]:
        """A plane [n,heads,size] of every sequence in the step, each in order of position."""
        runs = (segment.runs for segment in self.step.plan.segments)
        return [self.planes[name].values(indices(of_one, self.step.tables.device)) for of_one in runs]


class Backend(Protocol):
    """Attention of new tokens over stored cells. It declares its arrangement, so nothing is rearranged per step."""

    name: str
    arrangement: Arrangement  # of all planes
    kinds: frozenset[Kind]  # storage kinds it can read

    def refuse(self, spec: AttentionSpec) -> str | None:
        """The reason why it does not support `spec`; None if it does. `AttentionSpec.unreadable` checks `kinds`."""
        ...

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Any:
        """Compute what all layers of a group share in a step: tables, masks. Called once per group and step."""
        ...

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        """q [1,T,H,D] -> [1,T,H,Dv]; row t sees exactly `[layout.lowest(pos_t), segment.last(pos_t)]` of its segment.

        The result is zero for rows of a segment without cells (a sequence without input).
        """
        ...

    def attend_latent(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        """q [1,T,H,D+Dv] -> [1,T,H,D]: a key is the vector of the plane "k" [D] and behind it that of "v" [Dv], its
        value that of "k" (MLA without expanding). The result is zero where that of `attend` is.
        """
        ...

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, step: GroupStep, scoring: Scoring) -> Tensor:
        """q [T,H,D], k [N,G,D], v [N,G,Dv] -> [T,H,Dv]: for keys computed from what the cells of `step.columns` store
        (MLA).

        The result is zero for a row that sees nothing.
        """
        ...
