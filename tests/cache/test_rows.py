"""Rows as a unit: references, eviction of checkpoints, positions to which a sequence can be cut, cost of a step."""

from collections.abc import Mapping, Sequence

import pytest

from kvcellar.errors import BadRequest, CacheFull
from kvcellar.memory.cells import rows as counted
from kvcellar.memory.cells.rows import NAME, SequenceStates, StepRows
from kvcellar.memory.plan import Batch, Feed, StateSegment
from kvcellar.memory.spans import Span
from tests.cache.test_cost import lines


class Rows(counted.Rows):
    """Rows, and sequences that have only states. They are trimmed after every change, to `most` that are kept, or
    to `spare` free ones (None: always)."""

    def __init__(self, capacity: int, most: int, spare: int | None = None) -> None:
        super().__init__(capacity)
        self._most, self._spare = most, capacity if spare is None else spare
        self.states: dict[int, SequenceStates] = {}
        self.step = StepRows(self)

    def tidy(self) -> None:
        self.trim(most=self._most, spare=self._spare)

    def of(self, seq: int) -> SequenceStates:
        return self.states.setdefault(seq, SequenceStates(self))

    def points(self, seq: int) -> tuple[int, ...] | None:
        return self.of(seq).positions

    def end(self, seq: int) -> int:
        return self.of(seq).end

    def begin(self, batch: Batch) -> tuple[StateSegment, ...]:
        return self.step.begin(batch, lambda seq: self.of(seq).row)

    def commit(self, batch: Batch, counts: Sequence[int]) -> None:
        for feed, kept in zip(batch.feeds, counts, strict=True):
            if feed.stores and kept:
                self.of(feed.seq).advance(self.step.new(feed.seq), feed.pos.start + kept)
                if feed.keep_state and kept == len(feed.pos):
                    self.of(feed.seq).keep()
        self.step.end()
        self.tidy()

    def fork(self, src: int, dst: int, kept: int) -> None:
        before = self.states.pop(dst, None)
        self.states[dst] = self.of(src).fork(kept)
        if before is not None:
            before.close()
        self.tidy()

    def cut(self, seq: int, kept: int) -> None:
        self.of(seq).cut(kept)
        self.tidy()

    def drop(self, seq: int) -> None:
        self.states.pop(seq).close()
        self.tidy()


def checked(rows: Rows) -> None:
    rows.check(rows.states.values(), rows.step.held())


def batch(rows: Rows, sizes: Mapping[int, int], *, keep_state: bool = False, queries: Sequence[int] = ()) -> Batch:
    return Batch(
        tuple(
            Feed(seq, Span(rows.end(seq), rows.end(seq) + n), seq not in queries, keep_state, revertible=True)
            for seq, n in sizes.items()
        )
    )


def step(
    rows: Rows, sizes: Mapping[int, int], *, keep_state: bool = False, keep: Mapping[int, int] | None = None
) -> dict[int, tuple[int, int]]:
    """So many tokens for each sequence; returns which row each read and which it wrote."""
    made = batch(rows, sizes, keep_state=keep_state)
    rows.step.admit(made, rows.end)
    segments = rows.begin(made)
    checked(rows)
    rows.commit(made, [(keep or {}).get(feed.seq, len(feed.pos)) for feed in made.feeds])
    checked(rows)
    return {segment.seq: (segment.read, segment.write) for segment in segments}


def checkpointed(rows: Rows, seq: int, *places: int) -> None:
    """Feed a new sequence up to each of these positions, and keep a checkpoint there."""
    for before, pos in zip([0, *places], places, strict=False):
        step(rows, {seq: pos - before}, keep_state=True)


# -- a step -----------------------------------------------------------------------------------------------------------


def test_a_step_reads_where_the_sequence_ends_and_writes_a_row_of_its_own() -> None:
    rows = Rows(4, 0)
    first = step(rows, {5: 3, 6: 1})
    assert {read for read, _ in first.values()} == {0}
    assert len({write for _, write in first.values()} - {0}) == 2
    second = step(rows, {6: 2})
    assert second[6][0] == first[6][1]
    assert second[6][1] not in (0, first[5][1], first[6][1])
    assert (rows.free, rows.end(5), rows.end(6), rows.end(7)) == (2, 3, 3, 0)


