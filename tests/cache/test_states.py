"""States as tensors: what is read, what is written where, and what remains when any single operation fails."""

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.zeros import put_zeros
from kvcellar.errors import BadRequest, CacheFull, CapacityTooSmall, NotSupported, WrongStage
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Input
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed, Plan, StateSegment
from kvcellar.memory.shapes import Plane, Recurrent, StatePlane
from kvcellar.memory.spans import Span
from tests.laws.prefixes import (
    RECURRENT,
    Broken,
    FailsAt,
    Made,
    all_of,
    assert_states,
    failures,
    grouped,
    remembered,
    states,
)

PLANES = (Plane("k", 1, 4), Plane("v", 1, 4))
GROUPS = (Group("cross", Input(4), PLANES, (30,)), Group("full", Causal(), PLANES, (20,)))
FIRST = next(iter(RECURRENT.layers))


class Spelling:
    """A memory, and a fake model whose states say of which tokens they are: token p of sequence s is 100 s + p."""

    def __init__(self, *, rows: int = 8, groups: Sequence[Group] = (), **more: int) -> None:
        self.memory = Memory(
            groups,
            cells={group.name: 64 for group in groups},
            dtype=torch.float32,
            device="cpu",
            backend=Sdpa(),
            recurrent=RECURRENT,
            rows=rows,
            **more,
        )
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.parts_computed: list[tuple[int, dict[int, int]]] = []  # layer, and of which sequences which parts

    def begin(self, sizes: Mapping[int, int], *, reserve: bool = False, **feed: bool) -> Plan:
        feeds = tuple(
            Feed(seq, Span(self.memory.length(seq), self.memory.length(seq) + n), **feed) for seq, n in sizes.items()
        )
        return self.memory.begin(Batch(feeds), reserve=reserve)

    def after(self, segment: StateSegment, n: int | None = None) -> tuple[int, ...]:
        before = self.tokens.get(segment.seq, ())
        first = 100 * segment.seq + len(before)
        return (*before, *range(first, first + (segment.length if n is None else n)))

    def put(self, plan: Plan, layers: Sequence[int] = tuple(RECURRENT.layers), *, at: bool = True) -> None:
        for layer in layers:
            for segments in grouped(plan.states, 0):
                whole = states([self.after(segment) for segment in segments], layer)
                part = partial(self.part, layer, segments) if at else None
                self.memory.states.write(layer, segments, whole, at=part)

    def part(
        self, layer: int, segments: Sequence[StateSegment], indices: Sequence[int], counts: Sequence[int]
    ) -> dict[str, Tensor]:
        parts = [(segments[i], n) for i, n in zip(indices, counts, strict=True)]
        self.parts_computed.append((layer, {segment.seq: n for segment, n in parts}))
        return states([self.after(segment, n) for segment, n in parts], layer)

    def commit(self, plan: Plan, accepted: Mapping[int, int] | None = None) -> None:
        self.memory.commit(accepted)
        for segment in plan.states:
            self.tokens[segment.seq] = self.after(segment, (accepted or {}).get(segment.seq))

    def step(self, sizes: Mapping[int, int], accepted: Mapping[int, int] | None = None, **feed: bool) -> None:
        plan = self.begin(sizes, **feed)
        put_zeros(self.memory, plan)
        self.put(plan)
        self.commit(plan, accepted)
        self.check()

    def check(self) -> None:
        self.memory.check()
        for seq in self.memory.sequences:
            for layer in RECURRENT.layers:
                assert_states(remembered(self.memory, seq, layer), [self.tokens.get(seq, ())], layer)


# -- what is read and written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqs", [[0], [1, 0]])
def test_what_is_read_is_a_copy_and_what_is_put_is_copied(seqs: list[int]) -> None:
    spelling = Spelling()
    spelling.step({0: 3, 1: 3})
    plan = spelling.begin(dict.fromkeys(seqs, 1))
    for layer in RECURRENT.layers:
        read = spelling.memory.states.read(layer, plan.states)
        assert_states(read, [spelling.tokens[seq] for seq in seqs], layer)
        given = states([spelling.after(segment) for segment in plan.states], layer)
        spelling.memory.states.write(layer, plan.states, given)
        for values in (*read.values(), *given.values()):
            values.fill_(torch.nan)
        assert_states(spelling.memory.states.read(layer, plan.states), [spelling.tokens[seq] for seq in seqs], layer)
    spelling.commit(plan)
    spelling.check()


