"""graphs: decoding steps as CUDA graphs. The operators of a program are launched once for each shape of a step, and
later steps of that shape replay the launches with one call.

A step is padded to a shape with few others: ids, positions, wanted rows and cells are tables at fixed addresses, whose
rest is zero, so rows behind the last one are token 0 at position 0, are written to the null cell, and are seen by no
row. Attention reads tables at fixed addresses, too (`memory/attention/blocks.py`).

Always true:
  * a graph is replayed only in steps of the memory that it was captured on, with the same addresses and sizes, and
    only if its logits were those of the same operators launched one by one, bit for bit, on the step of its capture;
  * where a capture fails, no step is replayed from then on, and `refuse` returns the reason.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvcellar.engine.models.guest import MODEL_ERRORS
from kvcellar.engine.recording.recording import Executor, RecordedStep, Results, reason_of
from kvcellar.engine.recording.replay import Replay
from kvcellar.memory.attention.blocks import FEW, Prepared, power_of_two
from kvcellar.memory.kv.history import GroupStep
from kvcellar.memory.memory import Memory

ROWS = (1, 2, 4, 8, *range(16, 257, 8))  # numbers of rows that steps are padded to
MOST = 96  # graphs that are kept

Key = tuple[Any, ...]


class Graph(Protocol):
    """Launches that were recorded."""

    def replay(self) -> None: ...


RecordGraph = Callable[[Callable[[], None]], Graph]  # records the launches of a function, without running them


class CudaGraphs:
    """Records CUDA graphs, which share their memory: their results are copied before another one is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # torch's own is one for all devices and threads

    def __call__(self, run: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream()),  # else the other one stays current where a capture fails
            # thread_local: threads that move snapshots go on.
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            run()
        return graph


class _Kept(NamedTuple):
    """A graph and where it leaves its results."""

    graph: Graph
    results: Results


class Graphs(Executor):
    """Runs one program."""

    name = "CUDA graphs"

    def __init__(self, replay: Replay, record: RecordGraph) -> None:
        self.never = _never(replay)  # the reason why no step is replayed
        self.captured = 0  # graphs, those included that are not kept
        self._replay, self._record = replay, record
        layers = [op.args[2] for op in replay.program.ops if op.name == "kvcellar.put"]
        self._layers = [layer for layer in layers if isinstance(layer, int)]
        self._written = {(layer, plane) for layer in self._layers for plane in ("k", "v")}
        self._seconds = 0.0
        self._graphs: dict[Key, _Kept | None] = {}  # by shape, the last used at the end; None: it was seen once
        self._memories: WeakKeyDictionary[Memory, int] = WeakKeyDictionary()
        self._numbers = count()  # of memories
        self._buffers: dict[Key, Tensor] = {}  # of results, by name and shape

    @property
    def seconds(self) -> float:
        return self._seconds

    def clear(self) -> None:
        self._graphs.clear()
        self._buffers.clear()

    def refuse(self, step: RecordedStep) -> str | None:
        if self.never is not None:
            return self.never
        if len(step.ids) > ROWS[-1]:
            return f"more than {ROWS[-1]} rows"
        if max(len(feed.pos) for feed in step.plan.feeds) > FEW:
            return "prompts"
        if step.door.adapted is not None:
            return "adapters"
        if step.plan.stored < step.plan.tokens:
            return "query-only rows"
        others = {layer.backend.name for layer in self._histories(step) if not _is_fixed(layer.step.prepared)}
        return f"attention by {', '.join(sorted(others))}" if others else None

    def run(self, step: RecordedStep) -> Results:
        padded = _padded(step)
        key = self._key(padded)
        measured = step.memory.step is not None and step.memory.step.reserved
        if key not in self._graphs or measured:  # shapes that come once are not worth a graph
            self._keep(key, None)
            return self._replay.run(step)
        kept = self._graphs[key]
        if kept is None:
            results, kept = self._capture(step, padded)
            if kept is not None:
                self._keep(key, kept)
            return results
        self._keep(key, kept)
        kept.graph.replay()
        self._steps(step)[0].written.update(self._written)
        return _of(kept.results, step)

    def _capture(self, step: RecordedStep, padded: RecordedStep) -> tuple[Results, _Kept | None]:
        """The results of the step, and its graph."""
        steps = self._steps(step)
        with _padded_cells(steps, len(step.ids), len(padded.ids)):
            expected = self._replay.run(padded)
            began = time.perf_counter()
            results = Results(
                self._buffer("logits", expected.logits),
                None if expected.hidden is None else self._buffer("hidden", expected.hidden),
            )

            def run() -> None:
                made = self._replay.run(padded)
                results.logits.copy_(made.logits)
                if results.hidden is not None and made.hidden is not None:
                    results.hidden.copy_(made.hidden)

            graph = None
            try:
                steps[0].written -= self._written
                graph = self._record(run)
                graph.replay()
            except MODEL_ERRORS as error:
                self.never = f"a step could not be captured: {reason_of(_first(error))}"
            steps[0].written |= self._written
        wanted = _of(expected, step)
        same = graph is not None and self.never is None and torch.equal(results.logits, expected.logits)
        self._seconds += time.perf_counter() - began
        if graph is not None and same:
            self.captured += 1
            return wanted, _Kept(graph, results)
        self.never = self.never or "a captured step had other logits than its operators"
        self._graphs.clear()
        return wanted, None

    def _keep(self, key: Key, kept: _Kept | None) -> None:
        self._graphs.pop(key, None)
        self._graphs[key] = kept
        while len(self._graphs) > MOST:
            del self._graphs[next(iter(self._graphs))]

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Memory for results [n,width], shared by graphs, in buckets of powers of two."""
        key = (name, power_of_two(len(like)), like.shape[1], like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(key[1], key[2])
        return self._buffers[key][: len(like)]

    def _histories(self, step: RecordedStep) -> Iterator[Any]:
        return map(step.door.history, self._layers)

    def _steps(self, step: RecordedStep) -> list[GroupStep]:
        return list({id(layer.step): layer.step for layer in self._histories(step)}.values())

    def _key(self, padded: RecordedStep) -> Key:
        """All that launches depend on, beside what tables and planes contain. The planes of a memory stay where they
        are; those of another one may later have the same addresses, and other sizes."""
        memory = padded.memory
        if (number := self._memories.get(memory)) is None:
            number = self._memories[memory] = next(self._numbers)
        tables = [tensor.data_ptr() for tensor in (padded.ids, padded.positions, padded.wanted)]
        cells = [(one.cells.data_ptr(), one.prepared.key) for one in self._steps(padded)]
        return (number, len(padded.ids), len(padded.wanted), *tables, *cells)


def _first(error: Exception) -> Exception:
    """The error because of which a capture failed: ending a capture that has failed raises another one."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return error