def test_segments_follow_the_rows_of_the_step() -> None:
    rows = Rows(4, 0)
    segments = rows.begin(batch(rows, {5: 3, 6: 1, 7: 2}))
    assert [(s.seq, s.row, s.length) for s in segments] == [(5, 0, 3), (6, 3, 1), (7, 4, 2)]


def test_an_abandoned_step_frees_its_rows() -> None:
    rows = Rows(3, 2)
    checkpointed(rows, 0, 4)
    for _ in range(3):
        rows.begin(batch(rows, {0: 1, 1: 2}, keep_state=True))
        assert rows.free == 0
        rows.step.end()
        checked(rows)
        assert (rows.free, rows.points(0), rows.points(1), rows.end(1)) == (2, (4,), (), 0)


def test_a_sequence_that_accepts_nothing_keeps_its_row() -> None:
    rows = Rows(4, 0)
    ((_, before),) = step(rows, {0: 3}).values()
    step(rows, {0: 2, 1: 2}, keep={0: 0, 1: 0}, keep_state=True)
    assert (rows.end(0), rows.end(1), rows.free) == (3, 0, 3)
    assert step(rows, {0: 1})[0][0] == before
    assert step(rows, {1: 1})[1][0] == 0


def test_a_sequence_that_accepts_a_part_has_the_row_of_the_step_and_no_checkpoint() -> None:
    rows = Rows(4, 4)
    ((_, write),) = step(rows, {0: 5}, keep={0: 2}, keep_state=True).values()
    assert (rows.end(0), rows.points(0)) == (2, (2,))
    assert step(rows, {0: 1})[0][0] == write
    assert rows.points(0) == (3,)


def test_query_only_rows_take_nothing_and_change_nothing() -> None:
    rows = Rows(1, 0)
    ((_, own),) = step(rows, {0: 3}).values()
    querying = batch(rows, {0: 2}, queries=[0])
    rows.step.admit(querying, rows.end)
    (segment,) = rows.begin(querying)
    assert (segment.read, segment.write, rows.free) == (own, 0, 0)
    rows.commit(querying, [2])
    checked(rows)
    assert (rows.end(0), rows.points(0)) == (3, (3,))


def test_too_few_rows_are_counted_as_rows() -> None:
    rows = Rows(2, 0)
    step(rows, {0: 1})
    with pytest.raises(CacheFull, match="2 rows") as full:
        rows.step.admit(batch(rows, {0: 1, 1: 1}), rows.end)
    assert (full.value.group, full.value.need, full.value.free) == (NAME, 2, 1)
    rows.step.admit(batch(rows, {0: 1, 1: 1}, queries=[1]), rows.end)


@pytest.mark.parametrize("start", [0, 2, 4])
def test_query_only_rows_must_begin_at_the_end(start: int) -> None:
    """This is the error even if too few rows are free: more rows would not help."""
    rows = Rows(1, 0)
    step(rows, {0: 3})
    wrong = Feed(0, Span(start, start + 1), stores=False)
    new = (Feed(1, Span(0, 1)), Feed(2, Span(0, 1)))
    with pytest.raises(BadRequest, match=f"sequence 0 must begin at its end 3, not at {start}"):
        rows.step.admit(Batch((*new, wrong)), rows.end)


def test_a_step_that_takes_more_rows_than_there_are_can_still_end() -> None:
    rows = Rows(2, 0)
    with pytest.raises(CacheFull):
        rows.begin(batch(rows, {0: 1, 1: 1, 2: 1}))
    rows.step.end()
    checked(rows)
    assert rows.free == 2


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_costs_no_row_until_one_continues_and_then_one() -> None:
    rows = Rows(6, 0)
    step(rows, {0: 3})
    rows.fork(0, 1, 3)
    rows.fork(0, 2, 3)
    checked(rows)
    assert rows.free == 5
    step(rows, {1: 1})
    assert rows.free == 4
    step(rows, {0: 1})
    assert rows.free == 3
    step(rows, {2: 1})
    assert rows.free == 3, "a row is held though there is no sequence, and no checkpoint is allowed"


