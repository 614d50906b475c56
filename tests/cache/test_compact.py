"""Compaction: nothing is lost or doubled, shared cells stay shared, and it ends with few runs and no holes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest, WrongStage
from kvcellar.memory.attention.sdpa import Sdpa
from tests.cache.tagged import Tagged
from tests.laws.watch import highest, nothing_changes

law = settings(derandomize=True, deadline=None, max_examples=40)
SEQS = st.integers(0, 4)
MOVES = st.one_of(
    st.tuples(st.just("step"), st.dictionaries(SEQS, st.integers(1, 6), min_size=1)),
    st.tuples(st.just("fork"), st.tuples(SEQS, SEQS, st.integers(0, 30))),
    st.tuples(st.just("drop"), SEQS),
    st.tuples(st.just("compact"), st.integers(1, 30)),
)


def play(tagged: Tagged, moves) -> None:
    for name, what in moves:
        if name == "step" and sum(what.values()) <= min(tagged.memory.free().values()):
            tagged.step(what)
        elif name == "fork" and what[0] in tagged.tokens and what[0] != what[1]:
            tagged.tokens[what[1]] = tagged.tokens[what[0]][: tagged.memory.fork(*what)]
        elif name == "drop" and what in tagged.tokens:
            tagged.memory.drop(what)
            del tagged.tokens[what]
        elif name == "compact":
            free, runs = tagged.memory.free(), tagged.memory.storage.bytes
            assert 0 <= tagged.memory.storage.compact(what) <= what
            assert (tagged.memory.free(), tagged.memory.storage.bytes) == (free, runs)
        tagged.check()


def compacted(tagged: Tagged, budget: int) -> int:
    pieces = 0
    while tagged.memory.storage.compact(budget):
        tagged.check()
        pieces += 1
        assert pieces < 2000, "it never ends"
    return pieces


@law
@given(st.lists(MOVES, max_size=25), st.sampled_from([1, 3, 64]))
def test_it_loses_nothing_and_ends_without_holes(moves, budget: int) -> None:
    tagged = Tagged(Sdpa(), 48, names=["full", "window", "chunk"])
    play(tagged, moves)
    before = tagged.runs(0)
    compacted(tagged, budget)
    for held in tagged.memory.storage.stores:
        assert highest(held.cells) == held.cells.used or not held.cells.free
    if tagged.memory.free()["full"]:
        assert tagged.runs(0) <= before, "what only shares beginnings never gets more runs"
    with nothing_changes(tagged.memory):
        assert tagged.memory.storage.compact(100) == 0
    tagged.step({9: min(3, *tagged.memory.free().values())}) if min(tagged.memory.free().values()) else None
    tagged.check()


@pytest.mark.parametrize("budget", [1, 2, 5, 1000])
def test_sequences_that_share_nothing_become_one_run_each(budget: int) -> None:
    tagged = Tagged(Sdpa(), 40, names=["full"])
    for _ in range(6):
        for seq in range(5):
            tagged.step({seq: 1})
    tagged.memory.drop(3)
    del tagged.tokens[3]
    assert tagged.runs(0) > 4
    compacted(tagged, budget)
    assert tagged.runs(0) == 4


def test_the_run_of_three_behind_a_gap_of_one_keeps_its_order() -> None:
    """Moving data in one direction and what is known of it in the other swaps or loses cells; here both go together."""
    tagged = Tagged(Sdpa(), 16, names=["full"])
    tagged.step({0: 1})
    tagged.step({1: 1})
    tagged.step({2: 3})
    tagged.memory.drop(1)
    del tagged.tokens[1]
    compacted(tagged, 64)
    assert (tagged.runs(0), highest(tagged.memory.storage.stores[0].cells)) == (2, 4)


def test_what_was_moved_is_read_where_it_is_and_shared_cells_are_moved_once() -> None:
    tagged = Tagged(Sdpa(), 32, names=["full"])
    tagged.step({0: 8})
    tagged.step({1: 8})
    tagged.tokens[2] = tagged.tokens[1][: tagged.memory.fork(1, 2, 6)]
    tagged.memory.drop(0)
    del tagged.tokens[0]
    free = tagged.memory.free()
    assert tagged.memory.storage.compact(100) == 8
    assert tagged.memory.free() == free, "two sequences still share six cells"
    tagged.begin({1: 2, 2: 1})
    assert [len(row) for row in tagged.visible(0)] == [9, 10, 7]
    tagged.attends(0)
    tagged.memory.abandon()
    tagged.check()


def test_it_waits_for_a_step_to_end_and_wants_a_budget() -> None:
    tagged = Tagged(Sdpa())
    tagged.begin({0: 3})
    with nothing_changes(tagged.memory), pytest.raises(WrongStage):
        tagged.memory.storage.compact(10)
    tagged.memory.abandon()
    with pytest.raises(BadRequest, match="one cell or more"):
        tagged.memory.storage.compact(0)
    assert tagged.memory.storage.compact(5) == 0
