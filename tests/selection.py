"""Which cells of parametrized tests the default run plays; `make test-long` plays the others.

A test of several architectures is played on as few of them as have all mechanisms among them. Of what remains, so many
cells are played that each value of each parameter occurs in one, and in the folders `PAIRED`, whose tests take
milliseconds, each pair of values. Of `seed` and `batch`, whose values only repeat a test, the first two are played.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest

from tests.zoo import ARCHS, Arch

# Kinds that decide what memory holds and how a step is cut, each with its mechanism: above the memory, windows are
# alike, and so are states. All other kinds are matters of the network alone.
HELD = {
    "full": "full", "sliding": "windows", "chunked": "windows", "conv": "states", "ssm": "states", "linear": "states",
    "shared-kv": "shared-kv", "mla": "latents", "indexed": "latents", "compressed": "compressed",
    "own-cache": "own-cache",
}  # fmt: skip
NETWORKS = ("attention", "models")  # folders whose tests are about networks too
PAIRED = ("attention", "cache", "kernels", "prefix", "sample", "text")
REPEATS = ("batch", "seed")


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cells that only the long run plays. Cells that are marked slow are so already, and stand for nothing."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: list[pytest.Item] = []
    for name, cells in tests.items():
        folder = name.split("/")[1]
        few = _of_few_repeats(cells)
        shown = [_shown(item, networks=folder in NETWORKS) for item in few]
        kept = covering(shown, pairs=folder in PAIRED, first=[_kinds(item) for item in few])
        played = {id(few[at]) for at in kept}
        found += [item for item in cells if id(item) not in played]
    return found


Shown = Mapping[object, frozenset[object]]  # by place in a cell: its value, or the mechanisms of an architecture


def covering(cells: Sequence[Shown], *, pairs: bool, first: Sequence[int] | None = None) -> list[int]:
    """Indices of cells that show, among them, all values of each place, or all pairs of values that are in a cell: in
    turn the cell that shows the most that is missing, of equal ones that with the least in `first`."""
    shown = [frozenset(_combined(cell, pairs=pairs)) for cell in cells]
    missing = frozenset[object]().union(*shown)
    chosen: list[int] = []
    while missing:
        best = min(range(len(cells)), key=lambda at: (-len(shown[at] & missing), first[at] if first else 0, at))
        chosen.append(best)
        missing -= shown[best]
    return chosen


def _combined(cell: Shown, *, pairs: bool) -> Iterator[object]:
    singles = [[(place, value) for value in values] for place, values in cell.items()]
    if not pairs or len(singles) < 2:
        yield from chain(*singles)
    else:
        for one, other in combinations(singles, 2):
            yield from product(one, other)


def mechanisms(arch: Arch, *, networks: bool) -> frozenset[str]:
    """What an architecture has that others may not have: its kinds, and whether it needs cells, rows or both."""
    held = frozenset(HELD[kind] for kind in arch.kinds if kind in HELD)
    sorts = "cells" if "states" not in held else "rows" if len(held) == 1 else "cells and rows"
    return (frozenset(arch.kinds) if networks else held) | {sorts}


def _of_few_repeats(cells: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    for name in REPEATS:
        values = list(dict.fromkeys(_parameters(item).get(name) for item in cells))
        few = values[:2]
        cells = [item for item in cells if _parameters(item).get(name) in few]
    return cells


def _shown(item: pytest.Item, *, networks: bool) -> Shown:
    """Of a test of architectures, its arguments; of another, each parametrization, whose arguments are one value."""
    arguments = _parameters(item)
    if not any(_architecture(value) for value in arguments.values()):
        return {place: frozenset((value,)) for place, value in enumerate(item.callspec._idlist)}
    return {
        name: mechanisms(arch, networks=networks) if (arch := _architecture(value)) else frozenset((_identity(value),))
        for name, value in arguments.items()
    }


def _kinds(item: pytest.Item) -> int:
    return sum(len(arch.kinds) for value in _parameters(item).values() if (arch := _architecture(value)))


def _architecture(value: object) -> Arch | None:
    return value if isinstance(value, Arch) else ARCHS.get(value) if isinstance(value, str) else None


def _identity(value: object) -> object:
    return repr(value) if isinstance(value, str | bytes | int | float | None) else id(value)


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params
