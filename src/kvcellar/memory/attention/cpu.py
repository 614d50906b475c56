"""cpu: new rows of each sequence over its cells, read in place, by a kernel (`kernels/attention.cpp`): one row of each
of many sequences, or thousands of one.

Keys and values are bfloat16, float32, or codes with scales; sums are float32: scores are as exact as in `sdpa`, weights
at least as exact. Keys that are computed from stored planes (MLA) are read where they were computed, or not computed at
all: `attend_latent` takes the stored planes as keys.

Always true: the result for a row depends only on its own query and the cells that it sees, bit for bit: not on other
rows, whether of its sequence or of others, nor on how a prompt is cut, nor on the number of threads.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvcellar.errors import NoBackend
from kvcellar.kernels.compiled import SOURCES, Kernel, Native, NotCompiled, Threads, address_of
from kvcellar.kernels.structures import constant, structure
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.kv.history import GroupStep, LayerHistory, StepTables, StoredPlane
from kvcellar.memory.layout import Layout
from kvcellar.memory.plan import GroupPlan, Segment
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Kind, Scoring

SOURCE, STORING = SOURCES / "attention.cpp", SOURCES / "store.cpp"
CHUNK = constant(SOURCE, "CHUNK")  # keys that are weighed at once
PER_THREAD = 1 << 20  # bytes of keys and values that are worth another thread, or eight times as many products
_READ: tuple[Kind, ...] = ("float32", "bfloat16", "int8", "int4", "fp8")
KINDS: Mapping[Kind, int] = {kind: constant(SOURCE, kind.upper()) for kind in _READ}
NO_MEMORY = "there is not enough memory to attend"
TYPES = {torch.float32: KINDS["float32"], torch.bfloat16: KINDS["bfloat16"]}  # of queries and results
_Plane, _Call = structure(SOURCE, "Plane"), structure(SOURCE, "Call")
_New, _Put = structure(STORING, "New"), structure(STORING, "Call")


class Prepared(NamedTuple):
    """A step in integers, as the kernel reads it (`Step` documents the tables).

    It grows with rows and runs, not with the keys that are seen.
    """

    step: Tensor  # the addresses and lengths of the others: always at the same address itself
    segments: Tensor  # int64, flat, as are the others
    rows: Tensor
    runs: Tensor
    storing: Tensor  # rows of the step that are stored


def prepared(layout: Layout, segments: Sequence[Segment], tables: StepTables) -> Prepared:
    """The tables of a step of one group."""
    numbers: list[int] = []
    rows: list[int] = []
    runs: list[int] = []
    storing: list[int] = []
    for segment in segments:
        start, end = segment.pos.start, segment.pos.end
        numbers.extend((len(rows) // 3, end - start, len(runs) // 2, len(segment.runs)))
        for row, pos in enumerate(range(start, end), segment.row):
            rows.extend((row, layout.lowest(pos), segment.last(pos) + 1))
        if segment.new:
            storing.extend(range(segment.row, segment.row + end - start))
        if not segment.runs:
            continue
        key = segment.first
        for run in segment.runs:
            runs.extend((key, run.cell))
            key += run.n
        runs.extend((key, 0))
    filled = [tables.fill(name, made) for name, made in (("segments", numbers), ("rows", rows), ("runs", runs))]
    stored = tables.fill("storing", storing)
    cells = tables.empty("cells", (len(storing),), torch.int64)  # filled by the memory, in the order of `storing`
    addresses = [table.data_ptr() for table in (*filled, stored, cells)]
    step = tables.fill("step", [*addresses, len(segments), len(storing)])
    return Prepared(step, filled[0], filled[1], filled[2], stored)


def _plane(stored: StoredPlane) -> Any:
    rows, scales = stored.rows, stored.scales  # [C,G,width], one element after the other within a head
    places = [0, 0]
    if scales is not None:
        scales = scales if stored.arrangement == "token" else scales.transpose(0, 1)  # [C,G,blocks]
        places = [step * scales.itemsize for step in scales.stride()[:2]]
    return _Plane(
        rows.data_ptr(), None if scales is None else scales.data_ptr(),
        rows.stride(0) * rows.itemsize, rows.stride(1) * rows.itemsize, *places, stored.plane.size,
        KINDS[stored.storage.kind], stored.storage.hadamard,
    )  # fmt: skip


class Kernels:
    """The compiled kernels. Raises `NotCompiled` with the reason if it cannot be compiled."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        self._threads = Threads(environment)
        self.attention = Kernel(SOURCE, "kvcellar_attend", environment)
        self.storing = Kernel(STORING, "kvcellar_store", environment)

    def bound(self, history: LayerHistory, scoring: Scoring, *, latent: bool) -> "_Bound":
        """The call of one layer, without its queries and results. `latent`: that of `attend_latent`."""
        keys, values = history.planes["k"], history.planes["v"]
        sinks, k, v = _sinks(scoring), _plane(keys), _plane(values)
        if latent:
            assert keys.plane.heads == values.plane.heads
            call = self.call(k, k, keys.plane.heads, scoring, sinks, tail=v)
        else:
            call = self.call(k, v, keys.plane.heads, scoring, sinks)
        return _Bound(call, call.v.size, scoring, sinks, latent)

    def call(self, k: Any, v: Any, groups: int, scoring: Scoring, sinks: Tensor | None, *, tail: Any = None) -> Any:
        """A call without its step, queries and results."""
        return _Call(
            sinks=None if sinks is None else sinks.data_ptr(), pool=self._threads.address,
            k=k, v=v, tail=tail or _Plane(), groups=groups, per_thread=PER_THREAD,
            scale=scoring.scale, softcap=scoring.softcap or 0.0,
        )  # fmt: skip


