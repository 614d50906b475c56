"""attention: a few new rows of each sequence over its cells, which are read once and in place (`attention.cpp`)."""

import ctypes
from array import array
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvcellar.contracts import Stored
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


class Table:
    """Short segments of a step, in integers, as the kernel reads them (`Call` says what each row is).

    Made of rows and runs alone: nothing here grows with the keys that are seen.
    """

    def __init__(self) -> None:
        self.segments, self.rows, self.runs = (array("q") for _ in range(3))
        self.partial_rows = 0  # rows that the kernel weighs: each of a segment's, once for each of its chunks
        self.keys = 0  # that are read, once for all rows of a segment

    def add(self, layout: Layout, segment: Segment) -> None:
        """At least one row, with the cells that it sees."""
        seen = [(layout.lowest(pos), segment.last(pos) + 1) for pos in range(segment.pos.start, segment.pos.end)]
        self.segments.extend((len(self.rows) // 3, len(seen), len(self.runs) // 2, len(segment.runs)))
        for row, keys in enumerate(seen, segment.row):
            self.rows.extend((row, *keys))
        if not segment.runs:
            return
        keys = max(0, seen[-1][1] - seen[0][0])
        self.keys += keys
        self.partial_rows += len(seen) * -(-keys // CHUNK)
        key = segment.first
        for run in segment.runs:
            self.runs.extend((key, run.cell))
            key += run.n
        self.runs.extend((key, 0))


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
        """q [T,H,D], into the rows of out [T,H,Dv] that the table names."""
        known = q if q.dtype in TYPES else q.float()
        known = known if known.stride(-1) == 1 else known.contiguous()
        filled = out if known is q or out.dtype is known.dtype else out.to(known.dtype)
        k, v = _by_cell(keys), _by_cell(values)
        sinks = None if scoring.sinks is None else scoring.sinks.detach().float().contiguous()
        width = -(-v.shape[2] // WIDTH) * WIDTH
        # Of each: maximum, sum, weighted values.
        partials = torch.empty(table.partial_rows, q.shape[1], width + 2, dtype=torch.float32, device=q.device)
        read = table.keys * k.shape[1] * (k.shape[2] * k.itemsize + v.shape[2] * v.itemsize)
        call = _Call(
            known.data_ptr(), k.data_ptr(), v.data_ptr(), filled.data_ptr(),
            None if sinks is None else sinks.data_ptr(), partials.data_ptr(),
            table.segments.buffer_info()[0], table.rows.buffer_info()[0], table.runs.buffer_info()[0],
            known.stride(0), known.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            q.shape[1], k.shape[1], k.shape[2], v.shape[2],
            len(table.segments) // 4, min(torch.get_num_threads(), 1 + read // PER_THREAD),
            TYPES[known.dtype], TYPES[k.dtype], TYPES[v.dtype],
            scoring.scale, scoring.softcap or 0.0,
        )  # fmt: skip
        if self._library.kvcellar_attend(ctypes.byref(call)):
            raise MemoryError("there is not enough memory to attend")
        if filled is not out:
            rows = [table.rows[i] for i in range(0, len(table.rows), 3)]
            out[rows] = filled[rows].to(out.dtype)


def _by_cell(stored: Stored) -> Tensor:
    """The elements of all cells, [C,heads,size], a view: one after the other within a head."""
    return stored.codes.transpose(0, 1) if stored.arrangement == "head" else stored.codes
