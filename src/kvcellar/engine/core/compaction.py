"""compaction: decides when an idle engine compacts memory, and how many cells it moves at once. No torch.

Attention reads run by run, so many short runs cost more than few long ones (measured in docs/log.md). `Memory.compact`
moves cells; this file decides when:

  * a group is compacted if all of these hold: its runs have fewer than `SHORT` cells on average; it has at least twice
    as many runs as after its last pass, and twice as many as tables; and at least `SHORT` cells are free, because a
    call moves no more cells than are free, but visits all runs;
  * a call moves no more bytes than memory's staging, which bounds the delay of a request that arrives meanwhile;
  * a pass ends when nothing is left to move, or when it has moved `PASSES` times the cells in use.

Always true:
  * if nothing else changes memory, `compact_some` returns False after finitely many calls, and from then on.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports torch
    from kvcellar.memory.kv.storage import Fragments, Storage

SHORT = 64  # cells
PASSES = 4  # a pass over a group moves no cell more than twice, and the next one continues

log = logging.getLogger("kvcellar.engine")


def worth_compacting(found: "Fragments", settled: int) -> bool:
    """Whether the runs of a group are short, and twice as many as necessary. `settled`: runs after the last pass."""
    short = found.runs * SHORT > found.cells
    return short and found.runs >= 2 * max(1, found.tables, settled) and found.free >= SHORT


class Compaction:
    """Compacts the storage of a memory in bounded calls."""

    def __init__(self, storage: "Storage") -> None:
        self._storage = storage
        self._group: str | None = None  # of the current pass
        self._left = 0  # cells that the current pass may still move
        self._settled: dict[str, int] = {}  # runs of each group after its last pass
        self.moved = 0  # cells, since the engine began

    def compact_some(self) -> bool:
        """Move some cells if that is worth it. If not, returns False, as all calls do until sequences change."""
        if self._group is None and not self._choose():
            return False
        assert self._group is not None
        try:
            moved = self._storage.compact(min(self._storage.piece(self._group), max(1, self._left)), self._group)
        except Exception as error:  # noqa: BLE001 - memory is unchanged, and no request depends on it
            log.warning("compaction of %s failed with %s: %s", self._group, type(error).__name__, error)
            moved = 0
        self.moved += moved
        self._left -= moved
        if moved == 0 or self._left <= 0:
            self._settled[self._group] = self._storage.fragments()[self._group].runs
            self._group = None
        return True

    def _choose(self) -> bool:
        """Begin a pass over the first group for which it is worth it."""
        for name, found in self._storage.fragments().items():
            # Lowered when sequences are freed. Otherwise a high value would prevent every later compaction.
            self._settled[name] = min(self._settled.get(name, 0), found.runs)
            if worth_compacting(found, self._settled[name]):
                self._group, self._left = name, PASSES * found.cells
                return True
        return False