def test_states_are_of_before_the_step_until_it_is_kept() -> None:
    spelling = Spelling()
    spelling.step({0: 3})
    plan = spelling.begin({0: 2})
    for _ in range(2):
        spelling.put(plan)
        for layer in RECURRENT.layers:
            assert_states(spelling.memory.states.read(layer, plan.states), [spelling.tokens[0]], layer)


def test_states_of_other_types_are_stored_as_planes_are_and_without_their_graph() -> None:
    spelling = Spelling()
    plan = spelling.begin({0: 2})
    for layer in RECURRENT.layers:
        wide = {
            name: values.double().requires_grad_()
            for name, values in states([spelling.after(plan.states[0])], layer).items()
        }
        spelling.memory.states.write(layer, plan.states, {name: values * 1 for name, values in wide.items()})
    spelling.commit(plan)
    spelling.check()
    assert not any(
        v.requires_grad for layer in RECURRENT.layers for v in remembered(spelling.memory, 0, layer).values()
    )


def test_a_recycled_row_shows_nothing_of_who_had_it() -> None:
    spelling = Spelling(rows=2)
    for _ in range(5):
        spelling.step({0: 3})
        spelling.memory.drop(0)
        del spelling.tokens[0]
        plan = spelling.begin({0: 1})
        for layer in RECURRENT.layers:
            assert_states(spelling.memory.states.read(layer, plan.states), [()], layer)
        spelling.memory.abandon()


def test_rows_that_only_ask_go_on_from_the_end_and_leave_nothing() -> None:
    spelling = Spelling()
    spelling.step({0: 3})
    before = all_of(spelling.memory)
    plan = spelling.begin({0: 2}, stores=False)
    for layer in RECURRENT.layers:
        assert_states(spelling.memory.states.read(layer, plan.states), [spelling.tokens[0]], layer)
    spelling.put(plan)
    spelling.memory.commit()
    assert all_of(spelling.memory) == before


def test_a_reserved_step_leaves_the_null_row_empty() -> None:
    spelling = Spelling()
    spelling.step({0: 3})
    before = all_of(spelling.memory)
    spelling.put(spelling.begin({0: 2, 1: 4}, reserve=True))
    spelling.memory.abandon()
    assert all_of(spelling.memory) == before


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_a_fork_costs_one_row_of_every_layer_once_it_goes_on() -> None:
    """A row is counted in bytes: the same in every layer, and no more."""
    elements = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
    one = sum(torch.Size(p.shape).numel() * elements[p.kind] for planes in RECURRENT.layers.values() for p in planes)
    spelling = Spelling(rows=8)
    memory = spelling.memory
    assert memory.storage.bytes == 9 * one

    def taken() -> int:
        return memory.storage.bytes * (memory.rows.capacity - memory.rows.free) // 9

    spelling.step({0: 3})
    assert taken() == one
    assert memory.fork(0, 1, 3) == 3
    spelling.tokens[1] = spelling.tokens[0]
    assert taken() == one
    spelling.step({1: 2})
    assert taken() == 2 * one
    spelling.step({0: 1, 1: 1})
    assert taken() == 3 * one, "where they part is kept to go back to"
    (parting,) = memory.rows.candidates()
    memory.rows.evict(parting.key)
    assert taken() == 2 * one
    with pytest.raises(BadRequest, match="not just a checkpoint of sequences"):
        memory.rows.evict(parting.key)


def test_the_rows_of_a_step_are_told_once_for_all_layers() -> None:
    spelling = Spelling()
    spelling.step({0: 1})
    plan = spelling.begin({0: 2, 1: 2})
    uploads: list[int] = []
    for layer in RECURRENT.layers:
        given = states([spelling.after(segment) for segment in plan.states], layer)
        with Made() as made:
            spelling.memory.states.read(layer, plan.states)
            spelling.memory.states.write(layer, plan.states, given)
        uploads.append(made.uploads)
    assert uploads == [2, 0, 0]


@pytest.mark.parametrize("group", [(), GROUPS])
def test_rows_count_towards_the_cap(group: Sequence[Group]) -> None:
    memory = Spelling(rows=8, groups=group).memory
    need = memory.storage.bytes + memory.storage.staging
    assert Spelling(rows=8, groups=group, max_bytes=need).memory.storage.bytes == memory.storage.bytes
    with pytest.raises(CapacityTooSmall, match=str(need)):
        Spelling(rows=8, groups=group, max_bytes=need - 1)


