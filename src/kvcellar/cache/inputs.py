"""inputs: what an encoder made of an input. Written once, read at every step, shared by those who have the same one.

Always true:
  * a digest is known exactly as long as a sequence has its input, and all that have it share every cell of it;
  * an input is written to all layers of all encoder groups, or nothing has changed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcellar.cache.group import Held
from kvcellar.cache.layouts.encoder import Input
from kvcellar.cache.parts import Part
from kvcellar.cache.plans import write_index
from kvcellar.cache.tables import Table
from kvcellar.errors import BadRequest, CacheFull
from kvcellar.plan import Run

Planes = Mapping[int, tuple[Tensor, Tensor]]  # by layer: k [n,G,D] and v [n,G,Dv]


class Digests(Part):
    """Which sequences have which input, where somebody gave it a digest."""

    def __init__(self) -> None:
        self._of: dict[int, str] = {}
        self._who: dict[str, set[int]] = {}

    def of(self, seq: int) -> str | None:
        return self._of.get(seq)

    def holder(self, digest: str) -> int | None:
        """A sequence that has this input, if there is one."""
        return next(iter(self._who.get(digest, ())), None)

    def add(self, seq: int, digest: str) -> None:
        self._of[seq] = digest
        self._who.setdefault(digest, set()).add(seq)

    def fork(self, src: int, dst: int, kept: int) -> None:
        """`dst` now has the input of `src`, however much of the text it has."""
        self.drop(dst)
        if (digest := self._of.get(src)) is not None:
            self.add(dst, digest)

    def drop(self, seq: int) -> None:
        digest = self._of.pop(seq, None)
        if digest is not None:
            self._who[digest].discard(seq)
            if not self._who[digest]:
                del self._who[digest]

    def check(self, tables: Mapping[int, Sequence[Table]]) -> None:
        """Assert what is always true, where `tables` are those of the encoder groups, by sequence."""
        assert self._of == {seq: digest for digest, seqs in self._who.items() for seq in seqs}
        for digest, seqs in self._who.items():
            assert seqs, f"nobody has input {digest}"
            cells = {tuple(_cells(table.runs) for table in tables[seq]) for seq in seqs}
            assert len(cells) == 1, f"those who have input {digest} do not share its cells: {cells}"
            assert all(table.end for seq in seqs for table in tables[seq]), f"input {digest} is empty"


def check_planes(helds: Sequence[Held], n: int, planes: Planes) -> None:
    """Raise `BadRequest` unless `planes` are an input of `n` positions, in all layers of `helds` and in no other."""
    if not helds:
        raise BadRequest("this memory has no layers for an input: none of its groups has the layout Input")
    layers = {layer for held in helds for layer in held.group.layers}
    if layers != planes.keys():
        raise BadRequest(f"an input is for the layers {sorted(layers)}; what was given is for {sorted(planes)}")
    for held in helds:
        assert isinstance(held.group.layout, Input)
        if not 1 <= n <= held.group.layout.most:
            raise BadRequest(f"an input of {n} positions; {held.group.name} layers take 1 to {held.group.layout.most}")
        for layer in held.group.layers:
            k, v = planes[layer]
            held.pool.check_new(layer, n, {"k": k, "v": v})


def write(helds: Sequence[Held], n: int, planes: Planes, device: torch.device) -> list[Table]:
    """A table of new cells with the input, for each group. Raises `CacheFull` before anything is taken."""
    for held in helds:
        if held.cells.free < n:
            raise CacheFull(held.group.name, n, held.cells.free)
    tables: list[Table] = []
    try:
        for held in helds:
            tables.append(held.table())
            tables[-1].append(held.cells.take(n))
            cells = write_index([tables[-1].runs], device)
            for layer in held.group.layers:
                k, v = planes[layer]
                held.pool.write(layer, cells, {"k": k, "v": v})
    except BaseException:
        for table in tables:
            table.close()
        raise
    return tables


def _cells(runs: Sequence[Run]) -> tuple[int, ...]:
    return tuple(cell for run in runs for cell in range(run.cell, run.end))
