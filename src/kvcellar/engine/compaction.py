"""compaction: when an engine that has nothing else to do moves cells together, and how much at once. No torch.

Attention reads run by run, so many short runs cost it more than a few long ones (docs/log.md has how much). Memory
knows how to move cells (`Memory.compact`); here is decided whether that is worth it:

  * a group is compacted if its runs have fewer than `SHORT` cells on average, and it has at least twice as many runs as
    when it was compacted last, and as sequences; and if `SHORT` cells are free: a piece moves no more than are free,
    and looks at all runs;
  * a piece moves no more bytes than memory's staging, which is what a request that arrives may have to wait for;
  * a pass ends when nothing is left to move, or when it has moved `PASSES` times what is held.

Always true:
  * with nothing but compaction going on, `piece` answers False after finitely many calls, and from then on.
"""

import logging
from collections.abc import Mapping
from typing import Protocol

SHORT = 64  # cells
PASSES = 4  # one pass over a group moves no cell more than twice, and the next may find what it left

log = logging.getLogger("kvcellar.engine")


class Fragments(Protocol):
    """What a group of memory looks like to attention."""

    @property
    def cells(self) -> int:
        """Cells of all tables together; those that several share, once for each."""
        ...

    @property
    def runs(self) -> int:
        """Contiguous runs that these are in."""
        ...

    @property
    def tables(self) -> int:
        """Tables that hold any."""
        ...

    @property
    def free(self) -> int:
        """Free cells."""
        ...


class Compactable(Protocol):
    """What is needed of a memory's storage."""

    def fragments(self) -> Mapping[str, Fragments]: ...

    def piece(self, group: str) -> int:
        """How many cells of a group to move at once, so that their bytes fit what is reserved for edits."""
        ...

    def compact(self, budget_cells: int, group: str | None = None) -> int: ...


def worth_compacting(found: Fragments, settled: int) -> bool:
    """Are the runs of a group short, and twice as many as they have to be? `settled`: runs after the last pass."""
    short = found.runs * SHORT > found.cells
    return short and found.runs >= 2 * max(1, found.tables, settled) and found.free >= SHORT


class Compaction:
    """Compacts the storage of a memory, piece by piece, whenever it is called."""

    def __init__(self, storage: Compactable) -> None:
        self._storage = storage
        self._group: str | None = None  # whose pass is under way
        self._left = 0  # cells that this pass may still move
        self._settled: dict[str, int] = {}  # runs of each group after its last pass
        self.moved = 0  # cells, since the engine began

    def piece(self) -> bool:
        """Move one piece, if anything is worth it. False if not: then nothing changes until sequences do."""
        if self._group is None and not self._choose():
            return False
        assert self._group is not None
        try:
            moved = self._storage.compact(min(self._storage.piece(self._group), max(1, self._left)), self._group)
        except Exception as error:  # noqa: BLE001 - memory is as it was, and no request asked for this
            log.warning("compaction of %s failed with %s: %s", self._group, type(error).__name__, error)
            moved = 0
        self.moved += moved
        self._left -= moved
        if moved == 0 or self._left <= 0:
            self._settled[self._group] = self._storage.fragments()[self._group].runs
            self._group = None
        return True

    def _choose(self) -> bool:
        """Begin a pass over the first group that is worth it."""
        for name, found in self._storage.fragments().items():
            # Runs that are gone with their sequences do not count: else a full memory would not be compacted again.
            self._settled[name] = min(self._settled.get(name, 0), found.runs)
            if worth_compacting(found, self._settled[name]):
                self._group, self._left = name, PASSES * found.cells
                return True
        return False