# -- a part of the tokens ---------------------------------------------------------------------------------------------


def test_of_each_feed_its_own_part_is_kept_and_only_parts_are_asked_for() -> None:
    spelling = Spelling()
    spelling.step({0: 1, 1: 2, 2: 3, 3: 4})
    spelling.step({0: 4, 1: 4, 2: 4, 3: 2}, {0: 3, 1: 0, 2: 4, 3: 1}, revertible=True)
    assert {seq: spelling.memory.length(seq) for seq in range(4)} == {0: 4, 1: 2, 2: 7, 3: 5}
    assert spelling.parts_computed == [(layer, {seq: n}) for layer in RECURRENT.layers for seq, n in ((0, 3), (3, 1))]


def test_parts_of_what_was_put_together_are_asked_for_together() -> None:
    spelling = Spelling()
    spelling.step({0: 4, 1: 4, 2: 4, 3: 3}, {0: 2, 1: 1, 2: 2, 3: 2}, revertible=True)
    assert spelling.parts_computed == [
        (layer, part) for layer in RECURRENT.layers for part in ({0: 2, 1: 1, 2: 2}, {3: 2})
    ]


def test_a_part_must_be_said_beforehand() -> None:
    spelling = Spelling()
    plan = spelling.begin({0: 3})
    spelling.put(plan)
    with pytest.raises(BadRequest, match=r"sequence 0 cannot be kept.*not begun as revertible"):
        spelling.memory.commit({0: 2})
    assert not spelling.parts_computed
    spelling.commit(plan)
    spelling.check()


@pytest.mark.parametrize("silent", RECURRENT.layers)
def test_a_part_is_refused_if_one_layer_cannot_tell_it(silent: int) -> None:
    """The step stays open, and all or nothing can be kept."""
    for accepted in ({}, {0: 0}):
        spelling = Spelling()
        plan = spelling.begin({0: 3, 1: 3}, revertible=True)
        spelling.put(plan)
        spelling.put(plan, [silent], at=False)  # again, and that is what counts
        with pytest.raises(NotSupported, match=f"sequence 0 cannot be kept, nor be a checkpoint: layer {silent} "):
            spelling.memory.commit({0: 2})
        spelling.commit(plan, accepted)
        spelling.check()


def test_what_was_put_last_says_what_a_part_is() -> None:
    spelling = Spelling()
    plan = spelling.begin({0: 3, 1: 2}, revertible=True)
    spelling.put(plan, at=False)
    for layer in RECURRENT.layers:
        for segments in ([plan.states[0]], [plan.states[1]]):
            wrong = states([(7,)], layer)
            spelling.memory.states.write(layer, segments, wrong, at=lambda indices, n, wrong=wrong: wrong)
    spelling.put(plan)
    spelling.commit(plan, {0: 1, 1: 1})
    spelling.check()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", RECURRENT.layers)
def test_a_step_is_kept_only_if_every_layer_has_put_every_state(missing: int) -> None:
    """Otherwise a row would have the content of an earlier step."""
    spelling = Spelling()
    plan = spelling.begin({0: 3, 1: 1})
    spelling.put(plan, [layer for layer in RECURRENT.layers if layer != missing])
    with pytest.raises(WrongStage, match=rf"layer {missing} .* \[0, 1\]"):
        spelling.memory.commit()
    first, second = plan.states
    spelling.memory.states.write(missing, [second], states([spelling.after(second)], missing))
    with pytest.raises(WrongStage, match=rf"layer {missing} .* \[0\]"):
        spelling.memory.commit()
    spelling.memory.states.write(missing, [first], states([spelling.after(first)], missing))
    spelling.commit(plan)
    spelling.check()


@pytest.mark.parametrize("end", ["abandon", "commit"])
def test_what_was_put_in_an_earlier_step_does_not_count(end: str) -> None:
    """Even where a step gets the same row again."""
    spelling = Spelling(rows=1)
    for _ in range(2):
        spelling.put(spelling.begin({0: 3}, revertible=True))
        spelling.memory.commit({0: 0}) if end == "commit" else spelling.memory.abandon()
    plan = spelling.begin({0: 3}, revertible=True)
    for accepted in ({}, {0: 2}):
        with pytest.raises(WrongStage, match=r"layer 3 .* \[0\]"):
            spelling.memory.commit(accepted)
    spelling.put(plan)
    spelling.commit(plan, {0: 2})
    spelling.check()


