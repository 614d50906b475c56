"""attention: the CPU time of one layer's attention by `cpu` and by `sdpa`, interleaved, over prompts, reused prefixes,
drafts, decoding, and quantised storage. Codes are compared with the plain storage of the same backend.
"""

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.interleave import in_rounds
from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, Size
from kvcellar.memory.attention.choose import named
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec, Plane, Scoring, StoredAs
from kvcellar.memory.spans import Span

RAGGED = (128, 200, 700, 1000, 1500, 2000, 3000, 4096)


class Case(NamedTuple):
    """Sequences of these lengths, each of which gets so many tokens."""

    lengths: tuple[int, ...]
    tokens: int
    stored: str = "auto"


class Took(NamedTuple):
    """Medians of CPU milliseconds, and of the ratios of `sdpa` to `cpu`, round by round."""

    cpu_ms: float
    sdpa_ms: float
    ratio: float


CASES: Mapping[str, Case] = {
    "prompt 512": Case((0,), 512),
    "prompt 2048": Case((0,), 2048),
    "4096 + 32": Case((4096,), 32),
    "4096 + 128": Case((4096,), 128),
    "8 x 4 drafts": Case(RAGGED, 4),
    "8 ragged": Case(RAGGED, 1),
    **{f"decode 4096, {stored}": Case((4096,), 1, stored) for stored in ("auto", "int8", "int4")},
}
TINY_CASES: Mapping[str, Case] = {"prompt 20": Case((0,), 20), "decode 30, int8": Case((30, 9), 1, "int8")}


def attention(size: Size, cases: Mapping[str, Case], *, rounds: int = 20) -> dict[str, Took]:
    """By case; empty if `cpu` is not compiled here. In bfloat16, with the heads of a network of this size."""
    backends = [named(name)[0] for name in ("cpu", "sdpa")]
    heads = (size.query_heads, size.kv_heads, size.head_size, size.head_size)
    if backends[0].refuse(AttentionSpec(*heads, dtype="bfloat16", device="cpu")) is not None:
        return {}
    found: dict[str, Took] = {}
    for name, case in cases.items():
        ours, theirs = in_rounds(rounds, *(_layer(size, case, backend) for backend in backends))
        ratio = statistics.median(b / max(a, 1e-9) for a, b in zip(ours, theirs, strict=True))
        found[name] = Took(statistics.median(ours), statistics.median(theirs), ratio)
    return found


def _layer(size: Size, case: Case, backend: Backend) -> "partial[float]":
    """The attention of an open step."""
    way = StoredAs.parse(case.stored)
    planes = tuple(Plane(name, size.kv_heads, size.head_size, way.of(name)) for name in ("k", "v"))
    cells = sum(case.lengths) + len(case.lengths) * case.tokens
    group = Group("g", Causal(), planes, (0,))
    memory = Memory([group], cells={"g": cells}, dtype=torch.bfloat16, device="cpu", backend=backend)
    for seq, length in enumerate(case.lengths):
        if length:
            _begin(memory, size, Batch((Feed(seq, Span(0, length)),)))
            memory.commit()
    feeds = tuple(Feed(seq, Span(length, length + case.tokens)) for seq, length in enumerate(case.lengths))
    _begin(memory, size, Batch(feeds))
    q = torch.randn(len(feeds) * case.tokens, size.query_heads, size.head_size).bfloat16()
    return partial(_milliseconds, memory, q, Scoring(size.head_size**-0.5))


def _begin(memory: Memory, size: Size, batch: Batch) -> None:
    memory.begin(batch)
    new = torch.randn(2, batch.tokens, size.kv_heads, size.head_size).bfloat16()
    memory.put(0, new[0], new[1])


def _milliseconds(memory: Memory, q: torch.Tensor, scoring: Scoring) -> float:
    start = time.process_time_ns()
    memory.attend(0, q, scoring)
    return (time.process_time_ns() - start) / 1e6


def row(given: Given) -> Lines:
    found = attention(TINY, TINY_CASES, rounds=2) if given.quick else attention(SMALL, CASES)
    for name, one in found.items():
        yield f"attention {name:18} cpu {one.cpu_ms:8.3f} ms   sdpa {one.sdpa_ms:8.3f} ms   {one.ratio:5.2f}x"
    return {name: one._asdict() for name, one in found.items()}
