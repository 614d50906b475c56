"""revertible: the cost of steps that can be committed in part, and of forks, in networks with recurrent layers.

A step is measured plain, and revertible with all or a part of its tokens accepted, commit included. The variants are
interleaved on one memory, and each step is removed again.
"""

import random
import statistics
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from benchmarks.interleave import in_rounds
from benchmarks.networks import RECURRENT, hybrid
from benchmarks.row import Given, Lines
from kvcellar.bench import hf_baseline
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span

READ = 64  # tokens of each sequence before the step
NEW = 4  # tokens of each sequence in the step
WIDTHS = (8, 1)
MAX_REVERTIBLE = 1.05  # of a revertible step over a plain one


class Cost(NamedTuple):
    """Median milliseconds of a plain step, and the ratio of a revertible one with all or a part accepted."""

    plain: float
    all_kept: float
    part_kept: float


class Forked(NamedTuple):
    """Bytes of recurrent state allocated by a fork, by the first token after it, and by one state row."""

    at_once: int
    first_write: int
    row: int


def revertible(*, small: bool) -> dict[str, dict[int, Cost]]:
    """By kind of network and number of sequences in the step."""
    found: dict[str, dict[int, Cost]] = {}
    for kind in RECURRENT:
        guest = _guest(kind, small=small)
        found[kind] = {width: _cost(guest, width, rounds=2 if small else 40) for width in WIDTHS}
    return found


def forked(*, small: bool) -> dict[str, Forked]:
    """By kind of network."""
    return {kind: _forked(_guest(kind, small=small)) for kind in RECURRENT}


def _guest(kind: str, *, small: bool) -> Guest:
    size = {"hidden": 64, "layers": 4, "head": 16} if small else {"hidden": 512, "layers": 4, "head": 64}
    network = hf_baseline.network(hybrid(kind, **size), torch.bfloat16)
    pack(network)
    return build_guest(network, backends())


def _forked(guest: Guest) -> Forked:
    def memory_of(rows: int) -> Memory:
        return guest.memory({group.name: 2 * READ for group in guest.shape.groups}, rows=rows)

    row = memory_of(5).storage.bytes - memory_of(4).storage.bytes
    memory = memory_of(4)
    _step(guest, memory, [Feed(0, Span(0, READ))], {})
    free = [memory.rows.free or 0]
    memory.fork(0, 1, READ)
    free.append(memory.rows.free or 0)
    _step(guest, memory, [Feed(1, Span(READ, READ + 1))], {})
    free.append(memory.rows.free or 0)
    at_once, first_write = (row * (before - after) for before, after in pairwise(free))
    return Forked(at_once, first_write, row)


def _cost(guest: Guest, width: int, rounds: int) -> Cost:
    cells = {group.name: width * (READ + NEW) for group in guest.shape.groups}
    memory = guest.memory(cells, rows=3 * width)
    _step(guest, memory, [Feed(seq, Span(0, READ), keep_state=True) for seq in range(width)], {})
    draw = random.Random(0)

    def step(*, revertible: bool, in_part: bool) -> float:
        feeds = [Feed(seq, Span(READ, READ + NEW), revertible=revertible) for seq in range(width)]
        seconds = _step(guest, memory, feeds, {seq: draw.randint(1, NEW - 1) for seq in range(width) if in_part})
        for seq in range(width):
            memory.remove(seq, Span(READ, memory.length(seq)))
        return seconds

    kinds = ((False, False), (True, False), (True, True))
    plain, whole, parts = in_rounds(rounds, *(partial(step, revertible=r, in_part=p) for r, p in kinds))
    return Cost(1000 * statistics.median(plain), _times(whole, plain), _times(parts, plain))


def _times(one: list[float], other: list[float]) -> float:
    """The median ratio of both, round by round: load on the machine affects both times of a round."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _step(guest: Guest, memory: Memory, feeds: list[Feed], accepted: Mapping[int, int]) -> float:
    """Seconds of a step."""
    ids = torch.tensor([3 + (7 * feed.seq + pos) % 90 for feed in feeds for pos in range(feed.pos.start, feed.pos.end)])
    start = time.perf_counter()
    plan = memory.begin(Batch(tuple(feeds)))
    guest.forward(memory, plan, ids, torch.arange(len(ids)))
    memory.commit(accepted)
    return time.perf_counter() - start


def row(given: Given) -> Lines:
    costs, forks = revertible(small=given.quick), forked(small=given.quick)
    for kind, by_width in costs.items():
        for width, cost in by_width.items():
            yield (
                f"revertible    {cost.all_kept:6.2f}x  if all tokens are accepted, {cost.part_kept:.2f}x if a part is, "
                f"of {width} x {NEW} tokens of {kind}; target {MAX_REVERTIBLE}x"
            )
    for kind, fork in forks.items():
        yield (
            f"fork          {fork.at_once:6} bytes of state of {kind}, and {fork.first_write} with its first token; "
            f"one state row has {fork.row}"
        )
    by_kind = {kind: {str(n): cost._asdict() for n, cost in by_width.items()} for kind, by_width in costs.items()}
    return {"steps": by_kind, "forks": {kind: fork._asdict() for kind, fork in forks.items()}}
