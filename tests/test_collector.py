import gc
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcellar.cli.serve import load
from kvcellar.collector import RARE, settle
from tests.small_process import in_small_process


def collections(entries: int) -> Counter[int]:
    """By generation, while so many objects are made that stay."""
    counted = Counter[int]()

    def count(phase: str, info: dict[str, int]) -> None:
        counted[info["generation"]] += phase == "start"

    gc.callbacks.append(count)
    try:
        stay = [[number] for number in range(entries)]
    finally:
        gc.callbacks.remove(count)
    assert len(stay) == entries
    return counted


def test_a_memory_that_fills_while_requests_are_served_is_not_looked_at_whole_until_it_is_large() -> None:
    in_small_process(_fill)


def _fill() -> None:
    grown = 600_000
    before = collections(grown)
    assert before[2] >= 2
    settle(rarely=True)
    assert gc.get_freeze_count() > 0
    during = collections(grown)
    assert during[2] == 0
    assert during[1] >= before[1]  # the young are collected as before


def test_what_is_in_cycles_is_collected_within_a_bound_while_requests_are_served() -> None:
    in_small_process(_cycles)


def _cycles() -> None:
    class Cycle:
        alive = 0

        def __init__(self) -> None:
            self.itself = self
            Cycle.alive += 1

        def __del__(self) -> None:
            Cycle.alive -= 1

    settle(rarely=True)
    most, held = 0, list[Cycle]()
    for _ in range(1_200_000):
        held.append(Cycle())
        if len(held) > 50_000:  # has outlived two collections
            held.clear()
        most = max(most, Cycle.alive)
    assert 50_000 < most < 1_000_000


@pytest.mark.parametrize("engine", [True, False])
def test_a_server_is_settled_once_its_models_are_loaded_and_looks_rarely_where_it_has_an_engine(engine) -> None:
    in_small_process(_load, engine)


def _load(engine: bool) -> None:
    sys.modules.pop("torch", None)
    if engine:
        sys.modules["torch"] = ModuleType("torch")
    loaded: list[int] = []
    hosted: Any = SimpleNamespace(load=lambda: loaded.append(gc.get_freeze_count()), engines=[])
    load(hosted, [], lambda text: None)
    assert loaded == [0]
    assert gc.get_freeze_count() > 0
    assert (gc.get_threshold()[2] == RARE) == engine
