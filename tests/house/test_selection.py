"""Cells that the default run plays cover what tests are parametrized with."""

from hypothesis import given
from hypothesis import strategies as st

from tests.selection import covering, mechanisms
from tests.zoo import ARCHS

CELLS = st.integers(1, 4).flatmap(
    lambda places: st.lists(st.tuples(*[st.sampled_from("abcd")] * places), min_size=1, max_size=30, unique=True)
)


def shown(cells):
    return [{place: frozenset((value,)) for place, value in enumerate(cell)} for cell in cells]


@given(CELLS, st.booleans())
def test_each_value_or_each_pair_is_in_a_cell_that_is_played(cells, pairs):
    places = range(len(cells[0]))
    played = [cells[at] for at in covering(shown(cells), pairs=pairs)]
    for a, b in [(a, b) for a in places for b in places if pairs or a == b]:
        assert {(cell[a], cell[b]) for cell in played} == {(cell[a], cell[b]) for cell in cells}


def test_cells_of_one_parameter_are_all_played():
    assert sorted(covering(shown([("a",), ("b",), ("c",)]), pairs=True)) == [0, 1, 2]


@given(st.lists(st.sampled_from(sorted(ARCHS)), min_size=1, unique=True), st.booleans())
def test_few_architectures_have_all_mechanisms_of_many(names, networks):
    cells = [{"name": mechanisms(ARCHS[name], networks=networks)} for name in names]
    few = [cells[at]["name"] for at in covering(cells, pairs=False)]
    assert frozenset().union(*few) == frozenset().union(*(cell["name"] for cell in cells))


def test_all_architectures_together_need_few():
    cells = [{"name": mechanisms(arch, networks=False)} for arch in ARCHS.values()]
    assert len(covering(cells, pairs=False)) <= 10
