"""What goes first: by what would be lost with it, and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.cells.rows import Rows
from kvcellar.memory.policy import Candidate, first_to_go

CANDIDATES = st.builds(
    Candidate, st.just(0), st.integers(0, 500), st.integers(1, 9), st.integers(0, 50), st.just(0)
).map(lambda one: replace(one, saves=one.saves + 1))
LISTS = st.lists(CANDIDATES, min_size=1, max_size=30).map(
    lambda found: [replace(one, key=100 + number, number=number) for number, one in enumerate(found)]
)


@given(LISTS, st.randoms(use_true_random=False))
def test_the_order_in_which_candidates_are_offered_does_not_matter(found, random) -> None:
    mixed = list(found)
    random.shuffle(mixed)
    assert first_to_go(mixed) == first_to_go(found)


@given(LISTS)
def test_nothing_would_be_lost_less_and_of_equals_the_oldest_goes(found) -> None:
    gone = first_to_go(found)
    assert all(gone.loss <= one.loss for one in found)
    assert all(gone.number < one.number for one in found if one.loss == gone.loss and one is not gone)


@given(LISTS, st.sampled_from(["saves", "stands_for"]))
def test_what_saves_more_stays_longer_and_what_was_used_lately_too(found, name) -> None:
    gone = first_to_go(found)
    others = [one for one in found if one is not gone]
    worth = replace(gone, **{name: getattr(gone, name) * 10**9})
    if others:
        assert first_to_go([worth, *others]) is not worth
        old = replace(gone, age=gone.age + 1)
        assert first_to_go([old, *others]) is old


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(ValueError, match="empty"):
        first_to_go([])


class Shelf(Rows):
    """Rows, of which some are kept; the others are free, but for those in use."""

    def __init__(self, kept: list[Candidate], rows: int, used: int) -> None:
        super().__init__(rows)
        self._there, self._used = {one.key: one for one in kept}, used
        self.gone: list[int] = []

    @property
    def kept(self) -> int:
        return len(self._there)

    @property
    def free(self) -> int:
        assert self.capacity is not None
        return self.capacity - self._used - len(self._there)

    def candidates(self) -> list[Candidate]:
        return list(self._there.values())

    def evict(self, row: int) -> None:
        del self._there[row]
        self.gone.append(row)


@given(LISTS, st.integers(0, 30), st.integers(0, 12), st.integers(0, 10))
def test_no_more_is_evicted_than_the_limits_ask_for(found, most, spare, free) -> None:
    shelf = Shelf(found, rows=len(found) + 3 + free, used=3)
    shelf.trim(most=most, spare=spare)
    wanted = max(0, min(len(found) - most, spare - free))
    assert len(shelf.gone) == wanted
    assert shelf.gone == [one.key for one in sorted(found, key=lambda one: (one.loss, one.number))[:wanted]]