def test_who_keeps_nothing_needs_no_state() -> None:
    spelling = Spelling()
    spelling.begin({0: 3})
    spelling.memory.commit({0: 0})
    spelling.check()
    assert spelling.memory.length(0) == 0


def test_planes_must_be_all_of_the_layer_and_of_its_shape() -> None:
    spelling = Spelling()
    plan = spelling.begin({0: 3, 1: 3})
    right = states([(1,), (2,)], FIRST)
    name, *_ = right
    for wrong in (
        {},
        {name: right[name]},
        {**right, "other": right[name]},
        {**right, name: right[name][:1]},
        {**right, name: right[name][..., 1:]},
        {**right, name: right[name][0]},
    ):
        with pytest.raises(BadRequest, match=f"layer {FIRST} has (state planes|shape) "):
            spelling.memory.states.write(FIRST, plan.states, wrong)
    with pytest.raises(BadRequest, match="layer 20 is not recurrent"):
        spelling.memory.states.read(20, plan.states)
    spelling.put(plan)
    spelling.commit(plan)
    spelling.check()


def test_states_are_read_and_put_in_a_step_and_only_where_there_are_some() -> None:
    spelling = Spelling()
    segment = StateSegment(0, 0, 1, 0, 0)
    for call in (
        lambda: spelling.memory.states.read(FIRST, [segment]),
        lambda: spelling.memory.states.write(FIRST, [segment], states([(1,)], FIRST)),
    ):
        with pytest.raises(WrongStage, match="begin"):
            call()
    memory = Memory(GROUPS, cells={"cross": 8, "full": 8}, dtype=torch.float32, device="cpu", backend=Sdpa())
    assert (memory.rows.free, memory.rows.capacity) == (None, None)
    memory.begin(Batch((Feed(0, Span(0, 1)),)))
    assert memory.state_positions(0) is None
    with pytest.raises(BadRequest, match="the recurrent layers are none"):
        memory.states.read(FIRST, [segment])


# -- when something fails ---------------------------------------------------------------------------------------------


def life(groups: Sequence[Group] = ()) -> Spelling:
    """Two that share a state, one of them with points to go back to, and one of their own."""
    spelling = Spelling(groups=groups)
    spelling.step({0: 2}, keep_state=True)
    spelling.step({0: 3})
    spelling.memory.fork(0, 1, 5)
    spelling.tokens[1] = spelling.tokens[0]
    spelling.step({1: 1, 2: 4}, keep_state=True)
    return spelling


@pytest.mark.parametrize("groups", [(), GROUPS], ids=["recurrent", "hybrid"])
def test_begin_that_fails_changes_nothing(groups: Sequence[Group]) -> None:
    spelling = life(groups)
    before, broke = all_of(spelling.memory), 0
    for failing in failures():
        try:
            with failing:
                spelling.begin({0: 2, 4: 1, 2: 1}, keep_state=True)
        except Broken:
            broke += 1
            spelling.memory.check()
            assert all_of(spelling.memory) == before
    assert bool(broke) == bool(groups), "rows alone need no tensors"
    spelling.memory.abandon()
    assert all_of(spelling.memory) == before


def test_reading_and_putting_that_fail_leave_what_was_there() -> None:
    spelling = life()
    plan = spelling.begin({0: 2, 4: 1, 2: 2}, revertible=True)
    before = all_of(spelling.memory)
    broke = 0
    for failing in failures():
        try:
            with failing:
                for layer in RECURRENT.layers:
                    spelling.memory.states.read(layer, plan.states)
                spelling.put(plan)
        except Broken:
            broke += 1
            spelling.memory.check()
            assert all_of(spelling.memory) == before
            with pytest.raises(WrongStage):
                spelling.memory.commit()
    assert broke > 20
    spelling.commit(plan, {0: 1})
    spelling.check()


def test_a_state_that_was_half_put_again_must_be_put_once_more() -> None:
    """Unless nothing was written of it: then what was put before still counts."""
    refused = kept = 0
    for failing in failures():
        spelling = life()
        plan = spelling.begin({0: 2, 2: 2})
        spelling.put(plan)
        other = states([(7,), (8,)], FIRST)
        try:
            with failing:
                spelling.memory.states.write(FIRST, plan.states, other)
        except Broken:
            try:
                spelling.commit(plan)
                kept += 1
            except WrongStage:
                spelling.put(plan, [FIRST])
                spelling.commit(plan)
                refused += 1
            spelling.check()
    assert min(refused, kept) > 0


