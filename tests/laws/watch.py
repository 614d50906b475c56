"""Looking into a memory: all it consists of, so that nothing changes unseen; and a backend with wishes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.cells import Cells
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Run
from kvcellar.memory.shapes import Arrangement


class Wishes(Sdpa):
    """Asks for an arrangement of all planes."""

    def __init__(self, arrangement: Arrangement = "token") -> None:
        super().__init__()
        self.arrangement = arrangement


def highest(cells: Cells) -> int:
    """The highest cell that is held; 0 if none is."""
    free = cells.free_runs()
    return free[-1].cell - 1 if free and free[-1].end == cells.capacity + 1 else cells.capacity


def pieces(cells: Cells) -> list[tuple[int, int, int]]:
    """(start, end, holders) of every piece, in order."""
    found: list[tuple[int, int, int]] = []
    piece = cells._head
    while piece is not None:
        found.append((piece.start, piece.end, piece.holders))
        piece = piece.next
    return found


def stored(memory: Memory, layer: int, plane: str, runs: Iterable[Run]) -> Tensor:
    """[n,heads,size] of the cells of `runs`, in their order."""
    pool = memory.storage.stores[memory.storage.index_of(layer)].pool
    cells = [cell for run in runs for cell in range(run.cell, run.end)]
    return pool.planes(layer)[plane].values(torch.tensor(cells, dtype=torch.long))


def everything(memory: Memory) -> list[Any]:
    """The whole state of a memory: tables, pieces, its open step, and the bytes of every cell that a table holds.

    And that of sequences and claims beside their tables: where they were edited or looked ahead, their inputs.
    """
    storage = memory.storage
    known: list[Any] = [id(memory.step), memory.sequences, memory.free(), storage.capacity(), storage.bytes]
    known += [storage.scratch]
    for seq, record in memory._sequences.records.items():
        known.append((seq, record.ahead, record.derived, record.digest))
    for claim in map(memory.claims.of, memory.claims):
        known.append((claim.span, sorted(claim.checkpoints), claim.ahead, claim.derived, claim.digest))
    for index, held in enumerate(memory.storage.stores):
        known.append(pieces(held.cells))
        tables = {seq: record.tables[index] for seq, record in memory._sequences.records.items()}
        known.append([(seq, t.first, t.end, tuple(t.runs), tuple(t._starts)) for seq, t in tables.items()])
        claimed = memory.claims.tables(index)
        known.append([(t.first, t.end, tuple(t.runs), tuple(t._starts)) for t in claimed])
        runs = [run for table in (*tables.values(), *claimed) for run in table.runs]
        for layer in held.group.layers:
            for plane in held.group.planes:
                content = stored(memory, layer, plane.name, runs)
                known.append(content.contiguous().view(torch.uint8).numpy().tobytes())
    return known


class Allocations(TorchDispatchMode):
    """The tensors that are made while it is entered. `most` is how many bytes were there at once, of all that are new.

    What an operation allocates and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage; 0 bytes if it was there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor, new=False)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            self._see(tensor, new=True)
        self._there = {key: (ref, size) for key, (ref, size) in self._there.items() if not ref.expired()}
        self.most = max(self.most, self.now)
        return made

    @property
    def now(self) -> int:
        """Bytes that are there now, of all that are new."""
        return sum(size for ref, size in self._there.values() if not ref.expired())

    def _see(self, tensor: Any, *, new: bool) -> None:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)
            self._there.setdefault(ref.cdata, (ref, storage.nbytes() if new else 0))


@contextmanager
def nothing_changes(memory: Memory) -> Iterator[None]:
    """Whatever happens in the block, the memory is the same behind it."""
    before = everything(memory)
    yield
    memory.check()
    assert everything(memory) == before
