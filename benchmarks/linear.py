"""linear: the time of all linear layers of a step, ours against oneDNN's packed form, and on several threads.

The layers of the network are multiplied one after the other, so that weights come from memory, as in a step. Those with
the same input are merged into one. Both sides take turns.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.interleave import in_rounds
from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, Size
from kvcellar.kernels.arena import Arena
from kvcellar.kernels.layers import OwnLinear, PanelKernel, PanelLinear, panel_bytes, panel_linear
from kvcellar.kernels.packed import ROWS, PackedLinear

Layer = OwnLinear | PackedLinear
COUNTS = (1, 8, 32, 512)  # rows
DTYPES = (torch.bfloat16, torch.float32)


class Products(NamedTuple):
    """Milliseconds of all linear layers of a step, the medians."""

    own: float  # CPU time, on one thread
    onednn: float | None  # the same; None where oneDNN does not multiply this type
    ratio: float | None  # median of oneDNN's over ours, round by round
    gigabytes: float  # of weights that ours read in a second
    threads: float  # wall time of ours on one thread over that on all, median, round by round


def products(size: Size, *, threads: int = 1, rounds: int = 10) -> dict[str, dict[int, Products]]:
    """By name of the type, and number of rows. Raises `NotCompiled` without a compiler."""
    kernel = PanelKernel(os.environ)
    return {str(dtype).removeprefix("torch."): _of_type(kernel, size, dtype, threads, rounds) for dtype in DTYPES}


def _of_type(kernel: PanelKernel, size: Size, dtype: torch.dtype, threads: int, rounds: int) -> dict[int, Products]:
    weights = [torch.randn(shape).to(dtype) for shape in shapes(size)]
    arena = Arena(sum(map(panel_bytes, weights)))
    own = [panel_linear(kernel, arena, weight, None) for weight in weights]
    onednn: list[Layer] = []
    if dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = ((torch.ops.mkldnn._reorder_linear_weight(weight, ROWS), weight.shape) for weight in weights)
        onednn = [PackedLinear(one, None, *shape[::-1]) for one, shape in packed]
    read = sum(weight.nbytes for weight in weights)
    del weights
    gc.collect()
    return {count: _at(own, onednn, count, read, threads, rounds if count < 100 else 3) for count in COUNTS}


def shapes(size: Size) -> list[tuple[int, int]]:
    """[out,in] of the layers of a step, in order."""
    heads = (size.query_heads + 2 * size.kv_heads) * size.head_size
    layer = [(heads, size.hidden), (size.hidden, size.query_heads * size.head_size)]
    layer += [(2 * size.intermediate, size.hidden), (size.hidden, size.intermediate)]
    return [*(size.layers * layer), (size.vocabulary, size.hidden)]


def _at(
    own: Sequence[PanelLinear], onednn: Sequence[Layer], rows: int, read: int, threads: int, rounds: int
) -> Products:
    inputs = [torch.randn(rows, layer.in_features).to(layer.dtype) for layer in own]
    sides = [partial(spent_alone, side, inputs) for side in (own, onednn) if side]
    ours, *others = in_rounds(rounds, *sides)
    walls = [partial(_spent, time.perf_counter, count, own, inputs) for count in (1, threads)]
    one, all_ = in_rounds(rounds, *walls) if threads > 1 else ([1.0], [1.0])
    median = statistics.median(ours)
    return Products(
        median,
        statistics.median(others[0]) if others else None,
        statistics.median(b / max(a, 1e-9) for a, b in zip(ours, others[0], strict=True)) if others else None,
        read / max(median, 1e-9) / 1e6,
        statistics.median(a / max(b, 1e-9) for a, b in zip(one, all_, strict=True)),
    )


def spent_alone(layers: Sequence[Layer], inputs: Sequence[Tensor]) -> float:
    """Milliseconds of CPU time on one thread."""
    return _spent(time.thread_time, 1, layers, inputs)


@torch.inference_mode()
def _spent(clock: Callable[[], float], threads: int, layers: Sequence[Layer], inputs: Sequence[Tensor]) -> float:
    """Milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        since = clock()
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
        return 1e3 * (clock() - since)
    finally:
        torch.set_num_threads(before)


def _line(dtype: str, rows: int, one: Products, threads: int) -> str:
    line = f"{dtype:9} {rows:4} row(s) {one.own:8.2f} ms, {one.gigabytes:5.1f} GB/s"
    if one.onednn is not None:
        line += f", oneDNN {one.onednn:8.2f} ms: {one.ratio:.2f}x"
    return line + (f"; {threads} threads {one.threads:.2f}x" if threads > 1 else "")


def row(given: Given) -> Lines:
    threads = given.threads
    found = products(TINY, threads=threads, rounds=2) if given.quick else products(SMALL, threads=threads)
    for dtype, by_rows in found.items():
        yield from (_line(dtype, rows, one, threads) for rows, one in by_rows.items())
    return {dtype: {rows: one._asdict() for rows, one in by_rows.items()} for dtype, by_rows in found.items()}
