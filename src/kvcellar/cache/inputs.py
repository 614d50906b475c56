"""inputs: what an encoder made of an input. Written once, read at every step, shared by those who have the same one.

Always true: an input is written to all layers of all encoder groups, or nothing has changed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcellar.cache.group import GroupStore
from kvcellar.cache.layouts.encoder import Input
from kvcellar.cache.plans import write_index
from kvcellar.cache.tables import Table
from kvcellar.errors import BadRequest, CacheFull

Planes = Mapping[int, tuple[Tensor, Tensor]]  # by layer: k [n,G,D] and v [n,G,Dv]


def check_planes(helds: Sequence[GroupStore], n: int, planes: Planes) -> None:
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


def write(helds: Sequence[GroupStore], n: int, planes: Planes, device: torch.device) -> list[Table]:
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
