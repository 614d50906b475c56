"""The memory against a dumb model: random timelines on every layout, with every cell saying whose it is.

After each operation `check()` holds, and what the memory says of itself is what the dumb model knows. In each step
every row sees exactly the tokens that its layout's rule names, in every layer, whichever way one reads. What raises
changes nothing.
"""

from collections.abc import Mapping
from contextlib import suppress
from itertools import count, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.attention.reference import attend_dense
from kvcellar.cache.memory import Memory
from kvcellar.cache.pool import AXES, Pool
from kvcellar.contracts import Arrangement, Scoring
from kvcellar.errors import BadRequest, CacheFull, NotSupported, UnknownSequence, WrongStage
from kvcellar.plan import Batch, Feed, GroupPlan, Plan, Run
from kvcellar.spans import Span
from tests.laws import identity
from tests.laws.dumb import Dumb, Member, causal, chunked, member, shifting, sliding
from tests.laws.watch import Brittle, nothing_changes, stored

SEQS = st.integers(0, 4)
NUMBERS = st.integers(0, 999)  # taken modulo whatever there is to choose from
COUNTS = st.one_of(st.integers(1, 3), st.integers(1, 12))
FEEDS = st.dictionaries(SEQS, COUNTS, min_size=1, max_size=4)
ACCEPTED = st.dictionaries(SEQS, st.integers(0, 4), min_size=1)
ENDS = st.one_of(st.just("commit"), st.just("commit"), ACCEPTED, st.just("abandon"))


