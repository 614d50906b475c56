"""A memory of quantised K/V against lists: random timelines in which each cell holds what its token went through.

The dumb model keeps, for each token of each sequence, the vectors that reading it should answer: rounded once when it
was written, and once more each time its key was turned. Shared cells, moved cells and cells that a compaction copied
have to answer them, bit for bit where nothing is rotated before it is quantised, else within one step of the scale.
"""

from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from kvcellar.attention.reference import Reference
from kvcellar.cache.layouts import Causal, Sliding
from kvcellar.cache.memory import Group, Memory
from kvcellar.cache.pool import Pool
from kvcellar.cache.quantise import LARGEST, dequantise, hadamard, quantise, rotate
from kvcellar.cache.turn import turn
from kvcellar.contracts import Arrangement, Plane, Rotation, Storage, StoredAs
from kvcellar.errors import CacheFull
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span

SEQS = st.integers(0, 3)
HEADS, SIZE = 2, 20
ROTATION = Rotation((1.0, 0.3, 0.01), start=2)
WAYS = ("fp8", "int8", "int4", "k=int4+hadamard,v=fp8", "k=int8+hadamard,v=float16", "k=bfloat16,v=int4", "auto")
LAYERS = {"full": 0, "window": 3}


def rounded(x: Tensor, storage: Storage | None) -> Tensor:
    """What reading answers of a vector [n,heads,size] that was written."""
    if storage is None:
        return x
    if not storage.quantised:
        return x.to({"bfloat16": torch.bfloat16, "float16": torch.float16}[storage.kind]).float()
    codes, scales = quantise(rotate(x) if storage.hadamard else x, storage.kind)
    values = dequantise(codes, scales, storage.kind, SIZE)
    return values @ hadamard(SIZE, torch.device("cpu")) if storage.hadamard else values


@dataclass
class Line:
    """What a sequence should read, by position: one [2,heads,size] of its key and its value for each layer."""

    tokens: list[dict[str, Tensor]] = field(default_factory=list)

    def copy(self, upto: int) -> "Line":
        return Line([dict(token) for token in self.tokens[:upto]])