@pytest.mark.parametrize("then", [{}, {0: 1, 2: 1}, {0: 2, 2: 3}, {0: 0, 2: 1}, None], ids=str)
def test_a_commit_that_fails_can_be_made_otherwise(then: Mapping[int, int] | None) -> None:
    """At every operation in turn, the last of which is among those that write."""
    accepted, broke = {0: 1, 2: 2, 4: 1}, 0
    for failing in failures():
        spelling = life()
        free = spelling.memory.rows.free
        plan = spelling.begin({0: 3, 4: 3, 2: 4, 1: 2}, revertible=True)
        spelling.put(plan)
        before = all_of(spelling.memory)
        try:
            with failing:
                spelling.memory.commit(accepted)
        except Broken:
            broke += 1
            spelling.memory.check()
            assert all_of(spelling.memory) == before
            if then is None:
                spelling.memory.abandon()
                assert spelling.memory.rows.free == free
            else:
                spelling.commit(plan, then)
            spelling.check()
    assert broke > 20


@pytest.mark.parametrize("breaks", range(1, 7))
def test_a_layer_that_fails_to_say_what_a_part_is_leaves_the_step_open(
    breaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelling = life()
    plan = spelling.begin({0: 3, 2: 3, 1: 2}, revertible=True)
    honest = spelling.part
    calls = iter(range(1, 99))

    def part(*args: object) -> dict[str, Tensor]:
        if next(calls) == breaks:
            raise MemoryError
        return honest(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(spelling, "part", part)
    spelling.put(plan)
    before = all_of(spelling.memory)
    with pytest.raises(MemoryError):
        spelling.memory.commit({0: 1, 2: 2, 1: 1})
    spelling.memory.check()
    assert all_of(spelling.memory) == before
    spelling.commit(plan)
    spelling.check()


def test_a_part_of_another_shape_is_refused_and_the_step_can_be_kept_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    spelling = life()
    plan = spelling.begin({0: 3, 2: 3}, revertible=True)
    last = max(RECURRENT.layers)
    honest = spelling.part
    wrong = lambda layer, *args: states([(1,)] * 2, layer) if layer == last else honest(layer, *args)  # noqa: E731
    monkeypatch.setattr(spelling, "part", lambda *args: wrong(*args))
    spelling.put(plan)
    with pytest.raises(BadRequest, match=f"layer {last} has (state planes|shape) "):
        spelling.memory.commit({0: 1})
    wrong = honest
    spelling.commit(plan)
    spelling.check()


def test_an_input_that_cannot_be_written_opens_no_sequence() -> None:
    spelling = life(GROUPS)
    before = all_of(spelling.memory)
    planes = {30: (torch.ones(3, 1, 4), torch.ones(3, 1, 4))}
    broke = 0
    for failing in failures():
        try:
            with failing:
                spelling.memory.inputs.write(9, 3, planes)
        except Broken:
            broke += 1
            spelling.memory.check()
            assert all_of(spelling.memory) == before
    assert broke > 1
    assert (spelling.memory.length(9), spelling.memory.state_positions(9)) == (0, ())
    spelling.step({9: 2})


def test_edits_need_no_tensors() -> None:
    """So nothing can fail half way."""
    spelling = life(GROUPS)
    with FailsAt(1) as failing:
        assert spelling.memory.fork(0, 7, 4) == 2
        spelling.memory.remove(0, Span(2, spelling.memory.length(0)))
        spelling.memory.drop(1)
    assert not failing.reached
    spelling.tokens[7] = spelling.tokens[0] = spelling.tokens[0][:2]
    spelling.check()


def test_without_rows_no_sequence_can_begin() -> None:
    recurrent = Recurrent({0: (StatePlane("conv 0", (1, 1), "float32"),)})
    memory = Memory([], cells={}, dtype=torch.float32, device="cpu", backend=Sdpa(), recurrent=recurrent)
    with pytest.raises(CacheFull, match="need 1 rows"):
        memory.begin(Batch((Feed(0, Span(0, 1)),)))
    memory.begin(Batch((Feed(0, Span(0, 1)),)), reserve=True)
    memory.abandon()
