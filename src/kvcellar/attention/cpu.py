"""cpu: a few new rows of each sequence over its cells, read once and in place, by a kernel (`kernels/attention.cpp`).

Keys and values are bfloat16 or float32, sums are float32: scores are as exact as in `sdpa`, and weights have the type
that they have there. Longer blocks of rows, and keys that are computed from stored planes (MLA), go to `sdpa`.

Always true: the result for the rows of a sequence depends only on its own queries and cells, bit for bit: not on other
sequences, nor on the number of threads.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.attention.products import Products, part
from kvcellar.attention.sdpa import Sdpa
from kvcellar.contracts import History, StepTables, Stored
from kvcellar.errors import NoBackend
from kvcellar.kernels.compiled import SOURCES, NotCompiled, check_shared, library
from kvcellar.layout import Layout
from kvcellar.plan import GroupPlan, Segment
from kvcellar.shapes import Arrangement, AttentionSpec, Kind, Scoring

SOURCE = SOURCES / "attention.cpp"
SHORT = 16  # rows of a sequence up to which the kernel serves them
CHUNK = 512  # keys that are weighed at once; the kernel's
WIDTH = 32  # sums of a row are padded to a multiple of this; the kernel's `BUNDLE`
PER_THREAD = 1 << 20  # bytes of keys and values that are worth another thread
TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Call(ctypes.Structure):
    """`Call` in the kernel, field by field: `check_shared` compares them at load."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "sinks", "partials")),
        *((name, ctypes.c_void_p) for name in ("segments", "rows", "runs")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_cell", "k_head", "v_cell", "v_head")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "size", "value_size")),
        *((name, ctypes.c_int64) for name in ("n_segments", "threads")),
        *((name, ctypes.c_int32) for name in ("q_type", "k_type", "v_type")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class Table(NamedTuple):
    """Short segments of a step in integers, as the kernel reads them (`Call` documents the rows).

    It grows with rows and runs, not with the keys that are seen.
    """

    segments: Tensor  # int64, flat, as are the others
    rows: Tensor
    runs: Tensor
    partial_rows: int  # rows of a segment times its chunks, summed over segments
    keys: int  # keys that are read, once for all rows of a segment


def table(layout: Layout, segments: Sequence[Segment], tables: StepTables) -> Table:
    """The table of segments of at least one row."""
    numbers: list[int] = []
    rows: list[int] = []
    runs: list[int] = []
    partial_rows = all_keys = 0
    for segment in segments:
        seen = [(layout.lowest(pos), segment.last(pos) + 1) for pos in range(segment.pos.start, segment.pos.end)]
        numbers.extend((len(rows) // 3, len(seen), len(runs) // 2, len(segment.runs)))
        for row, keys in enumerate(seen, segment.row):
            rows.extend((row, *keys))
        if not segment.runs:
            continue
        keys = max(0, seen[-1][1] - seen[0][0])
        all_keys += keys
        partial_rows += len(seen) * -(-keys // CHUNK)
        key = segment.first
        for run in segment.runs:
            runs.extend((key, run.cell))
            key += run.n
        runs.extend((key, 0))
    return Table(
        tables.fill("segments", numbers), tables.fill("rows", rows), tables.fill("runs", runs), partial_rows, all_keys
    )


class Kernel:
    """The compiled kernel. Raises `NotCompiled` with the reason if it cannot be compiled."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        self._library = library(SOURCE, environment)
        check_shared(
            self._library,
            _Call,
            CHUNK=CHUNK,
            BUNDLE=WIDTH,
            FLOAT32=TYPES[torch.float32],
            BFLOAT16=TYPES[torch.bfloat16],
        )
        self._library.kvcellar_attend.argtypes = [ctypes.c_void_p]
        self._library.kvcellar_attend.restype = ctypes.c_int

    def attend(self, q: Tensor, keys: Stored, values: Stored, scoring: Scoring, table: Table, out: Tensor) -> None:
        """Attend with q [1,T,H,D], writing the rows of out [1,T,H,Dv] that are in the table."""
        known = q if q.dtype in TYPES else q.float()
        known = known if known.stride(-1) == 1 else known.contiguous()
        filled = out if known is q or out.dtype is known.dtype else out.to(known.dtype)
        k, v = keys.rows, values.rows  # [C,G,D]: one element after the other within a head
        heads, width = q.shape[2], -(-v.shape[2] // WIDTH) * WIDTH
        sinks = None if scoring.sinks is None else scoring.sinks.detach().float().contiguous()
        # Of each: maximum, sum, weighted values.
        partials = torch.empty(table.partial_rows, heads, width + 2, dtype=torch.float32, device=q.device)
        read = table.keys * k.shape[1] * (k.shape[2] * k.itemsize + v.shape[2] * v.itemsize)
        call = _Call(
            known.data_ptr(), k.data_ptr(), v.data_ptr(), filled.data_ptr(),
            None if sinks is None else sinks.data_ptr(), partials.data_ptr(),
            table.segments.data_ptr(), table.rows.data_ptr(), table.runs.data_ptr(),
            *known.stride()[1:3], *k.stride()[:2], *v.stride()[:2],
            heads, *k.shape[1:], v.shape[2],
            len(table.segments) // 4, min(torch.get_num_threads(), 1 + read // PER_THREAD),
            TYPES[known.dtype], TYPES[k.dtype], TYPES[v.dtype],
            scoring.scale, scoring.softcap or 0.0,
        )  # fmt: skip
        if self._library.kvcellar_attend(ctypes.byref(call)):
            raise MemoryError("there is not enough memory to attend")
        if filled is not out:
            rows = table.rows[::3]
            out[:, rows] = filled[:, rows].to(out.dtype)


class Prepared(NamedTuple):
    """Data of a step that all layers of a group share: the rows for the kernel, and those for products."""

    table: Table | None
    products: Products | None


class Cpu:
    """Decoding on a CPU, in float32 or bfloat16."""

    name = "cpu"
    arrangement: Arrangement | Mapping[str, Arrangement] = "head"
    padding = 1
    kinds = frozenset[Kind]({"float32", "bfloat16"})

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """`environment` names the compiler, and the directory of compiled libraries (`kernels.compiled`)."""
        self._environment, self._portable = environment, Sdpa()
        self._kernel: Kernel | None = None

    def refuse(self, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"it runs on a CPU, not on {spec.device}"
        if (reason := self._portable.refuse(spec) or spec.unreadable(self.kinds)) is not None:
            return reason
        try:
            self._kernel = self._kernel or Kernel(self._environment)
        except NotCompiled as error:
            return str(error)
        return None

    def _compiled(self) -> Kernel:
        """Raises `NoBackend`."""
        try:
            self._kernel = Kernel(self._environment)
        except NotCompiled as error:
            raise NoBackend("this step", {self.name: str(error)}) from error
        return self._kernel

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Prepared:
        short = [segment for segment in plan.segments if len(segment.pos) <= SHORT]
        long = [part(plan.layout, segment, tables.device) for segment in plan.segments if len(segment.pos) > SHORT]
        return Prepared(table(plan.layout, short, tables) if short else None, Products(long) if long else None)

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        prepared: Prepared = history.step.prepared
        planes = history.planes
        out = q.new_empty(*q.shape[:3], planes["v"].plane.size)  # [1,T,H,Dv]
        if prepared.products is not None:
            prepared.products.attend_into(q, history, scoring, out)
        if prepared.table is not None:
            kernel = self._kernel or self._compiled()
            kernel.attend(q, planes["k"], planes["v"], scoring, prepared.table, out)
        return out

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
        return self._portable.attend_dense(q, k, v, visible, scoring)
