"""inputs: keys and values that an encoder computed from an input. Written once, and shared by digest.

Always true: an input is written to all layers of all encoder groups, or nothing has changed.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvcellar.errors import BadRequest, CacheFull, shown
from kvcellar.memory.cells.layouts import Input
from kvcellar.memory.cells.tables import Table, close_all, share_all, undone
from kvcellar.memory.kv.claims import Claims
from kvcellar.memory.kv.history import indices, write_planes
from kvcellar.memory.kv.pool import as_new
from kvcellar.memory.kv.sequences import Sequences
from kvcellar.memory.kv.storage import GroupStore, Storage
from kvcellar.memory.spans import whole

Planes = Mapping[int, tuple[Tensor, Tensor]]  # by layer: k [n,G,D] and v [n,G,Dv]


def check_planes(stores: Sequence[GroupStore], n: int, planes: Planes) -> None:
    """Raise `BadRequest` unless `planes` are an input of `n` positions, in all layers of `stores` and in no other."""
    if not stores:
        raise BadRequest("this memory has no layers for an input: none of its groups has the layout Input")
    layers = {layer for store in stores for layer in store.group.layers}
    if layers != planes.keys():
        raise BadRequest(f"an input has planes for the layers {sorted(layers)}, not for {sorted(planes)}")
    for store in stores:
        assert isinstance(store.group.layout, Input)
        if not 1 <= n <= store.group.layout.most:
            raise BadRequest(
                f"an input of {n} positions; {store.group.name} layers take 1 to {store.group.layout.most}"
            )
        for layer in store.group.layers:
            k, v = planes[layer]
            store.pool.check_new(layer, n, {"k": k, "v": v})


def write(stores: Sequence[GroupStore], n: int, planes: Planes, device: torch.device) -> list[Table]:
    """A table of new cells with the input, for each group. Raises `CacheFull` before anything is taken."""
    for store in stores:
        if store.cells.spare < n:
            raise CacheFull(store.group.name, n, store.cells.spare)
    tables: list[Table] = []
    with undone(lambda: close_all(tables)):
        for store in stores:
            tables.append(store.tables.new())
            tables[-1].append(store.cells.take(n))
            cells = indices(tables[-1].runs, device)
            for layer in store.group.layers:
                k, v = planes[layer]
                write_planes(store.pool.planes(layer), cells, {"k": as_new(k), "v": as_new(v)})
    return tables


class Inputs:
    """The inputs of the sequences of one memory."""

    def __init__(self, storage: Storage, sequences: Sequences, claims: Claims, idle: Callable[[str], None]) -> None:
        """`idle(operation)` raises `WrongStage` while a step is open."""
        self._storage, self._sequences, self._claims, self._idle = storage, sequences, claims, idle

    def length(self, seq: int) -> int:
        """Number of positions of the input of `seq`; 0 without an input, and for an unknown sequence."""
        return self._sequences.input_length(seq)

    def write(self, seq: int, n: int, planes: Planes, *, digest: str | None = None) -> bool:
        """Store the input of `seq`, which may be new: for each layer k [n,G,D] and v [n,G,Dv]. Returns False if it was
        not written, because a sequence or claim in memory has the same `digest` and its cells are shared.

        Every row of the sequence sees it in every step. Forks share it, and removing text does not change it. Raises
        `BadRequest` if the sequence has an input, or for planes of other layers, `CacheFull` if a group has too few
        free cells; nothing has changed then.
        """
        self._idle("inputs.write")
        seq = whole(seq, "a sequence")
        inputs = [store for store in self._storage.stores if store.group.of_input]
        n = whole(n, "the length of an input")
        check_planes(inputs, n, planes)
        if self.share(seq, digest, n):
            return False
        self._sequences.give_input(seq, digest, lambda: write(inputs, n, planes, self._storage.device))
        return True

    def share(self, seq: int, digest: str | None, n: int | None = None) -> bool:
        """Share the input with this digest with `seq`, which may be new. Returns False if no sequence or claim has it.

        The encoder need not run then. Raises `BadRequest` if `seq` has an input, or if that one is not `n` long.
        """
        self._idle("inputs.share")
        seq = whole(seq, "a sequence")
        if length := self.length(seq):
            raise BadRequest(f"sequence {seq} already has an input, of {length} positions")
        tables = (self._sequences.input(digest) or self._claims.input(digest)) if digest is not None else None
        if tables is None:
            return False
        if n not in (None, length := tables[0].end):
            raise BadRequest(f"the input of digest {shown(digest)} has {length} positions, not {n}")
        self._sequences.give_input(seq, digest, lambda: share_all(tables, 0))
        return True

    def read(self, layer: int, plane: str, seqs: Sequence[int]) -> Tensor:
        """A plane [B,n,heads,size] of the inputs of sequences, all of which are n long, in a step or between two."""
        index = self._storage.index_of(layer)
        store, lengths = self._storage.stores[index], {self.length(seq) for seq in seqs}
        if len(lengths) != 1 or not store.group.of_input:
            raise BadRequest(f"the inputs of sequences {list(seqs)} are {sorted(lengths)} long in layer {layer}")
        runs = [run for seq in seqs for run in self._sequences.known(seq)[index].runs]
        cells = indices(runs, self._storage.device)
        return store.pool.planes(layer)[plane].values(cells).unflatten(0, (len(seqs), -1))