def test_both_have_a_checkpoint_where_a_fork_begins() -> None:
    rows = Rows(6, 1)
    step(rows, {0: 3})
    rows.fork(0, 1, 3)
    step(rows, {0: 1, 1: 2})
    assert (rows.points(0), rows.points(1), rows.kept) == ((3, 4), (3, 5), 1)


def test_a_fork_shares_the_checkpoints_up_to_where_it_begins() -> None:
    rows = Rows(8, 5)
    checkpointed(rows, 0, 2, 4, 6, 9)
    rows.fork(0, 1, 4)
    rows.fork(0, 2, 0)
    checked(rows)
    assert (rows.points(0), rows.points(1), rows.points(2)) == ((2, 4, 6, 9), (2, 4), ())
    assert (rows.end(1), rows.end(2), rows.free) == (4, 0, 4)
    assert step(rows, {1: 1, 2: 1})[2][0] == 0


@pytest.mark.parametrize("checkpoints", [0, 1, 5])
def test_a_sequence_can_be_forked_onto_one_that_alone_keeps_what_is_shared(checkpoints: int) -> None:
    """The target holds the row that is shared, and is dropped by the fork."""
    rows = Rows(4, checkpoints)
    ((_, shared),) = step(rows, {0: 3}).values()
    rows.fork(0, 1, 3)
    step(rows, {0: 2})
    assert rows.of(0).deepest(4) == 3
    rows.fork(0, 1, 3)
    checked(rows)
    assert (rows.end(1), rows.points(0)) == (3, (3, 5))
    assert step(rows, {1: 1})[1][0] == shared


# -- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pos", range(12))
def test_a_sequence_can_be_cut_to_its_checkpoints_only(pos: int) -> None:
    rows = Rows(6, 5)
    checkpointed(rows, 0, 2, 5, 6)
    ((_, own),) = step(rows, {0: 3}).values()
    deepest = max(point for point in (0, 2, 5, 6, 9) if point <= pos)
    assert rows.of(0).deepest(pos) == deepest
    there = {0: 0, 9: own, **rows.of(0).checkpoints}[deepest]
    rows.cut(0, deepest)
    checked(rows)
    assert rows.end(0) == deepest
    assert rows.points(0) == tuple(point for point in (2, 5, 6, 9) if point <= deepest)
    assert rows.free == 6 - len(rows.points(0))
    assert step(rows, {0: 1})[0][0] == there


def test_a_state_kept_between_steps_is_a_checkpoint_once_the_sequence_continues() -> None:
    rows = Rows(4, 2)
    ((_, own),) = step(rows, {0: 3}).values()
    for _ in range(2):  # once is enough
        rows.of(0).keep()
        checked(rows)
        assert (rows.points(0), rows.kept, rows.free) == ((3,), 0, 3)
    step(rows, {0: 2})
    assert (rows.points(0), rows.kept, rows.free) == ((3, 5), 1, 2)
    rows.cut(0, 3)
    assert step(rows, {0: 1})[0][0] == own
    rows.of(1).keep()
    checked(rows)
    assert rows.points(1) == (), "the sequence is empty"


def test_rows_of_a_dropped_sequence_are_free_unless_shared() -> None:
    rows = Rows(8, 5)
    checkpointed(rows, 0, 2, 4, 6)
    rows.fork(0, 1, 4)
    rows.drop(0)
    checked(rows)
    assert (rows.free, rows.points(1), rows.points(0), rows.end(0)) == (6, (2, 4), (), 0)
    rows.drop(1)
    checked(rows)
    assert rows.free == 8


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_without_a_budget_only_ends_are_held() -> None:
    rows = Rows(4, 0)
    checkpointed(rows, 0, 2, 4, 6)
    assert (rows.points(0), rows.free) == ((6,), 3)


