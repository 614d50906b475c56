"""Recurrent state against a dumb model: random timelines in which every state encodes its tokens.

Before each step a fake model reads what its layers remember and sees that it is of exactly the tokens of the sequence;
then it stores what they remember after the new ones. After each operation `check()` holds, and what the memory reports
is the same as in the dumb model. What raises changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from benchmarks.zeros import put_zeros
from kvcellar.errors import BadRequest, CacheFull, NotSupported, WrongStage
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Input
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed, Plan, StateSegment
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span
from tests.laws.dumb import Kind, causal, chunked, sliding
from tests.laws.prefixes import (
    RECURRENT,
    Broken,
    FailsAt,
    Tokens,
    all_of,
    assert_states,
    failures,
    grouped,
    remembered,
    states,
)

CELLS = 4000  # more than a timeline can fill: what is scarce here are rows
INPUT = 6


@dataclass(eq=False)
class State:
    """What all layers remember after these tokens. One object is one row; they are numbered as they are taken."""

    tokens: Tokens
    number: int
    stands: int = 1  # for itself, and for points behind it that went
    used: int = 0  # when it was kept or resumed from


@dataclass
class Line:
    tokens: Tokens = ()
    state: State | None = None
    points: list[State] = field(default_factory=list)  # in order
    held: list[set[int]] = field(default_factory=list)  # positions, by kind of attention layer
    input: str | None = None

    def at(self, pos: int) -> State | None:
        return next((s for s in (self.state, *self.points) if s is not None and len(s.tokens) == pos), None)


@dataclass
class Dumb:
    """What the memory should know: lists of states, and the rules written out."""

    kinds: Sequence[Kind]
    checkpoints: int
    rows: int
    spare: int
    lines: dict[int, Line] = field(default_factory=dict)
    taken: int = 0
    uses: int = 0

    def line(self, seq: int) -> Line:
        return self.lines[seq] if seq in self.lines else Line(held=[set() for _ in self.kinds])

    def length(self, seq: int) -> int:
        return len(self.line(seq).tokens)

    def used(self) -> int:
        lines = self.lines.values()
        return len({s for line in lines for s in (line.state, *line.points) if s is not None})

    def fresh(self) -> int:
        self.taken += 1
        return self.taken

    def kept(self) -> set[State]:
        """Rows that are checkpoints, and not the state of a sequence."""
        lines = self.lines.values()
        return {s for line in lines for s in line.points} - {line.state for line in lines}

    def use(self, state: State | None) -> None:
        if state is not None:
            self.uses += 1
            state.used = self.uses

    def thin(self) -> None:
        """One at a time goes. What one costs, in all lines, is the tokens since the point before it, for each that it
        stands for. It is the one that costs least for its age; older ones first."""
        while len(kept := self.kept()) > self.checkpoints and self.rows - self.used() < self.spare:
            costs: dict[State, int] = dict.fromkeys(kept, 0)
            for line in self.lines.values():
                places = [0, *(len(state.tokens) for state in line.points)]
                for before, state in zip(places, line.points, strict=False):
                    if state in costs:
                        costs[state] += (len(state.tokens) - before) * state.stands
            gone = min(costs, key=lambda state: (costs[state] / (1 + self.uses - state.used), state.number))
            pairs = (pair for line in self.lines.values() for pair in pairwise(line.points))
            for heir in {before for before, state in pairs if state is gone}:
                heir.stands += gone.stands
            for line in self.lines.values():
                line.points = [state for state in line.points if state is not gone]

    def keep(self, line: Line) -> None:
        self.point(line, line.state)

    def point(self, line: Line, state: State | None) -> None:
        if state is None or state in line.points:
            return
        if not any(state in other.points for other in self.lines.values()):
            self.use(state)
        line.points.append(state)

    def can_cut(self, seq: int, pos: int) -> int:
        """By trying: there must be a state, and all that the token at `kept` would see before it."""
        line = self.line(seq)
        return max(
            kept
            for kept in range(min(pos, len(line.tokens)) + 1)
            if (not kept or line.at(kept) is not None)
            and all(
                k in h for kind, h in zip(self.kinds, line.held, strict=True) for k in range(kept) if kind.sees(kept, k)
            )
        )

    def cut(self, line: Line, kept: int) -> Line:
        held = [{pos for pos in h if pos < kept} for h in line.held]
        points = [state for state in line.points if len(state.tokens) <= kept]
        return Line(line.tokens[:kept], line.at(kept) if kept else None, points, held, line.input)


Ends = str | Mapping[int, int]


@dataclass(frozen=True)
class Fed:
    """So many tokens for a sequence; `n` query-only tokens of 0."""

    seq: int
    n: int
    kind: str  # plain, keep, revertible, both, query


SEQS = st.integers(0, 4)
FEEDS = st.lists(
    st.builds(Fed, SEQS, st.integers(1, 5), st.sampled_from(["plain", "plain", "keep", "revertible", "both", "query"])),
    min_size=1,
    max_size=4,
    unique_by=lambda fed: fed.seq,
)
ENDS = st.one_of(st.just("commit"), st.just("commit"), st.just("abandon"), st.dictionaries(SEQS, st.integers(0, 4)))
ORDERS = st.integers(0, 15)
NUMBERS = st.integers(0, 999)  # taken modulo whatever there is to choose from


class Timeline(RuleBasedStateMachine):
    """One memory, and the dumb model beside it."""

    kinds: tuple[Kind, ...] = ()
    inputs = False
    memory: Memory
    dumb: Dumb

    @initialize(
        rows=st.integers(1, 14),
        checkpoints=st.sampled_from([0, 1, 2, 3, 5, 50]),
        spare=st.sampled_from([None, None, 0, 1, 3, 6]),
    )
    def start(self, rows: int, checkpoints: int, spare: int | None) -> None:
        planes = (Plane("k", 1, 4), Plane("v", 1, 4))
        groups = [Group(f"kind {i}", kind.layout, planes, (20 + i,)) for i, kind in enumerate(self.kinds)]
        if self.inputs:
            groups.insert(0, Group("input", Input(INPUT), planes, (30,)))
        self.memory = Memory(
            groups,
            cells={group.name: CELLS for group in groups},
            dtype=torch.float32,
            device="cpu",
            backend=Sdpa(),
            recurrent=RECURRENT,
            rows=rows,
        )
        for layer in self.memory.states._planes.values():
            for plane in layer.values():
                plane[1:] = torch.nan  # a row that is read without having been written is detected
        self.dumb = Dumb(self.kinds, checkpoints, rows, rows if spare is None else spare)
        self.tokens = 0

    def _trim(self) -> None:
        """As an engine does between two operations."""
        self.memory.rows.trim(most=self.dumb.checkpoints, spare=self.dumb.spare)
        self.dumb.thin()

    # -- a step -----------------------------------------------------------------------------------------------------

    @rule(feeds=FEEDS, end=ENDS, order=ORDERS)
    def some_tokens(self, feeds: list[Fed], end: Ends, order: int) -> None:
        self._step(feeds, end, order)

    @precondition(lambda self: self.dumb.lines)
    @rule(steps=st.integers(1, 4), order=ORDERS)
    def one_token_each(self, steps: int, order: int) -> None:
        for _ in range(steps):
            self._step([Fed(seq, 1, "plain") for seq in self.dumb.lines], "commit", order)

    def _step(self, feeds: list[Fed], end: Ends, order: int) -> None:
        if (plan := self._begin(feeds)) is not None:
            self._forward(plan, order)
            self._end(plan, end)

    def _batch(self, feeds: list[Fed]) -> Batch:
        return Batch(
            tuple(
                Feed(
                    fed.seq,
                    Span(self.dumb.length(fed.seq), self.dumb.length(fed.seq) + fed.n),
                    stores=fed.kind != "query",
                    keep_state=fed.kind in ("keep", "both"),
                    revertible=fed.kind in ("revertible", "both"),
                )
                for fed in feeds
            )
        )

    def _begin(self, feeds: list[Fed]) -> Plan | None:
        """None if there was no room, or no sequence to query."""
        feeds = [fed for fed in feeds if fed.kind != "query" or self._can_ask(fed)]
        if not feeds:
            return None
        batch = self._batch(feeds)
        need, free = sum(feed.stores for feed in batch.feeds), self.memory.rows.free
        if need > free:
            before = all_of(self.memory)
            with pytest.raises(CacheFull, match="rows") as full:
                self.memory.begin(batch)
            assert (full.value.group, full.value.need, full.value.free) == ("recurrent", need, free)
            sequences = {*self.dumb.lines, *(feed.seq for feed in batch.feeds)}
            beyond = len(self.dumb.kept()) > self.dumb.checkpoints  # these stay only while spare rows are free
            assert need > self.dumb.spare if beyond else self.dumb.rows < 2 * len(sequences) + self.dumb.checkpoints
            assert all_of(self.memory) == before
            return None
        self.before = all_of(self.memory)
        plan = self.memory.begin(batch)
        put_zeros(self.memory, plan)  # the rows are what is judged here
        self.new: dict[int, State] = {}
        for feed in plan.feeds:
            new = tuple(range(self.tokens, self.tokens + len(feed.pos)))
            self.tokens += len(feed.pos)
            number = self.dumb.fresh() if feed.stores else 0
            self.new[feed.seq] = State(self.dumb.line(feed.seq).tokens + new, number)
        assert self.memory.rows.free == free - need
        return plan

    def _can_ask(self, fed: Fed) -> bool:
        line = self.dumb.lines.get(fed.seq)
        if line is None:
            return False
        end, queries = len(line.tokens), range(len(line.tokens), len(line.tokens) + fed.n)
        return all(any(kind.sees(q, k) for k in range(end)) for kind in self.kinds for q in queries)

    def _forward(self, plan: Plan, order: int) -> None:
        """Every layer reads what it remembers, groups of segments in any order, and stores what it remembers then."""
        revertible = {feed.seq for feed in plan.feeds if feed.revertible}
        for layer in RECURRENT.layers:
            for segments in grouped(plan.states, order):
                self._mixer(layer, segments, revertible)
        for layer in RECURRENT.layers:
            self._reads(layer, plan.states)

    def _reads(self, layer: int, segments: Sequence[StateSegment]) -> None:
        found = self.memory.states.read(layer, segments)
        assert_states(found, [self.dumb.line(segment.seq).tokens for segment in segments], layer)
        for values in found.values():
            values.fill_(torch.nan)  # they are ours

    def _mixer(self, layer: int, segments: list[StateSegment], revertible: set[int]) -> None:
        self._reads(layer, segments)

        def at(indices: Sequence[int], counts: Sequence[int]) -> dict[str, Tensor]:
            parts = [(segments[i], n) for i, n in zip(indices, counts, strict=True)]
            assert all(segment.seq in revertible and 0 < n <= segment.length for segment, n in parts)
            return states([self._after(segment.seq, n) for segment, n in parts], layer)

        whole = states([self.new[segment.seq].tokens for segment in segments], layer)
        again = at if any(segment.seq in revertible for segment in segments) else None
        self.memory.states.write(layer, segments, whole, at=again)
        for values in whole.values():
            values.fill_(torch.nan)

    def _after(self, seq: int, n: int) -> Tokens:
        """All tokens of a sequence and the first n of the step."""
        return self.new[seq].tokens[: self.dumb.length(seq) + n]

    def _end(self, plan: Plan, end: Ends) -> None:
        if end == "abandon":
            self.memory.abandon()
            assert all_of(self.memory) == self.before, "an abandoned step changed something"
            return
        accepted = {
            feed.seq: min(end[feed.seq], len(feed.pos))
            for feed in plan.feeds
            if isinstance(end, Mapping) and feed.seq in end and feed.stores
        }
        for feed in plan.feeds:
            if not feed.revertible and 0 < accepted.get(feed.seq, 0) < len(feed.pos):
                with pytest.raises(BadRequest, match=rf"sequence {feed.seq} cannot be kept.*revertible"):
                    self.memory.commit({feed.seq: accepted[feed.seq]})
                accepted[feed.seq] = 0
        self.memory.commit(accepted)
        self._committed(plan, accepted)

    def _committed(self, plan: Plan, accepted: Mapping[int, int]) -> None:
        for feed in plan.feeds:
            if not feed.stores:
                continue
            line = self.dumb.lines.setdefault(feed.seq, self.dumb.line(feed.seq))
            count = accepted.get(feed.seq, len(feed.pos))
            if not count:
                continue
            line.tokens = self._after(feed.seq, count)
            line.state = State(line.tokens, self.new[feed.seq].number)
            for kind, held in zip(self.kinds, line.held, strict=True):
                held.update(range(feed.pos.start, feed.pos.start + count))
                held.intersection_update([pos for pos in held if kind.stays(len(line.tokens), pos)])
            if feed.keep_state and count == len(feed.pos):
                self.dumb.keep(line)
        self._trim()

    # -- sequences --------------------------------------------------------------------------------------------------

    def _known(self, number: int) -> int:
        return sorted(self.dumb.lines)[number % len(self.dumb.lines)]

    @precondition(lambda self: self.dumb.lines)
    @rule(src=NUMBERS, dst=SEQS, upto=NUMBERS, how=st.sampled_from(["anywhere", "point", "end"]))
    def fork(self, src: int, dst: int, upto: int, how: str) -> None:
        src = self._known(src)
        if src == dst:
            return
        line = self.dumb.lines[src]
        upto = self._place(line, upto, how)
        kept = self.dumb.can_cut(src, upto)
        free = self.memory.rows.free
        assert self.memory.fork(src, dst, upto) == kept
        assert dst in self.dumb.lines or self.memory.rows.free == free, "a fork costs no row"
        twin = self.dumb.cut(line, kept)
        self.dumb.use(twin.state)
        self.dumb.point(line, twin.state)
        self.dumb.keep(twin)
        self.dumb.lines[dst] = twin
        self._trim()

    @staticmethod
    def _place(line: Line, number: int, how: str) -> int:
        if how == "point" and line.points:
            return len(line.points[number % len(line.points)].tokens)
        return len(line.tokens) if how == "end" else number % (len(line.tokens) + 1)

    @precondition(lambda self: self.dumb.lines)
    @rule(seq=NUMBERS, start=NUMBERS, how=st.sampled_from(["anywhere", "point"]), again=st.booleans())
    def remove(self, seq: int, start: int, how: str, again: bool) -> None:
        seq = self._known(seq)
        line = self.dumb.lines[seq]
        start, length = self._place(line, start, how), len(line.tokens)
        kept = self.dumb.can_cut(seq, start)
        before = all_of(self.memory)
        if kept < min(start, length):
            with pytest.raises(NotSupported, match=r"recurrent state|no longer hold") as refused:
                self.memory.remove(seq, Span(start, length))
            assert (refused.value.kept, all_of(self.memory)) == (kept, before)
            if not again:
                return
        assert self.memory.remove(seq, Span(kept, length)) == kept
        if kept < length:
            self.dumb.use(line.at(kept) if kept else None)
        self.dumb.lines[seq] = self.dumb.cut(line, kept)
        self._trim()

    @precondition(lambda self: self.dumb.lines)
    @rule(seq=NUMBERS, start=NUMBERS, n=st.integers(1, 3))
    def remove_from_the_middle(self, seq: int, start: int, n: int) -> None:
        """Tokens cannot be removed from the middle of a state: nothing changes, and the error has `kept`."""
        seq = self._known(seq)
        length = self.dumb.length(seq)
        if length > n:
            start %= length - n
            before = all_of(self.memory)
            with pytest.raises(NotSupported, match="removed from a recurrent state") as refused:
                self.memory.remove(seq, Span(start, start + n))
            assert (refused.value.kept, all_of(self.memory)) == (self.dumb.can_cut(seq, start), before)

    @precondition(lambda self: len(self.dumb.lines) > 1)
    @rule(seq=NUMBERS)
    def drop(self, seq: int) -> None:
        seq = self._known(seq)
        self.memory.drop(seq)
        del self.dumb.lines[seq]
        self._trim()

    @precondition(lambda self: len(self.dumb.lines) > 3)
    @rule(feeds=FEEDS)
    def clear(self, feeds: list[Fed]) -> None:
        self._begin(feeds)
        self.memory.clear()
        self.dumb.lines = {}
        assert self.memory.rows.free == self.memory.rows.capacity

    @precondition(lambda self: self.inputs)
    @rule(seq=SEQS, n=st.integers(1, INPUT), digest=st.sampled_from(["a", "b", None]))
    def write_input(self, seq: int, n: int, digest: str | None) -> None:
        if self.dumb.line(seq).input is None:
            sizes = {line.input: size for s, line in self.dumb.lines.items() if (size := self.memory.inputs.length(s))}
            n = sizes.get(digest, n) if digest is not None else n
            planes = {30: (torch.ones(n, 1, 4), torch.ones(n, 1, 4))}
            self.memory.inputs.write(seq, n, planes, digest=digest)
            self.dumb.lines.setdefault(seq, self.dumb.line(seq)).input = digest or "?"

    # -- queries, reserved steps, refusals ---------------------------------------------------------------------------

    @precondition(lambda self: self.dumb.lines)
    @rule(seq=NUMBERS, numbers=st.lists(NUMBERS, min_size=4, max_size=4))
    def ask(self, seq: int, numbers: list[int]) -> None:
        seq = self._known(seq)
        before = all_of(self.memory)
        for pos in {number % (self.dumb.length(seq) + 2) for number in numbers}:
            kept = self.dumb.can_cut(seq, pos)
            assert self.memory.can_cut(seq, pos) == kept
            assert (self.memory.can_cut(seq, pos) == pos) == (kept == pos)
        assert all_of(self.memory) == before

    @rule(feeds=FEEDS, order=ORDERS)
    def reserve(self, feeds: list[Fed], order: int) -> None:
        """A step that is only tried: everybody begins, and nothing that is put goes anywhere."""
        before = all_of(self.memory)
        plan = self.memory.begin(Batch(tuple(Feed(fed.seq, Span(0, fed.n)) for fed in feeds)), reserve=True)
        for layer in RECURRENT.layers:
            for segments in grouped(plan.states, order):
                assert_states(self.memory.states.read(layer, segments), [()] * len(segments), layer)
                self.memory.states.write(layer, segments, states([(7,)] * len(segments), layer))
        with pytest.raises(WrongStage):
            self.memory.commit()
        self.memory.abandon()
        assert all_of(self.memory) == before

    @precondition(lambda self: self.dumb.lines)
    @rule(seq=NUMBERS, off=st.integers(1, 9))
    def ask_elsewhere(self, seq: int, off: int) -> None:
        """Query-only rows must begin at the end: there is no state for other positions."""
        seq = self._known(seq)
        end = self.dumb.length(seq)
        before = all_of(self.memory)
        for start in {max(0, end - off), end + off} - {end}:
            with pytest.raises(BadRequest, match=f"sequence {seq}"):
                self.memory.begin(Batch((Feed(seq, Span(start, start + 1), stores=False),)))
        assert all_of(self.memory) == before

    @rule(feeds=FEEDS, end=ENDS, order=ORDERS, layer=NUMBERS)
    def misuse_in_a_step(self, feeds: list[Fed], end: Ends, order: int, layer: int) -> None:
        if (plan := self._begin(feeds)) is None:
            return
        self._forward(plan, order)
        layer = sorted(RECURRENT.layers)[layer % len(RECURRENT.layers)]
        before, right = all_of(self.memory), states([(1,)] * len(plan.states), layer)
        name = next(iter(right))
        for wrong in (
            {},
            {**right, "other": right[name]},
            {key: values for key, values in right.items() if key != name},
            {**right, name: right[name][..., 1:]},
            {**right, name: right[name][:0]},
        ):
            with pytest.raises(BadRequest, match=f"layer {layer}"):
                self.memory.states.write(layer, plan.states, wrong)
        for other in (0, 20):
            with pytest.raises(BadRequest, match=f"layer {other} is not recurrent"):
                self.memory.states.write(other, plan.states, right)
            with pytest.raises(BadRequest, match=f"layer {other} is not recurrent"):
                self.memory.states.read(other, plan.states)
        assert all_of(self.memory) == before
        self._forward(plan, order)
        self._end(plan, end)

    # -- what breaks --------------------------------------------------------------------------------------------------

    @rule(feeds=FEEDS, end=ENDS, order=ORDERS, first=st.integers(1, 12))
    def a_step_breaks(self, feeds: list[Fed], end: Ends, order: int, first: int) -> None:
        """An operation on tensors raises: in begin, in the forward, in commit. Then all goes on as if it had not."""
        feeds = [fed for fed in feeds if fed.kind != "query" or self._can_ask(fed)]
        if not feeds:
            return
        batch = self._batch(feeds)
        if sum(feed.stores for feed in batch.feeds) > self.memory.rows.free:
            return
        before = all_of(self.memory)
        for failing in failures():
            try:
                with failing:
                    self.memory.begin(batch)
            except Broken:
                self.memory.check()
                assert all_of(self.memory) == before
            else:
                self.memory.abandon()
        plan = self._begin(feeds)
        assert plan is not None
        self._breaking(first, lambda: self._forward(plan, order))
        self._forward(plan, order)
        accepted = {feed.seq: first % (len(feed.pos) + 1) for feed in plan.feeds if feed.revertible}
        self._breaking(first, lambda: self.memory.commit(accepted))
        if self.memory.step is not None:
            self._end(plan, end)
        else:
            self._committed(plan, accepted)

    def _breaking(self, n: int, act: Any) -> None:
        before = all_of(self.memory)
        try:
            with FailsAt(n):
                act()
        except Broken:
            self.memory.check()
            assert all_of(self.memory) == before

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def is_sound(self) -> None:
        self.memory.check()

    @invariant()
    def knows_what_it_should(self) -> None:
        memory, dumb = self.memory, self.dumb
        assert set(memory.sequences) == set(dumb.lines)
        kept = dumb.kept()
        assert len(kept) <= dumb.checkpoints or memory.rows.free >= dumb.spare
        assert memory.rows.capacity - memory.rows.free == dumb.used()
        assert dumb.used() == len({line.state for line in dumb.lines.values() if line.state}) + len(kept)
        for seq, line in dumb.lines.items():
            assert memory.length(seq) == len(line.tokens)
            places = {len(state.tokens) for state in (*line.points, *((line.state,) if line.state else ()))}
            assert memory.state_positions(seq) == tuple(sorted(places))
            for layer in RECURRENT.layers:
                assert_states(remembered(memory, seq, layer), [line.tokens], layer)

    def teardown(self) -> None:
        self.memory.clear()
        self.memory.check()
        assert self.memory.rows.free == self.memory.rows.capacity


def timeline(*kinds: Kind, steps: int, inputs: bool = False) -> type:
    """A test case that plays timelines on one memory with recurrent layers and these."""
    machine = type("Timeline", (Timeline,), {"kinds": kinds, "inputs": inputs})
    case = machine.TestCase
    examples = settings.default.max_examples // 2
    case.settings = settings(derandomize=True, deadline=None, max_examples=examples, stateful_step_count=steps)
    return case


TestOnlyRecurrent = timeline(steps=24)
TestWithAttention = timeline(causal(), steps=20)
TestWithWindows = timeline(sliding(4, 4), sliding(3, 8), steps=20)
TestWithChunks = timeline(chunked(4), causal(), steps=20)
TestWithInputs = timeline(sliding(6, 7), causal(), steps=20, inputs=True)
