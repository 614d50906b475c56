"""Cells that the default run plays cover what tests are parametrized with."""

from hypothesis import given
from hypothesis import strategies as st

from tests.selection import architectures, covering, mechanisms
from tests.zoo import ARCHS

CELLS = st.integers(1, 4).flatmap(
    lambda places: st.lists(st.tuples(*[st.sampled_from("abcd")] * places), min_size=1, max_size=30, unique=True)
)


@given(CELLS, st.booleans())
def test_each_value_or_each_pair_is_in_a_cell_that_is_played(cells, pairs):
    places = range(len(cells[0]))
    played = [cells[at] for at in covering(cells, pairs=pairs)]
    looks = [(a, b) for a in places for b in places if pairs or a == b]
    for a, b in looks:
        assert {(cell[a], cell[b]) for cell in played} == {(cell[a], cell[b]) for cell in cells}


def test_cells_of_one_parameter_are_all_played():
    assert sorted(covering([(name,) for name in "abc"], pairs=True)) == [0, 1, 2]


@given(st.sets(st.sampled_from(sorted(ARCHS)), min_size=1), st.booleans())
def test_few_architectures_have_all_mechanisms_of_many(names, networks):
    few = architectures(names, networks=networks)
    assert set(few) <= names
    shown = [
        frozenset[str]().union(*(mechanisms(ARCHS[name], networks=networks) for name in of)) for of in (few, names)
    ]
    assert shown[0] == shown[1]


def test_all_architectures_together_need_few():
    assert len(architectures(ARCHS, networks=False)) <= 10