def test_a_checkpoint_at_the_end_does_not_count() -> None:
    rows = Rows(8, 1)
    for seq in range(4):
        checkpointed(rows, seq, 3)
    assert (rows.kept, rows.free) == (0, 4)
    step(rows, dict.fromkeys(range(4), 1))
    assert (rows.kept, rows.free) == (1, 3)


def test_the_checkpoint_that_saves_least_is_evicted_first() -> None:
    rows = Rows(9, 3)
    checkpointed(rows, 0, 10, 12, 20)
    step(rows, {0: 1})
    assert rows.points(0) == (10, 12, 20, 21)
    step(rows, {0: 4}, keep_state=True)
    assert rows.points(0) == (10, 12, 20, 25), "its end costs nothing"
    step(rows, {0: 1})
    assert rows.points(0) == (10, 20, 25, 26), "12 is only 2 behind 10"
    step(rows, {0: 1}, keep_state=True)
    step(rows, {0: 1})
    assert rows.points(0) == (10, 20, 25, 28), "and 27 only 2 behind 25"


def test_of_those_that_save_as_much_the_oldest_is_evicted_first() -> None:
    rows = Rows(9, 1)
    checkpointed(rows, 0, 5)
    checkpointed(rows, 1, 5)
    step(rows, {1: 1})
    step(rows, {0: 1})
    assert (rows.points(0), rows.points(1)) == ((6,), (5, 6))


@pytest.mark.parametrize("fork", [False, True])
def test_a_checkpoint_that_is_resumed_from_is_as_young_as_a_new_one(fork: bool) -> None:
    rows = Rows(9, 2)
    for seq, pos in ((0, 10), (1, 11)):
        checkpointed(rows, seq, pos)
        step(rows, {seq: 1})
    for _ in range(3):
        if fork:
            rows.fork(0, 3, 10)
            rows.drop(3)
        else:
            rows.cut(0, 10)
            step(rows, {0: 1})
    checkpointed(rows, 2, 10)
    step(rows, {2: 1})
    assert [rows.points(seq) for seq in range(3)] == [(10, 11), (12,), (10, 11)]


def test_a_shared_checkpoint_saves_for_each_sequence() -> None:
    rows = Rows(9, 1)
    checkpointed(rows, 0, 8)
    for seq in (1, 2):
        rows.fork(0, seq, 8)
    checkpointed(rows, 3, 11)
    step(rows, dict.fromkeys(range(4), 1))
    assert [rows.points(seq) for seq in range(4)] == [(8, 9), (8, 9), (8, 9), (12,)], "thrice 8, at twice the age"
    rows.drop(1)
    checkpointed(rows, 1, 11)
    step(rows, {1: 1})
    assert [rows.points(seq) for seq in range(4)] == [(9,), (11, 12), (9,), (12,)], "twice 8, at three times the age"


def test_what_an_evicted_checkpoint_saved_is_saved_by_the_next() -> None:
    rows = Rows(9, 2)
    checkpointed(rows, 0, 20, 23, 40)
    step(rows, {0: 1})
    assert rows.points(0) == (20, 40, 41), "23 saved 3"
    checkpointed(rows, 1, 9)
    step(rows, {1: 1})
    assert (rows.points(0), rows.points(1)) == ((20, 40, 41), (10,)), "half of 17 is less than 9, half of 20 is not"


def test_a_checkpoint_counts_for_the_evicted_ones_behind_it() -> None:
    rows = Rows(9, 2)
    checkpointed(rows, 1, 14)
    checkpointed(rows, 0, 10, 11)
    step(rows, {0: 1, 1: 1})
    assert (rows.points(0), rows.points(1)) == ((10, 12), (14, 15)), "11 saved 1"
    checkpointed(rows, 2, 6)
    step(rows, {2: 1})
    assert [rows.points(seq) for seq in range(3)] == [(10, 12), (15,), (6, 7)], "10 saves less than 14, but twice"


