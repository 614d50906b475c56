"""The map of cells equals a list with the owner of each cell, and has a bounded number of runs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.control.survey import Holding, mapped
from kvcellar.engine.control_replies import RUNS, CellMap, Kind
from kvcellar.memory.plan import Run

CELLS = 40


@st.composite
def pictures(draw: st.DrawFn) -> tuple[list[Run], list[Holding]]:
    """Free runs, and holdings that may overlap them and each other."""
    runs = st.builds(lambda start, n: Run(start, min(n, CELLS + 1 - start)), st.integers(1, CELLS), st.integers(1, 9))
    holding = st.builds(
        lambda kind, which, found: Holding(0, kind, which, tuple(found)),
        st.sampled_from(["kept", "request"]),
        st.integers(0, 3),
        st.lists(runs, max_size=3),
    )
    return draw(st.lists(runs, max_size=3)), draw(st.lists(holding, max_size=5))


def slowly(free: list[Run], holdings: list[Holding]) -> list[tuple[Kind, int | None]]:
    """By cell: what it is used for. The last entry of the tree that has a cell counts."""
    found: list[tuple[Kind, int | None]] = []
    for cell in range(1, CELLS + 1):
        own = [one for one in holdings if any(run.cell <= cell < run.end for run in one.runs)]
        requests = {one.which for one in own if one.kind == "request"}
        kept = [one.which for one in own if one.kind == "kept"]
        if any(run.cell <= cell < run.end for run in free):
            found.append(("free", None))
        elif requests:
            found.append(("request", *requests) if len(requests) == 1 else ("shared", None))
        else:
            found.append(("kept", kept[-1]) if kept else ("other", None))
    return found


def unrolled(found: CellMap) -> list[tuple[Kind, int | None]]:
    return [(run.kind, run.which) for run in found.runs for _ in range(run.cells)]


@given(pictures())
def test_a_map_has_the_owner_of_each_cell(picture):
    free, holdings = picture
    found, expected = mapped(CELLS, free, holdings), slowly(free, holdings)
    assert found.cells_each == 1
    assert unrolled(found) == expected
    assert found.counts == {kind: sum(one == kind for one, _ in expected) for kind in found.counts}
    assert all(one[1:] != other[1:] for one, other in zip(found.runs, found.runs[1:], strict=False))


@pytest.mark.parametrize("cells", [0, 1, 5000, 5001])
def test_more_runs_than_can_be_shown_are_drawn_as_the_busiest_cell(cells):
    chance = random.Random(cells)
    free = [Run(cell, 1) for cell in range(1, cells + 1) if chance.random() < 0.5]
    used = tuple(Run(cell, 1) for cell in range(1, cells + 1, 97))
    found = mapped(cells, [run for run in free if run not in used], [Holding(0, "request", 7, used)])
    assert len(found.runs) <= RUNS
    assert sum(run.cells for run in found.runs) == sum(found.counts.values()) == cells
    assert found.counts["request"] == len(used)
    assert sum(run.kind == "request" for run in found.runs) >= min(len(used), 1)
