"""fragmented: the time of attention on fragmented memory, before and after compaction.

Two memories are brought into the same state: filled with many short sequences, which are dropped in random order while
a few long ones grow into the freed cells. One of the two is then compacted as an idle engine does it. The attention of
a decoding step is measured on both, interleaved.
"""

import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.interleave import in_rounds
from benchmarks.networks import group
from benchmarks.row import Given, Lines, settled
from benchmarks.zeros import put_zeros
from kvcellar.bench.network import SMALL, TINY, Size
from kvcellar.engine.core.compaction import Compaction
from kvcellar.memory.attention.choose import named
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec, Scoring
from kvcellar.memory.spans import Span

GROUP = "causal"
SEQUENCES, TOKENS = 8, 1024  # long sequences, and tokens of each
SHORT = (4, 9, 17, 30)  # tokens of short sequences


class Compacted(NamedTuple):
    """CPU milliseconds of one backend's attention in all layers of a step, and the cost of compaction."""

    before: float
    after: float
    ratio: float  # median of before over after, round by round
    runs_before: int
    runs_after: int
    cells: int  # of all sequences
    moved: int
    piece_ms: float  # CPU milliseconds of the longest piece, the longest that a new request waits


def fragmented(
    size: Size, *, sequences: int = SEQUENCES, tokens: int = TOKENS, rounds: int = 30
) -> dict[str, Compacted]:
    """By name of the backend, for backends that support such a network in bfloat16."""
    heads = (size.query_heads, size.kv_heads, size.head_size, size.head_size)
    spec = AttentionSpec(*heads, dtype="bfloat16", device="cpu")
    found: dict[str, Compacted] = {}
    for name in ("cpu", "sdpa"):
        (backend,) = named(name)
        if backend.refuse(spec) is None:
            found[name] = _measured(size, backend, sequences, tokens, rounds)
    return found


@torch.inference_mode()
def _measured(size: Size, backend: Backend, sequences: int, tokens: int, rounds: int) -> Compacted:
    scattered, tidy = (_used(size, backend, sequences, tokens) for _ in range(2))
    before = scattered.storage.fragments()[GROUP]
    moved, piece_ms = _compact(tidy)
    took = in_rounds(rounds, partial(_attention, scattered, size), partial(_attention, tidy, size))
    return Compacted(
        before=statistics.median(took[0]),
        after=statistics.median(took[1]),
        ratio=statistics.median(a / b for a, b in zip(*took, strict=True)),
        runs_before=before.runs,
        runs_after=tidy.storage.fragments()[GROUP].runs,
        cells=before.cells,
        moved=moved,
        piece_ms=piece_ms,
    )


def _used(size: Size, backend: Backend, sequences: int, tokens: int) -> Memory:
    """A fragmented memory with an eighth of its cells free; the others contain zeros."""
    cells = {GROUP: sequences * tokens * 8 // 7}
    memory = Memory([group(size)], cells=cells, dtype=torch.bfloat16, device="cpu", backend=backend)
    draw, short = random.Random(1), list(range(sequences, sequences + cells[GROUP]))
    for seq in short:
        n = min(draw.choice(SHORT), memory.free()[GROUP])
        if not n:
            break
        _grow(memory, [seq], n)
    there = [seq for seq in short if memory.has(seq)]
    draw.shuffle(there)
    for _ in range(tokens):
        while memory.free()[GROUP] < sequences:
            memory.drop(there.pop())
        _grow(memory, range(sequences), 1)
    for seq in there:
        memory.drop(seq)
    return memory


def _grow(memory: Memory, seqs: Sequence[int], tokens: int) -> None:
    feeds = (Feed(seq, Span(memory.length(seq), memory.length(seq) + tokens)) for seq in seqs)
    put_zeros(memory, memory.begin(Batch(tuple(feeds))))
    memory.commit()


def _compact(memory: Memory) -> tuple[int, float]:
    """Cells moved, and CPU milliseconds of the longest piece."""
    compaction, longest, more = Compaction(memory.storage), 0.0, True
    with settled():
        while more:
            start = time.process_time()
            more = compaction.compact_some()
            longest = max(longest, 1000 * (time.process_time() - start))
    return compaction.moved, longest


def _attention(memory: Memory, size: Size) -> float:
    """CPU milliseconds of attention in all layers of a step of one token for each sequence."""
    q = torch.ones(len(memory.sequences), size.query_heads, size.head_size, dtype=torch.bfloat16)  # [T,H,D]
    scoring = Scoring(size.head_size**-0.5)
    lengths = {seq: memory.length(seq) for seq in memory.sequences}
    memory.begin(Batch(tuple(Feed(seq, Span(end, end + 1)) for seq, end in lengths.items())))
    start = time.process_time()
    for layer in range(size.layers):
        memory.attend(layer, q, scoring)
    took = 1000 * (time.process_time() - start)
    memory.abandon()
    return took


def row(given: Given) -> Lines:
    found = fragmented(TINY, sequences=4, tokens=128, rounds=2) if given.quick else fragmented(SMALL)
    for name, one in found.items():
        yield (
            f"fragmented    {one.ratio:6.2f}x  {name}: {one.before:.2f} ms before and {one.after:.2f} ms after "
            f"compaction; {one.cells} cells in {one.runs_before} runs, then in {one.runs_after}; {one.moved} moved, "
            f"{one.piece_ms:.1f} ms the longest piece"
        )
    return {name: one._asdict() for name, one in found.items()}