@pytest.mark.parametrize("forks", [0, 5])
def test_a_checkpoint_does_not_count_for_more_because_it_was_shared(forks: int) -> None:
    """A shared checkpoint saves for each sequence while they exist. What was evicted behind it was one checkpoint."""
    rows = Rows(20, 2)
    checkpointed(rows, 0, 10, 11)
    step(rows, {0: 1})
    others = range(3, 3 + forks)
    for seq in others:
        rows.fork(0, seq, 12)
    checkpointed(rows, 1, 11)
    step(rows, {1: 1})
    assert [rows.points(seq) for seq in (0, 1, *others)] == [(10, 12), (11, 12), *[(10, 12)] * forks], "11 saved 1"
    for seq in others:
        rows.drop(seq)
    checkpointed(rows, 2, 90)
    step(rows, {2: 1})
    assert [rows.points(seq) for seq in range(3)] == [(12,), (11, 12), (90, 91)], "twice 10, but old"


def test_what_a_checkpoint_saved_before_does_not_count() -> None:
    rows = Rows(9, 2)
    checkpointed(rows, 0, 10, 12, 15)
    step(rows, {0: 1})
    assert rows.points(0) == (10, 15, 16), "15 saved 3 as long as 12 was there; now it saves 5"
    checkpointed(rows, 1, 2)
    step(rows, {1: 1})
    assert (rows.points(0), rows.points(1)) == ((10, 15, 16), (3,)), "half of 3 would be less than 2; half of 5 is not"


@pytest.mark.parametrize("checkpoints", [10, 20])
def test_the_more_is_cut_the_more_may_be_computed_again(checkpoints: int) -> None:
    """Few checkpoints of a long text cannot be near to every position. They are denser towards its end."""
    rows = Rows(checkpoints + 2, checkpoints)
    for _ in range(200):
        step(rows, {0: 10}, keep_state=True)
    step(rows, {0: 1})
    lost = {back: 2000 - back - rows.of(0).deepest(2000 - back) for back in range(10, 2000, 10)}
    assert all(lost[back] <= back + 600 / checkpoints for back in lost), "a third of what even places would cost"
    assert max(lost.values()) < 2 * 2000 / checkpoints


def test_more_is_kept_while_spare_rows_are_free() -> None:
    rows = Rows(7, 1, 2)
    checkpointed(rows, 0, 10, 20, 30, 40)
    step(rows, {0: 1})
    assert (rows.points(0), rows.kept, rows.free) == ((10, 20, 30, 40, 41), 4, 2)
    step(rows, {1: 1})
    assert (rows.kept, rows.free) == (3, 2), "one more has a state of its own"
    step(rows, {0: 1, 1: 1}, keep_state=True)
    step(rows, {0: 1, 1: 1})
    assert (rows.kept, rows.free) == (3, 2), "what a step checkpoints does not take the rows of the next one"
    for seq in (2, 3, 4):
        step(rows, {seq: 1})
    assert (rows.kept, rows.free) == (1, 1), "as many as are allowed stay in any case"


# -- cost -------------------------------------------------------------------------------------------------------------


def test_a_step_costs_the_same_however_many_sequences_and_checkpoints_there_are() -> None:
    def crowd(sequences: int) -> Rows:
        rows = Rows(20 * sequences + 200, 20 * sequences + 200)
        for seq in range(sequences):
            for _ in range(8):
                made = batch(rows, {seq: 3}, keep_state=True)
                rows.begin(made)
                rows.commit(made, [3])
        return rows

    def steps(rows: Rows) -> None:
        for _ in range(50):
            made = batch(rows, {0: 3, 1: 1, 2: 2}, keep_state=True)
            rows.step.admit(made, rows.end)
            rows.begin(made)
            rows.commit(made, [3, 1, 0])

    few, many = crowd(8), crowd(256)
    assert lines(lambda: steps(many)) < 1.5 * lines(lambda: steps(few))