def _never(replay: Replay) -> str | None:
    """The reason why no step of a program can be replayed."""
    names = {op.name for op in replay.program.ops}
    if names & {"kvcellar.mix", "kvcellar.states"}:
        return "layers with a recurrent state are not captured"
    if "kvcellar.dense" in names:
        return "keys that are computed from stored planes (MLA) have no fixed number"
    return None


def _is_fixed(prepared: Any) -> bool:
    """Whether launches of attention depend on a key only."""
    return isinstance(prepared, Prepared)


def _padded(step: RecordedStep) -> RecordedStep:
    """The step with as many rows, and wanted rows, as its graph has."""
    tables = step.memory.tables

    def more(name: str, tensor: Tensor) -> Tensor:
        n = next(rows for rows in ROWS if rows >= len(tensor))
        wide = tables.empty(name, (n,), torch.int64)
        assert not len(tensor) or wide.data_ptr() == tensor.data_ptr(), (
            "a bucket of a table has the same address for all its lengths"
        )
        return wide

    return replace(
        step,
        ids=more("ids", step.ids),
        positions=more("positions", step.positions),
        wanted=more("wanted rows", step.wanted),
    )


@contextmanager
def _padded_cells(steps: Sequence[GroupStep], rows: int, padded: int) -> Iterator[None]:
    """Within the block, rows behind the last one are written to the null cell."""
    before = [one.cells for one in steps]
    for one in steps:
        if len(one.cells) == rows:  # an input's cells are not written in a step
            one.cells = one.tables.empty("cells", (padded,), torch.int64)
    try:
        yield
    finally:
        for one, cells in zip(steps, before, strict=True):
            one.cells = cells


def _of(results: Results, step: RecordedStep) -> Results:
    """Those of the step's own rows, copied."""
    hidden = None if results.hidden is None else results.hidden[: len(step.ids)].clone()
    return Results(results.logits[: len(step.wanted)].clone(), hidden)
