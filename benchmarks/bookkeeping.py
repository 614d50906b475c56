"""bookkeeping: the time of `begin` and `commit` in a decoding step, by number of cells in use.

Runs on the meta device: cells, tables and plans are real, K/V are not.
"""

import statistics
import time
from functools import partial
from itertools import chain

import torch

from benchmarks.interleave import in_rounds
from benchmarks.networks import group
from benchmarks.row import Given, Lines
from benchmarks.zeros import put_zeros
from kvcellar.bench.network import SMALL, TINY, Size
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span

SEQUENCES = 32
MAX_GROWTH = 1.3  # from 10^4 to 10^6 cells


def bookkeeping(size: Size, in_use: list[int], *, steps: int = 64, rounds: int = 7) -> dict[int, float]:
    """Median milliseconds of a step of 32 sequences, by number of cells in use. Measured interleaved."""
    memories = [_filled(size, cells, spare=SEQUENCES * steps * (rounds + 1)) for cells in in_use]
    taken = in_rounds(rounds, *(partial(_steps, memory, steps) for memory in memories))
    return {cells: 1000 * statistics.median(chain(*of)) for cells, of in zip(in_use, taken, strict=True)}


def _filled(size: Size, in_use: int, spare: int) -> Memory:
    """A memory in which 32 sequences hold `in_use` cells, filled by chunks of all sequences in turn."""
    capacity = {"causal": 2 * in_use + spare}
    memory = Memory([group(size)], cells=capacity, dtype=torch.bfloat16, device="meta", backend=backends()[0])
    each = in_use // SEQUENCES
    chunk = max(1, each // 4)
    for start in range(0, each, chunk):
        for seq in range(SEQUENCES):
            put_zeros(memory, memory.begin(Batch((Feed(seq, Span(start, min(start + chunk, each))),))))
            memory.commit()
    return memory


def _steps(memory: Memory, steps: int) -> list[float]:
    return [_step(memory) for _ in range(steps)]


def _step(memory: Memory) -> float:
    """Seconds of a step of one token per sequence, without the forward."""
    batch = Batch(tuple(Feed(seq, Span(memory.length(seq), memory.length(seq) + 1)) for seq in range(SEQUENCES)))
    start = time.perf_counter()
    plan = memory.begin(batch)
    begun = time.perf_counter()
    put_zeros(memory, plan)
    put = time.perf_counter()
    memory.commit()
    return (begun - start) + (time.perf_counter() - put)


def row(given: Given) -> Lines:
    powers = (3, 4) if given.quick else (3, 4, 5, 6)
    found = bookkeeping(TINY if given.quick else SMALL, [10**n for n in powers])
    for cells, took in found.items():
        yield f"begin+commit  {took:7.3f} ms  {cells:,} cells in use by {SEQUENCES} sequences"
    if not given.quick:
        yield f"{'':14}{found[10**6] / found[10**4]:6.2f}x  from 10,000 to 1,000,000; target below {MAX_GROWTH}"
    return {str(cells): round(took, 4) for cells, took in found.items()}