class Timeline(RuleBasedStateMachine):
    """One memory, and the dumb model beside it."""

    members: tuple[Member, ...] = ()
    memory: Memory
    dumb: Dumb

    @initialize(
        cells=st.lists(st.integers(12, 70), min_size=4, max_size=4),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        arrangement=st.sampled_from(sorted(AXES)),
        padding=st.sampled_from([1, 8]),
    )
    def start(self, cells: list[int], dtype: torch.dtype, arrangement: Arrangement, padding: int) -> None:
        names = [m.group.name for m in self.members]
        self.backend = Brittle(arrangement, padding)
        self.memory = Memory(
            [m.group for m in self.members],
            cells=dict(zip(names, cells, strict=False)),
            dtype=dtype,
            device="cpu",
            backend=self.backend,
        )
        self.dumb = Dumb(self.members)

    # -- steps ----------------------------------------------------------------------------------------------------

    @rule(feeds=FEEDS, end=ENDS)
    def some_tokens(self, feeds: Mapping[int, int], end: str | Mapping[int, int]) -> None:
        self._step(feeds, end)

    @rule(seq=SEQS, number=st.integers(8, 24))
    def one_prompt(self, seq: int, number: int) -> None:
        self._step({seq: number}, "commit")

    @precondition(lambda self: self.dumb.lines)
    @rule(steps=st.integers(1, 5), end=ENDS)
    def one_token_each(self, steps: int, end: str | Mapping[int, int]) -> None:
        for _ in range(steps):
            self._step(dict.fromkeys(self.dumb.lines, 1), end)

    def _step(self, feeds: Mapping[int, int], end: str | Mapping[int, int]) -> None:
        if self._begin(feeds):
            self._end(end)

    def _begin(self, feeds: Mapping[int, int]) -> bool:
        """Whether there was room."""
        batch, free = self._batch(feeds), self.memory.free()
        short = [name for name in free if free[name] < batch.tokens]
        if short:
            with pytest.raises(CacheFull) as full, nothing_changes(self.memory):
                self.memory.begin(batch)
            assert (full.value.group, full.value.need, full.value.free) == (short[0], batch.tokens, free[short[0]])
            return False
        plan = self.memory.begin(batch)
        self.dumb.begin(feeds)
        for layer in self._layers():
            self.memory.put(layer, *self._new(layer))
        self._look(plan)
        return True

    def _batch(self, feeds: Mapping[int, int]) -> Batch:
        starts = {seq: self.dumb.length(seq) for seq in feeds}
        return Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + number)) for seq, number in feeds.items()))

    def _end(self, end: str | Mapping[int, int]) -> None:
        pending = self.dumb.pending or {}
        if end == "abandon":
            self.memory.abandon()
            self.dumb.abandon()
        elif isinstance(end, str):
            self.memory.commit()
            self.dumb.commit({})
        else:
            accepted = {seq: min(number, len(pending[seq])) for seq, number in end.items() if seq in pending}
            self.memory.commit(accepted)
            self.dumb.commit(accepted)

    def _layers(self) -> list[int]:
        return [layer for m in self.members for layer in m.group.layers]

    def _new(self, layer: int) -> list[torch.Tensor]:
        """k [T,G,D] and v [T,G,Dv] of the open step's tokens."""
        (group,) = (m.group for m in self.members if layer in m.group.layers)
        tokens = [token for new in (self.dumb.pending or {}).values() for token in new]
        return [
            identity.vectors(tokens, layer, number, plane.heads, plane.size, dtype=self.memory.dtype)
            for number, plane in enumerate(group.planes)
        ]

    # -- what the rows see ----------------------------------------------------------------------------------------

    def _look(self, plan: Plan) -> None:
        pending = self.dumb.pending or {}
        assert plan.tokens == sum(map(len, pending.values()))
        assert [(feed.seq, len(feed.pos)) for feed in plan.feeds] == [(seq, len(new)) for seq, new in pending.items()]
        assert plan.positions == [self.dumb.length(seq) + i for seq, new in pending.items() for i in range(len(new))]
        for index, m in enumerate(self.members):
            self._look_at_runs(index, plan.groups[index])
            rows = self.dumb.rows(index)
            for layer in m.group.layers:
                self._look_at_dense(layer, rows)
                self._attend(layer, m.query_heads)

    def _look_at_dense(self, layer: int, rows: list[set[tuple[int, int]]]) -> None:
        k, v, visible = self.memory.get(layer).dense()
        columns = identity.spelled(k, layer, 0)
        assert identity.spelled(v, layer, 1) == [(token, 0) for token, _ in columns], "values do not turn"
        assert len(set(columns)) == len(columns), "a cell is there twice"
        assert [{columns[i] for i in row.nonzero().flatten().tolist()} for row in visible] == rows
        assert visible.any(0).all(), "there is a cell that no row sees"

    def _look_at_runs(self, index: int, plan: GroupPlan) -> None:
        """The way a kernel reads: planes and runs."""
        row, seen, written = 0, [], []
        for (seq, new), segment in zip((self.dumb.pending or {}).items(), plan.segments, strict=True):
            start = self.dumb.length(seq)
            lowest = min(k for k in range(start + 1) if self.members[index].kind.sees(start, k))
            assert (segment.seq, segment.row, segment.pos) == (seq, row, Span(start, start + len(new)))
            assert segment.first == lowest
            assert all(a.end != b.cell for a, b in pairwise(segment.runs)), "two runs could be one"
            now = self.dumb.now(index, seq)
            seen += [now[pos].spells for pos in range(lowest, start + len(new))]
            written += [(token, 0) for token in new]
            row += len(new)
        for layer in self.members[index].group.layers:
            assert self._spelled(layer, [run for segment in plan.segments for run in segment.runs]) == seen
            assert self._spelled(layer, [run for segment in plan.segments for run in segment.new]) == written
            if len(plan.segments) == 1:
                k, v = self.memory.get(layer).in_order()
                assert identity.spelled(k, layer, 0) == seen
                assert identity.spelled(v, layer, 1) == [(token, 0) for token, _ in seen]

    def _spelled(self, layer: int, runs: list[Run]) -> list[tuple[int, int]]:
        history = self.memory.get(layer)
        found = []
        for number, name in enumerate(("k", "v")):
            plane = history.stored(name)
            by_cell = plane.codes.permute(AXES[plane.arrangement])
            found.append(identity.spelled(torch.cat([by_cell[run.cell : run.end] for run in runs]), layer, number))
        assert found[1] == [(token, 0) for token, _ in found[0]]
        return found[0]

    def _attend(self, layer: int, heads: int) -> None:
        k, v, visible = self.memory.get(layer).dense()
        dtype = torch.float32
        q = torch.arange(len(visible) * heads * k.shape[2], dtype=dtype).reshape(-1, heads, k.shape[2]).sin()
        scoring = Scoring(scale=k.shape[2] ** -0.5)
        expected = attend_dense(q, k.to(dtype), v.to(dtype), visible, scoring)
        torch.testing.assert_close(self.memory.attend(layer, q, scoring), expected, atol=1e-5, rtol=0)

    # -- sequences ------------------------------------------------------------------------------------------------

    def _known(self, seq: int) -> int:
        there = sorted(self.dumb.lines)
        return there[seq % len(there)]

    @precondition(lambda self: self.dumb.lines)
    @rule(src=SEQS, dst=SEQS, upto=NUMBERS)
    def fork(self, src: int, dst: int, upto: int) -> None:
        src = self._known(src)
        upto %= self.dumb.length(src) + 2
        if src == dst:
            with pytest.raises(BadRequest, match="onto itself"), nothing_changes(self.memory):
                self.memory.fork(src, dst, upto)
        else:
            assert self.memory.fork(src, dst, upto) == self.dumb.fork(src, dst, upto)

    @precondition(lambda self: self.dumb.lines)
    @rule(seq=SEQS, back=st.one_of(st.integers(0, 5), NUMBERS), beyond=st.integers(0, 2))
    def remove_the_end(self, seq: int, back: int, beyond: int) -> None:
        seq = self._known(seq)
        length = self.dumb.length(seq)
        start = length - back % (length + 1) + beyond
        span = Span(start, max(start, length) + beyond)
        if self.dumb.can_cut(seq, start) == min(start, length):
            assert self.memory.remove(seq, span) == self.dumb.remove(seq, start)
        else:
            with nothing_changes(self.memory):
                assert self.memory.remove(seq, span) == self.dumb.can_cut(seq, start)

    @precondition(lambda self: any(len(line.tokens) > 1 for line in self.dumb.lines.values()))
    @rule(seq=SEQS, start=NUMBERS, number=st.one_of(st.just(4), st.integers(0, 7)), aligned=st.booleans())
    def remove_from_the_middle(self, seq: int, start: int, number: int, aligned: bool) -> None:
        seq = self._known(seq)
        length = self.dumb.length(seq)
        start %= max(1, length - number)
        span = Span(start - start % 4 * aligned, start - start % 4 * aligned + number)
        if span.end >= length:
            return
        if number and (wrong := self._cannot_shift(seq, span)):
            with pytest.raises(wrong), nothing_changes(self.memory):
                self.memory.remove(seq, span)
        elif number and self.dumb.can_shift(seq, span.start, span.end):
            self._break_a_shift(seq, span)
            assert self.memory.remove(seq, span) == length - number
            self.dumb.shift(seq, span.start, span.end)
        else:
            with nothing_changes(self.memory):
                assert self.memory.remove(seq, span) == (self.dumb.can_cut(seq, span.start) if number else length)

    def _cannot_shift(self, seq: int, span: Span) -> type[Exception] | None:
        if any(m.group.no_shift for m in self.members):
            return NotSupported
        spare = [self.dumb.spare(index, seq, span.end) for index in range(len(self.members))]
        short = any(free < need for free, need in zip(self.memory.free().values(), spare, strict=True))
        return CacheFull if short and self.dumb.can_shift(seq, span.start, span.end) else None

    def _break_a_shift(self, seq: int, span: Span) -> None:
        """There is no memory to turn the keys of the last layer that turns."""
        turned = [
            len(m.group.layers)
            for index, m in enumerate(self.members)
            if m.turns and self.dumb.spare(index, seq, span.end)
        ]
        if turned:
            move, calls = Pool.move, count(1)

            def breaks(pool: Pool, *args: Any) -> None:
                if next(calls) == sum(turned):
                    raise MemoryError
                move(pool, *args)

            with nothing_changes(self.memory), mock.patch.object(Pool, "move", breaks), pytest.raises(MemoryError):
                self.memory.remove(seq, span)

    @precondition(lambda self: len(self.dumb.lines) > 2)
    @rule(seq=SEQS)
    def drop(self, seq: int) -> None:
        seq = self._known(seq)
        self.memory.drop(seq)
        del self.dumb.lines[seq]

    @precondition(lambda self: len(self.dumb.lines) > 3)
    @rule(feeds=FEEDS)
    def clear(self, feeds: Mapping[int, int]) -> None:
        self._begin(feeds)
        self.memory.clear()
        self.dumb.lines, self.dumb.pending = {}, None

    @precondition(lambda self: self.dumb.lines)
    @rule(seq=SEQS, numbers=st.lists(NUMBERS, min_size=3, max_size=3))
    def ask(self, seq: int, numbers: list[int]) -> None:
        seq = self._known(seq)
        with nothing_changes(self.memory):
            for pos in {number % (self.dumb.length(seq) + 2) for number in numbers}:
                kept = self.dumb.can_cut(seq, pos)
                assert self.memory.can_cut(seq, pos) == kept
                assert self.memory.can_resume(seq, pos) == (kept == pos)

    # -- what is refused ------------------------------------------------------------------------------------------

    @rule(feeds=FEEDS, off=st.integers(1, 3), which=NUMBERS, layer=NUMBERS)
    def misuse_at_rest(self, feeds: Mapping[int, int], off: int, which: int, layer: int) -> None:
        layer = self._layers()[layer % len(self._layers())]
        right = self._batch(feeds).feeds
        at = which % len(right)
        gap = Feed(right[at].seq, Span(right[at].pos.start + off, right[at].pos.end + off))
        k = torch.zeros(1, 1, 1)
        with nothing_changes(self.memory):
            with pytest.raises(BadRequest, match=f"sequence {gap.seq} goes on at"):
                self.memory.begin(Batch((*right[:at], gap, *right[at + 1 :])))
            for call in (
                lambda: self.memory.put(layer, k, k),
                lambda: self.memory.get(layer),
                lambda: self.memory.attend(layer, k, Scoring(1.0)),
                lambda: self.memory.attend_dense(layer, k, k, k, Scoring(1.0)),
                self.memory.commit,
                self.memory.abandon,
            ):
                with pytest.raises(WrongStage, match="begin"):
                    call()
            for seq in {77, *self.dumb.lines}:
                assert not self.memory.can_resume(seq, -off)
                with pytest.raises(BadRequest, match="position"):
                    self.memory.can_cut(seq, -off)
                with pytest.raises(BadRequest if seq in self.dumb.lines else UnknownSequence):
                    self.memory.fork(seq, seq + 1, -off)
            self._strangers_are_unknown()

    def _strangers_are_unknown(self) -> None:
        memory = self.memory
        assert (memory.has(77), memory.length(77), memory.can_cut(77, 3)) == (False, 0, 0)
        for call in (
            lambda: memory.held(77),
            lambda: memory.drop(77),
            lambda: memory.fork(77, 0, 1),
            lambda: memory.remove(77, Span(0, 1)),
        ):
            with pytest.raises(UnknownSequence, match="77"):
                call()

    @rule(feeds=FEEDS, end=ENDS, layer=NUMBERS, number=st.sampled_from([-1, 100]))
    def misuse_in_a_step(self, feeds: Mapping[int, int], end: str | Mapping[int, int], layer: int, number: int) -> None:
        if not self._begin(feeds):
            return
        memory, layer = self.memory, self._layers()[layer % len(self._layers())]
        k, v = self._new(layer)
        seq, *_ = feeds
        with nothing_changes(memory):
            for call in (
                lambda: memory.begin(self._batch(feeds)),
                lambda: memory.fork(seq, seq + 1, 1),
                lambda: memory.remove(seq, Span(0, 1)),
                lambda: memory.drop(seq),
            ):
                with pytest.raises(WrongStage, match="commit"):
                    call()
            for accepted, named in (({seq: number}, number), ({99: 0}, 99)):
                with pytest.raises(BadRequest, match=str(named)):
                    memory.commit(accepted)
            for wrong in ((k[1:], v), (k, v[1:]), (k[..., 1:], v), (k, v[..., :1]), (torch.cat([k, k]), v), (k[0], v)):
                with pytest.raises(BadRequest, match=f"layer {layer}"):
                    memory.put(layer, *wrong)
            with pytest.raises(BadRequest, match="layer 60"):
                memory.put(60, k, v)
        self._end(end)

    # -- what breaks ----------------------------------------------------------------------------------------------

    @rule(feeds=FEEDS, whole=NUMBERS)
    def begin_breaks(self, feeds: Mapping[int, int], whole: int) -> None:
        """There is no memory for a backend's tables, in the first group or in a later one, or for an index."""
        batch = self._batch(feeds)
        if min(self.memory.free().values()) < batch.tokens:
            return
        self.backend.broken, self.backend.whole = True, whole % len(self.members)
        with pytest.raises(MemoryError), nothing_changes(self.memory):
            self.memory.begin(batch)
        self.backend.broken = False
        with nothing_changes(self.memory), mock.patch.object(torch, "tensor", side_effect=MemoryError):
            with suppress(MemoryError):  # some steps need none
                self.memory.begin(batch)
                self.memory.abandon()

    @rule(feeds=FEEDS, end=ENDS, layer=NUMBERS)
    def put_breaks(self, feeds: Mapping[int, int], end: str | Mapping[int, int], layer: int) -> None:
        layer = self._layers()[layer % len(self._layers())]
        broken = mock.patch.object(Pool, "write", side_effect=MemoryError)
        if self._begin(feeds):
            with nothing_changes(self.memory), broken, pytest.raises(MemoryError):
                self.memory.put(layer, *self._new(layer))
            self._end(end)

    # -- always ---------------------------------------------------------------------------------------------------

    @invariant()
    def is_sound(self) -> None:
        self.memory.check()

    @invariant()
    def knows_what_it_should(self) -> None:
        memory, dumb = self.memory, self.dumb
        assert set(memory.sequences) == set(dumb.lines)
        for seq, line in dumb.lines.items():
            assert memory.has(seq)
            assert memory.length(seq) == len(line.tokens)
            assert memory.derived(seq) == line.derived
        for index, m in enumerate(self.members):
            name = m.group.name
            assert memory.free()[name] == memory.capacity()[name] - dumb.used(index)
            for seq, line in dumb.lines.items():
                span = memory.held(seq)[name]
                assert list(range(span.start, span.end)) == sorted(line.held[index])
            runs = [run for seq in dumb.lines for run in memory._tables[seq][index].runs]
            held = [line.held[index][pos].spells for line in dumb.lines.values() for pos in sorted(line.held[index])]
            for layer in m.group.layers:
                assert identity.spelled(stored(memory, layer, "k", runs), layer, 0) == held
                found = identity.spelled(stored(memory, layer, "v", runs), layer, 1)
                assert found == [(token, 0) for token, _ in held]

    def teardown(self) -> None:
        self.memory.clear()
        self.memory.check()
        assert self.memory.free() == self.memory.capacity()


