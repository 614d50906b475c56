"""attention: a few new rows of each sequence over its cells, which are read once and in place (`attention.cpp`)."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.contracts import StepTables, Stored
from kvcellar.kernels.compiled import check_shared, library
from kvcellar.layout import Layout
from kvcellar.plan import Segment
from kvcellar.shapes import Scoring

SOURCE = Path(__file__).with_name("attention.cpp")
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
    """Short segments of a step, in integers, as the kernel reads them (`Call` says what each row is).

    Made of rows and runs alone: nothing here grows with the keys that are seen.
    """

    segments: Tensor  # int64, flat, as are the others
    rows: Tensor
    runs: Tensor
    partial_rows: int  # rows that the kernel weighs: each of a segment's, once for each of its chunks
    keys: int  # that are read, once for all rows of a segment


def table(layout: Layout, segments: Sequence[Segment], tables: StepTables) -> Table:
    """Of segments of at least one row, with the cells that they see."""
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
    """The kernel, compiled. Raises `NotCompiled` where it cannot be, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and where its work is kept."""
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
        """q [1,T,H,D], into the rows of out [1,T,H,Dv] that the table names."""
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
