"""cell_map: what the cells of a group are used for, as runs of a bounded number: a picture of memory.

Its cost is linear in the cells, so it is made on the thread of who asked for it, from runs.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvcellar.engine.picture import RUNS, CellMap, Kind, MapRun
from kvcellar.plan import Run

FREE, OTHER, SHARED, FIRST = 0, 1, 2, 3  # codes; from `FIRST` on, odd ones are of entries, even ones of requests


class Holding(NamedTuple):
    """Cells of a group, by its index, that an entry of the tree has ("kept") or a running request, by its number."""

    group: int
    kind: Literal["kept", "request"]
    which: int
    runs: tuple[Run, ...]


def mapped(cells: int, free: Iterable[Run], holdings: Sequence[Holding]) -> CellMap:
    """Cells that are neither free nor of a holding are "other". What a request has and an entry, too, is of the
    request."""
    codes = np.full(cells + 1, OTHER, dtype=np.int64)  # by cell; cell 0 is null
    for one in holdings:
        for run in one.runs if one.kind == "kept" else ():
            codes[run.cell : run.end] = FIRST + 2 * one.which
    for one in holdings:
        code = FIRST + 2 * one.which + 1
        for run in one.runs if one.kind == "request" else ():
            part = codes[run.cell : run.end]
            busy = (part == SHARED) | ((part >= FIRST) & (part % 2 == 0) & (part != code))
            codes[run.cell : run.end] = np.where(busy, SHARED, code)
    for run in free:  # an entry may have been evicted since it was looked at
        codes[run.cell : run.end] = FREE
    codes = codes[1:]
    kinds = _kinds(codes)
    counts: dict[Kind, int] = {kind: int((kinds == number).sum()) for number, kind in enumerate(_KINDS)}
    each = 1
    while len(starts := _starts(codes)) > RUNS:
        each, codes = each * 2, _halved(codes)
    ends = [*starts[1:], len(codes)] if len(starts) else []
    runs = [
        _run(int(codes[start]), min(int(end) * each, cells) - int(start) * each)
        for start, end in zip(starts, ends, strict=True)
    ]
    return CellMap(each, runs, counts)


_KINDS: tuple[Kind, ...] = ("free", "other", "kept", "shared", "request")  # the busiest last


def _kinds(codes: np.ndarray) -> np.ndarray:
    """Indices into `_KINDS`."""
    of_entry, of_request = (codes >= FIRST) & (codes % 2 == 1), (codes >= FIRST) & (codes % 2 == 0)
    return np.select([of_request, codes == SHARED, of_entry, codes == OTHER], [4, 3, 2, 1], 0)


def _halved(codes: np.ndarray) -> np.ndarray:
    """Of each two neighbours the busier one."""
    if len(codes) % 2:
        codes = np.append(codes, FREE)
    left, right = codes[::2], codes[1::2]
    return np.where(_kinds(left) >= _kinds(right), left, right)


def _starts(codes: np.ndarray) -> np.ndarray:
    """Where runs begin."""
    if not len(codes):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))


def _run(code: int, cells: int) -> MapRun:
    if code < FIRST:
        return MapRun(cells, ("free", "other", "shared")[code], None)
    return MapRun(cells, "request" if code % 2 == 0 else "kept", (code - FIRST) // 2)