CAUSAL = member("full", causal(), [0, 5], (4, 2), 16, 24)
SLIDING = member("window", sliding(4, 4), [1, 2], (2, 1), 32, 40)
REMEMBERING = member("memory", sliding(3, 8), [3], (3, 3), 24, 16)
CHUNKED = member("chunk", chunked(4), [4], (4, 1), 40, 32)
NARROW = member("last", sliding(1, 1), [6], (2, 2), 16, 16)


def timeline(*members: Member, steps: int) -> type:
    """A test case that plays timelines on one memory of these groups."""
    machine = type("Timeline", (Timeline,), {"members": members})
    case = machine.TestCase
    case.settings = settings(derandomize=True, deadline=None, stateful_step_count=steps)
    return case


TestCausal = timeline(CAUSAL, steps=24)
TestSliding = timeline(SLIDING, steps=24)
TestSlidingWithMemory = timeline(REMEMBERING, steps=24)
TestSlidingByOne = timeline(NARROW, steps=20)
TestChunked = timeline(CHUNKED, steps=24)
TestMemoryAndChunks = timeline(REMEMBERING, CHUNKED, steps=20)
TestShifting = timeline(shifting(CAUSAL, turns=True), shifting(REMEMBERING, turns=False), steps=18)
TestShiftingWindows = timeline(shifting(SLIDING, turns=True), shifting(REMEMBERING, turns=True), steps=18)
TestShiftingChunks = timeline(shifting(CHUNKED, turns=True), shifting(NARROW, turns=False), steps=18)
TestAllAtOnce = timeline(CAUSAL, SLIDING, REMEMBERING, CHUNKED, steps=16)