def _sinks(scoring: Scoring) -> Tensor | None:
    """[H] in float32."""
    return None if scoring.sinks is None else scoring.sinks.detach().float().contiguous()


def _fill(call: Any, step: Tensor, q: Tensor, out: Tensor) -> None:
    """For q [T,H,D] and out [T,H,Dv], both of one of `TYPES`, whose elements lie side by side."""
    call.step, call.q, call.out = step.data_ptr(), q.data_ptr(), out.data_ptr()
    call.q_row, call.q_head, _ = q.stride()
    call.out_row, call.out_head, _ = out.stride()
    call.heads, call.threads, call.type = q.shape[1], torch.get_num_threads(), TYPES[q.dtype]


class _Bound(NamedTuple):
    """The call of a layer, and what it was made from."""

    call: Any
    value_size: int
    scoring: Scoring
    sinks: Tensor | None
    latent: bool


class Cpu:
    """Attention on a CPU, in float32 or bfloat16."""

    name = "cpu"
    arrangement: Arrangement = "head"
    kinds = frozenset[Kind](KINDS)

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """`environment` names the compiler, and the directory of compiled libraries (`kernels.compiled`)."""
        self._environment, self._portable = environment, Sdpa()
        self._kernel: Kernels | None = None
        self._bound: WeakKeyDictionary[LayerHistory, _Bound] = WeakKeyDictionary()  # of each layer, for later steps

    def refuse(self, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"it runs on a CPU, not on {spec.device}"
        if (reason := self._portable.refuse(spec) or spec.unreadable(self.kinds)) is not None:
            return reason
        try:
            self._kernel = self._kernel or Kernels(self._environment)
        except NotCompiled as error:
            return str(error)
        return None

    def _compiled(self) -> Kernels:
        """Raises `NoBackend`."""
        try:
            self._kernel = self._kernel or Kernels(self._environment)
        except NotCompiled as error:
            raise NoBackend("this step", {self.name: str(error)}) from error
        return self._kernel

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Prepared:
        return prepared(plan.layout, plan.segments, tables)

    def attend_latent(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        return self.attend(q, history, scoring, latent=True)

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring, *, latent: bool = False) -> Tensor:
        kernel, bound = self._kernel or self._compiled(), self._bound.get(history)
        if bound is None or bound.scoring is not scoring or bound.latent is not latent:
            bound = self._bound[history] = kernel.bound(history, scoring, latent=latent)
        rows = q[0]
        if rows.dtype not in TYPES or rows.stride(-1) != 1:
            rows = _known(rows)
        out = rows.new_empty(*rows.shape[:2], bound.value_size)  # [T,H,Dv]
        _fill(bound.call, history.step.prepared.step, rows, out)
        if kernel.attention.run(ctypes.byref(bound.call)):
            raise MemoryError(NO_MEMORY)
        return (out if out.dtype is q.dtype else out.to(q.dtype))[None]

    def native(
        self, history: LayerHistory, scoring: Scoring, q: Tensor, out: Tensor, *, latent: bool = False
    ) -> Native:
        """The call that `attend` makes, or `attend_latent`, for q [T,H,D] and out [T,H,Dv] at fixed addresses: both
        float32 or bfloat16, elements side by side. It is good for the open step, and for later ones."""
        kernel = self._compiled()
        bound, step = kernel.bound(history, scoring, latent=latent), history.step.prepared.step
        _fill(bound.call, step, q, out)
        return Native(address_of(kernel.attention.run), bound.call, (bound, step, q, out, kernel))

    def native_put(self, history: LayerHistory, k: Tensor, v: Tensor) -> Native:
        """The call that stores k [T,G,D] and v [T,G,Dv] of the rows that the step stores in their cells: both
        float32 or bfloat16 at fixed addresses, elements side by side. It is good for as long as that of `native`."""
        kernel, step = self._compiled(), history.step.prepared.step
        new = [
            _New(x.data_ptr(), *x.stride()[:2], x.shape[1], _plane(history.planes[name]))
            for name, x in (("k", k), ("v", v))
        ]
        call = _Put(step.data_ptr(), *new, TYPES[k.dtype])
        return Native(address_of(kernel.storing.run), call, (step, k, v, kernel))

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, step: GroupStep, scoring: Scoring) -> Tensor:
        kernel = self._compiled()
        rows, keys, values = _known(q), _known(k), _known(v)
        out = rows.new_empty(*rows.shape[:2], values.shape[2])  # [T,H,Dv]
        table, runs = _of_columns(step)
        sinks = _sinks(scoring)
        call = kernel.call(_dense_plane(keys), _dense_plane(values), keys.shape[1], scoring, sinks)
        _fill(call, table, rows, out)
        if kernel.attention.run(ctypes.byref(call)):
            raise MemoryError(NO_MEMORY)
        del runs  # and what else the call points to: it is over
        return out if out.dtype is q.dtype else out.to(q.dtype)


def _known(x: Tensor) -> Tensor:
    """The same in a type that the kernel reads, elements of a head side by side."""
    x = x if x.dtype in TYPES else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_plane(x: Tensor) -> Any:
    """Keys or values [N,G,D] as a plane whose cells are the columns of a step."""
    return _Plane(
        x.data_ptr(), None, x.stride(0) * x.itemsize, x.stride(1) * x.itemsize, 0, 0, x.shape[2], TYPES[x.dtype], 0
    )


def _of_columns(step: GroupStep) -> tuple[Tensor, Tensor]:
    """The table of a step (`Step`) whose runs are columns instead of cells, and these runs, which it points to."""
    prepared = step.prepared
    runs = prepared.runs.view(-1, 2).clone()  # first key and cell; where a segment's runs end, its end and 0
    # Cells of a run are columns side by side.
    runs[:, 1] = torch.searchsorted(step.columns.cells, runs[:, 1].contiguous())
    addresses = [table.data_ptr() for table in (prepared.segments, prepared.rows, runs)]
    return torch.tensor([*addresses, 0, 0, len(prepared.segments) // 4, 0], dtype=torch.int64, device="cpu"), runs
