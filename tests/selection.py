"""Which cells of parametrized tests the default run plays; `make test-long` plays the others.

A test of several architectures is played on as few of them as have all mechanisms among them. Of what remains, so many
cells are played that each value of each parameter occurs in one, and in the folders `PAIRED`, whose tests take
milliseconds, each pair of values. Of `seed` and `batch`, whose values only repeat a test, the first third is played.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from math import ceil
from typing import Any, TypeVar

import pytest

from tests.zoo import ARCHS, Arch

# Kinds that decide what memory holds and how a step is cut. All others are matters of the network alone.
HELD = frozenset(
    ("full", "sliding", "chunked", "conv", "ssm", "linear", "shared-kv", "mla", "indexed", "compressed", "own-cache")
)
ROWS = frozenset(("conv", "ssm", "linear"))  # recurrent states
NETWORKS = ("attention", "models")  # folders whose tests are about networks too
PAIRED = ("attention", "cache", "kernels", "prefix", "sample", "text")
REPEATS = ("batch", "seed")
Key = TypeVar("Key")


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cells that only the long run plays. Cells that are marked slow are so already, and stand for nothing."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: list[pytest.Item] = []
    for name, cells in tests.items():
        folder = name.split("/")[1]
        few = _of_few_architectures(_of_few_repeats(cells), networks=folder in NETWORKS)
        kept = set(covering([_values(item) for item in few], pairs=folder in PAIRED))
        played = {id(item) for at, item in enumerate(few) if at in kept}
        found += [item for item in cells if id(item) not in played]
    return found


def covering(cells: Sequence[Sequence[str]], *, pairs: bool) -> list[int]:
    """Indices of cells that have, among them, all values of each place, or all pairs of values that are in a cell."""
    size = min(2, len(cells[0])) if pairs else 1
    shown = [frozenset(combinations(enumerate(cell), size)) for cell in cells]
    return _cover(dict(enumerate(shown)), rank=lambda at: at)


def architectures(names: Iterable[str], *, networks: bool) -> list[str]:
    """As few of these as have all mechanisms among them; simple ones first."""
    order = list(ARCHS)
    found = {name: mechanisms(ARCHS[name], networks=networks) for name in names}
    return _cover(found, rank=lambda name: (len(ARCHS[name].kinds), order.index(name)))


def mechanisms(arch: Arch, *, networks: bool) -> frozenset[str]:
    """What an architecture has that others may not have: its kinds, and whether it needs cells, rows or both."""
    kinds = frozenset(arch.kinds)
    sorts = "rows" if not kinds & (HELD - ROWS) else "cells and rows" if kinds & ROWS else "cells"
    return (kinds if networks else kinds & HELD) | {sorts}


def _of_few_repeats(cells: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    for name in REPEATS:
        values = list(dict.fromkeys(_parameters(item).get(name) for item in cells))
        few = values[: ceil(len(values) / 3)]
        cells = [item for item in cells if _parameters(item).get(name) in few]
    return cells


def _of_few_architectures(cells: Sequence[pytest.Item], *, networks: bool) -> list[pytest.Item]:
    names = [_architecture(item) for item in cells]
    if any(len(_values(item)) < len(_parameters(item)) for item in cells):
        return list(cells)  # an architecture and what belongs to it are one value
    few = architectures({name for name in names if name is not None}, networks=networks)
    return [item for item, name in zip(cells, names, strict=True) if name is None or name in few]


def _architecture(item: pytest.Item) -> str | None:
    names = [value.name if isinstance(value, Arch) else value for value in _parameters(item).values()]
    return next((name for name in names if isinstance(name, str) and name in ARCHS), None)


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params


def _values(item: pytest.Item) -> Sequence[str]:
    """What each parametrization contributes to the name of a cell."""
    return item.callspec._idlist


def _cover(sets: Mapping[Key, frozenset[object]], *, rank: Callable[[Key], object]) -> list[Key]:
    """Keys whose sets have all elements together: always the one with the most that are missing, then the first by
    `rank`."""
    missing = frozenset[object]().union(*sets.values())
    chosen: list[Key] = []
    while missing:
        best = min(sets, key=lambda key: (-len(sets[key] & missing), rank(key)))
        chosen.append(best)
        missing -= sets[best]
    return chosen
