import gc
from types import SimpleNamespace
from typing import Any

import pytest

from kvcellar.cli.serve import load
from kvcellar.collector import RARE, collect, settle, settled
from tests.small_process import in_small_process

LIVE = 600_000


class Cycle:
    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


def test_no_collection_while_requests_are_served_looks_at_what_was_there_or_has_outlived_one() -> None:
    in_small_process(_fill)


def _fill() -> None:
    """What a collection of the oldest generation looks at is in a generation when it begins."""
    looked = list[int]()

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked.append(sum(len(gc.get_objects(generation)) for generation in range(3)))

    there = [[number] for number in range(LIVE)]
    gc.callbacks.append(count)
    with settled():
        del looked[:]
        stay = [[number] for number in range(LIVE)]
        assert len(looked) > 3
        assert max(looked) < 0.4 * LIVE  # the first one comes once a quarter of what was there is new
        assert gc.get_freeze_count() > LIVE
    assert len(there) == len(stay)
    assert gc.get_freeze_count() == 0
    assert gc.callbacks == [count]


@pytest.mark.parametrize("whole", [RARE, None])
def test_what_ends_in_cycles_is_freed_within_a_bound_while_requests_are_served(whole) -> None:
    in_small_process(_cycles, whole)


def _cycles(whole: int | None) -> None:
    settle(whole)
    most = 0
    for _ in range(LIVE):
        Cycle()
        most = max(most, Cycle.alive)
    assert most < 0.2 * LIVE


@pytest.mark.parametrize(("whole", "freed"), [(3, True), (None, False)])
def test_cycles_that_have_outlived_a_collection_are_freed_by_one_of_all_objects(whole, freed) -> None:
    in_small_process(_outlived, whole, freed)


def _outlived(whole: int | None, freed: bool) -> None:
    settle(whole)
    held = [Cycle() for _ in range(LIVE // 2)]
    del held
    stay = [[number] for number in range(LIVE)]
    assert (Cycle.alive < LIVE // 8) == freed
    collect()
    assert Cycle.alive == 0
    assert len(stay) == LIVE


def test_a_server_is_settled_once_its_models_are_loaded() -> None:
    in_small_process(_load)


def _load() -> None:
    loaded: list[int] = []
    hosted: Any = SimpleNamespace(load=lambda: loaded.append(gc.get_freeze_count()), engines=[])
    load(hosted, [], lambda text: None)
    assert loaded == [0]
    assert gc.get_freeze_count() > 0