class Timeline(RuleBasedStateMachine):
    way = "int8"
    memory: Memory

    @initialize(
        arrangement=st.sampled_from(["token", "head", "transposed"]),
        padding=st.sampled_from([1, 8]),
    )
    def start(self, arrangement: Arrangement, padding: int) -> None:
        self.stored = StoredAs.parse(self.way)
        backend = type("Wishes", (Reference,), {"arrangement": arrangement, "padding": padding})()
        planes = (Plane("k", HEADS, SIZE, self.stored.k), Plane("v", HEADS, SIZE, self.stored.v))
        groups = [
            Group(name, layout, planes, (layer,), rotations={layer: {"k": ROTATION}}, no_shift=None)
            for (name, layer), layout in zip(LAYERS.items(), (Causal(), Sliding(5, 12)), strict=True)
        ]
        self.memory = Memory(
            groups, cells={"full": 60, "window": 50}, dtype=torch.float32, device="cpu", backend=backend
        )
        self.lines: dict[int, Line] = {}
        self.drawn = torch.Generator().manual_seed(0)
        self.step({0: 8, 1: 3}, "c")
        self.step({0: 5, 2: 8}, "c")

    def _known(self, seq: int) -> int:
        """A sequence that is there."""
        return sorted(self.lines)[seq % len(self.lines)]

    def _fresh(self) -> Tensor:
        """Key and value [2,heads,size] of a new token, some far larger than others."""
        x = torch.randn(2, HEADS, SIZE, generator=self.drawn)
        x[..., 3] *= 8
        return x * 10 ** (2 * torch.rand(2, HEADS, 1, generator=self.drawn))

    @rule(feeds=st.dictionaries(SEQS, st.integers(1, 8), min_size=1, max_size=3), ends=st.sampled_from("cccab"))
    def step(self, feeds: dict[int, int], ends: str) -> None:
        starts = {seq: self.memory.length(seq) for seq in feeds}
        batch = Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items()))
        try:
            self.memory.begin(batch)
        except CacheFull:
            return
        new = {name: torch.stack([self._fresh() for _ in range(batch.tokens)]) for name in LAYERS}
        for name, layer in LAYERS.items():
            self.memory.put(layer, new[name][:, 0], new[name][:, 1])
        if ends == "a":
            self.memory.abandon()
            return
        kept = {seq: n if ends == "c" else n // 2 for seq, n in feeds.items()}
        self.memory.commit(kept)
        read = {
            name: torch.stack([rounded(x[:, 0], self.stored.k), rounded(x[:, 1], self.stored.v)], 1)
            for name, x in new.items()
        }
        row = 0
        for seq, n in feeds.items():
            line = self.lines.setdefault(seq, Line())
            line.tokens += [{name: x[row + i] for name, x in read.items()} for i in range(kept[seq])]
            row += n

    @precondition(lambda self: self.lines)
    @rule(src=SEQS, dst=SEQS, upto=st.integers(0, 40))
    def fork(self, src: int, dst: int, upto: int) -> None:
        src = self._known(src)
        if src != dst:
            self.lines[dst] = self.lines[src].copy(self.memory.fork(src, dst, upto))

    @precondition(lambda self: self.lines)
    @rule(seq=SEQS, back=st.integers(0, 20), length=st.integers(1, 6), breaks=st.sampled_from([False, False, True]))
    def remove(self, seq: int, back: int, length: int, breaks: bool) -> None:
        seq = self._known(seq)
        start = max(0, self.memory.length(seq) - back)
        line, end = self.lines[seq], self.memory.length(seq)
        if breaks and start + length < end:
            with mock.patch.object(Pool, "move", side_effect=MemoryError):
                try:
                    assert self.memory.remove(seq, Span(start, start + length)) < end - length
                except (MemoryError, CacheFull):
                    return  # and `reads_right` sees that nothing has changed
        try:
            kept = self.memory.remove(seq, Span(start, start + length))
        except CacheFull:
            return
        if start + length >= end:
            del line.tokens[self.memory.length(seq) :]
        elif kept == end - length:
            del line.tokens[start : start + length]
            for token in line.tokens[start:]:
                for name, x in token.items():
                    turned = turn(x[None, 0], ROTATION, -length)
                    token[name] = torch.stack([rounded(turned, self.stored.k)[0], x[1]])

    @precondition(lambda self: len(self.lines) > 1)
    @rule(seq=SEQS)
    def drop(self, seq: int) -> None:
        seq = self._known(seq)
        self.memory.drop(seq)
        del self.lines[seq]

    @rule(budget=st.integers(1, 30))
    def compact(self, budget: int) -> None:
        self.memory.compact(budget)

    @rule(name=st.sampled_from(sorted(LAYERS)), cells=st.integers(40, 80))
    def resize(self, name: str, cells: int) -> None:
        if cells >= self.memory.capacity()[name]:
            self.memory.resize(name, cells)

    @invariant()
    def reads_right(self) -> None:
        self.memory.check()
        for index, (name, layer) in enumerate(LAYERS.items()):
            for seq, line in self.lines.items():
                assert self.memory.length(seq) == len(line.tokens)
                first, runs = self.memory.held(seq)[name].start, self.memory._tables[seq][index].runs
                if not runs:
                    continue
                cells = torch.cat([torch.arange(run.cell, run.end) for run in runs])
                expected = torch.stack([token[name] for token in line.tokens[first:]])
                pool = self.memory._held[index].pool
                for at, (plane, storage) in enumerate((("k", self.stored.k), ("v", self.stored.v))):
                    self._same(pool.read(layer, plane, cells).float(), expected[:, at], storage)

    @staticmethod
    def _same(read: Tensor, expected: Tensor, storage: Storage | None) -> None:
        if storage is None or not storage.hadamard:
            assert torch.equal(read, expected)
            return
        step = rotate(expected).abs().amax(-1) / LARGEST[storage.kind]
        assert ((rotate(read) - rotate(expected)).abs().amax(-1) <= 1.01 * step + 1e-6).all()


@pytest.mark.parametrize("way", WAYS)
def test_every_cell_reads_as_its_token_went_through(way):
    machine = type("Timeline", (Timeline,), {"way": way})
    few = max(1, settings.default.max_examples // 4)
    run_state_machine_as_test(
        machine, settings=settings(derandomize=True, deadline=None, max_examples=few, stateful_step_count=25)
    )


def test_the_timeline_would_notice_a_key_that_was_turned_the_wrong_way():
    timeline = Timeline()
    timeline.start("head", 1)
    with mock.patch("kvcellar.cache.pool.turn", side_effect=lambda x, rotation, by: turn(x, rotation, -by)):
        timeline.remove(0, 8, 1, False)
    with pytest.raises(AssertionError):
        timeline.reads_right()
