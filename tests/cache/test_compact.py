"""Compaction: nothing is lost or doubled, shared cells stay shared, and it ends with few runs and no holes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.attention.sdpa import Sdpa
from kvcellar.errors import BadRequest, WrongStage
from tests.cache.told import Told
from tests.laws.watch import nothing_changes

law = settings(derandomize=True, deadline=None, max_examples=40)
SEQS = st.integers(0, 4)
MOVES = st.one_of(
    st.tuples(st.just("step"), st.dictionaries(SEQS, st.integers(1, 6), min_size=1)),
    st.tuples(st.just("fork"), st.tuples(SEQS, SEQS, st.integers(0, 30))),
    st.tuples(st.just("drop"), SEQS),
    st.tuples(st.just("compact"), st.integers(1, 30)),
)


def play(told: Told, moves) -> None:
    for name, what in moves:
        if name == "step" and sum(what.values()) <= min(told.memory.free().values()):
            told.step(what)
        elif name == "fork" and what[0] in told.tokens and what[0] != what[1]:
            told.tokens[what[1]] = told.tokens[what[0]][: told.memory.fork(*what)]
        elif name == "drop" and what in told.tokens:
            told.memory.drop(what)
            del told.tokens[what]
        elif name == "compact":
            free, runs = told.memory.free(), told.memory.storage.bytes
            assert 0 <= told.memory.storage.compact(what) <= what
            assert (told.memory.free(), told.memory.storage.bytes) == (free, runs)
        told.check()


def compacted(told: Told, budget: int) -> int:
    pieces = 0
    while told.memory.storage.compact(budget):
        told.check()
        pieces += 1
        assert pieces < 2000, "it never ends"
    return pieces


@law
@given(st.lists(MOVES, max_size=25), st.sampled_from([1, 3, 64]))
def test_it_loses_nothing_and_ends_without_holes(moves, budget: int) -> None:
    told = Told(Sdpa(), 48, names=["full", "window", "chunk"])
    play(told, moves)
    before = told.runs(0)
    compacted(told, budget)
    for held in told.memory._stores.all:
        assert held.cells.highest == held.cells.used or not held.cells.free
    if told.memory.free()["full"]:
        assert told.runs(0) <= before, "what only shares beginnings never gets more runs"
    with nothing_changes(told.memory):
        assert told.memory.storage.compact(100) == 0
    told.step({9: min(3, *told.memory.free().values())}) if min(told.memory.free().values()) else None
    told.check()


@pytest.mark.parametrize("budget", [1, 2, 5, 1000])
def test_sequences_that_share_nothing_become_one_run_each(budget: int) -> None:
    told = Told(Sdpa(), 40, names=["full"])
    for _ in range(6):
        for seq in range(5):
            told.step({seq: 1})
    told.memory.drop(3)
    del told.tokens[3]
    assert told.runs(0) > 4
    compacted(told, budget)
    assert told.runs(0) == 4


def test_the_run_of_three_behind_a_gap_of_one_keeps_its_order() -> None:
    """Moving data in one direction and what is known of it in the other swaps or loses cells; here both go together."""
    told = Told(Sdpa(), 16, names=["full"])
    told.step({0: 1})
    told.step({1: 1})
    told.step({2: 3})
    told.memory.drop(1)
    del told.tokens[1]
    compacted(told, 64)
    assert (told.runs(0), told.memory._stores.all[0].cells.highest) == (2, 4)


def test_what_was_moved_is_read_where_it_is_and_shared_cells_are_moved_once() -> None:
    told = Told(Sdpa(), 32, names=["full"])
    told.step({0: 8})
    told.step({1: 8})
    told.tokens[2] = told.tokens[1][: told.memory.fork(1, 2, 6)]
    told.memory.drop(0)
    del told.tokens[0]
    free = told.memory.free()
    assert told.memory.storage.compact(100) == 8
    assert told.memory.free() == free, "two sequences still share six cells"
    told.begin({1: 2, 2: 1})
    assert [len(row) for row in told.visible(0)] == [9, 10, 7]
    told.attends(0)
    told.memory.abandon()
    told.check()


def test_it_waits_for_a_step_to_end_and_wants_a_budget() -> None:
    told = Told(Sdpa())
    told.begin({0: 3})
    with nothing_changes(told.memory), pytest.raises(WrongStage):
        told.memory.storage.compact(10)
    told.memory.abandon()
    with pytest.raises(BadRequest, match="one or more"):
        told.memory.storage.compact(0)
    assert told.memory.storage.compact(5) == 0
