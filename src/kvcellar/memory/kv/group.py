"""group: describes the layers of a model that share one table of cells per sequence, and what they cost in bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvcellar.errors import BadRequest
from kvcellar.memory.cells.layouts import Input
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.layout import Layout
from kvcellar.memory.shapes import BLOCK, Plane, Rotation
from kvcellar.memory.spans import whole

PIECE = 1024  # cells that are copied or rotated at once: bounds the staging memory of a shift or a compaction
COPIES = 5  # most copies of a piece of one plane at once while it is rotated, in the type of the computation
QUANTISED = 8  # the same for a quantised plane: dequantised, rotated and quantised again
INDEX = 24  # bytes per cell: int64 source and target indices, and a temporary copy of one of them
ANGLES = 12  # bytes per element of a vector
_FAR = 1 << 62  # a position greater than every window


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of a model that share one layout and shape, and so one table of cells per sequence."""

    name: str
    layout: Layout
    planes: tuple[Plane, ...]  # by convention the first two are named "k" and "v"
    layers: tuple[int, ...]
    rotations: Mapping[int, Mapping[str, Rotation]] = field(
        default_factory=dict
    )  # by layer, plane; others are not rotated
    no_shift: str | None = "it is not known how its keys rotate with position"  # None: positions may change
    looks_ahead: bool = True  # a row sees all of a span that looks ahead, not only what is before the row
    of_input: bool = field(init=False, default=False)  # its cells store an encoder's input instead of tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "of_input", isinstance(self.layout, Input))
        if self.of_input:
            if self.rotations:
                raise BadRequest(f"keys of {self.name} layers are never rotated: an input has no positions of the text")
            object.__setattr__(self, "no_shift", None)  # a shift of the text does not change it

    @property
    def bounded(self) -> bool:
        """Whether a sequence holds only a window or chunk of its tokens."""
        return not self.of_input and self.layout.keep(_FAR) > 0

    def bytes_per_cell(self, itemsize: int) -> int:
        """Bytes of one cell in all layers, scales included; `itemsize` is that of the memory's own type."""
        return len(self.layers) * sum(plane.bytes_per_cell(itemsize) for plane in self.planes)

    def bytes(self, cells: int, itemsize: int) -> int:
        """Bytes of all planes for `cells` cells, with the null cell and the rotations."""
        rotations = sum(size * size * torch.float32.itemsize for size in rotated_sizes(self.planes))
        return (cells + 1) * self.bytes_per_cell(itemsize) + rotations

    def undo(self, itemsize: int) -> int:
        """Bytes of the undo copy of one cell that is rotated in place; kept until the removal is complete."""
        planes = {plane.name: plane.bytes_per_cell(itemsize) for plane in self.planes}
        turning = sum(planes[name] for layer in self.layers for name in self.rotations.get(layer, {}))
        return turning + torch.int64.itemsize if turning else 0

    def staging(self, cells: int, itemsize: int) -> int:
        """Most temporary bytes that a shift or a compaction allocates, in a group of `cells` cells."""
        widest = max((_turning(plane, itemsize) for plane in self.planes), default=0)
        angles = max((plane.size for plane in self.planes), default=0) * ANGLES
        return min(PIECE, cells) * (widest + INDEX) + angles


def rotated_sizes(planes: Iterable[Plane]) -> set[int]:
    """The sizes of vectors with a Hadamard rotation: each needs a float32 matrix [size,size]."""
    return {plane.size for plane in planes if plane.storage is not None and plane.storage.hadamard}


def _turning(plane: Plane, itemsize: int) -> int:
    """Most temporary bytes for rotating one cell of a plane; `itemsize` is that of the memory's own type."""
    storage = plane.storage
    if storage is not None and storage.quantised:
        full = plane.size if plane.size <= BLOCK else -(-plane.size // BLOCK) * BLOCK
        return plane.heads * full * torch.float32.itemsize * QUANTISED
    own = itemsize if storage is None else storage.bytes(1)
    return plane.heads * plane.size * max(torch.float32.itemsize, own) * COPIES


def check_groups(groups: Sequence[Group], cells: Mapping[str, int], backend: Backend | Mapping[str, Backend]) -> None:
    """Raise `BadRequest` unless names and layers are unique, each group has a size and a backend, one stores tokens."""
    names = [group.name for group in groups]
    layers = [layer for group in groups for layer in group.layers]
    for name in names:
        if names.count(name) > 1:
            raise BadRequest(f"two groups are called {name}")
        if whole(cells.get(name, -1), f"the number of cells of group {name}") < 0:
            raise BadRequest(f"group {name} needs a number of cells, 0 or more, in {dict(cells)}")
        if isinstance(backend, Mapping) and name not in backend:
            raise BadRequest(f"group {name} needs a backend; there are backends for {', '.join(backend)}")
    for layer in layers:
        if layers.count(layer) > 1:
            raise BadRequest(f"layer {layer} is in two groups")
    if groups and all(group.of_input for group in groups):
        raise BadRequest("a memory needs a group whose layout is not Input, for tokens")
