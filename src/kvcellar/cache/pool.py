"""pool: the K/V tensors of one group. The only file that writes them.

Always true:
  * every plane of every layer has `cells + 1` places, the first of them null, rounded up to what the backend asked for,
    in the arrangement it asked for; a plain group has them as [places,heads,size], and none too many;
  * a layer may have more places than that only where a resize failed and could not be undone;
  * only the null place is defined when a plane is allocated: it is zero, which reads back as zero in every storage.
    What the others hold is undefined until a step writes them, so that on a CPU they take no memory before;
  * all planes whose vectors have the same size share one rotation; `bytes` is exactly what planes and rotations take;
  * what is read is what is stored: new tokens are read back quantised, too.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvcellar.cache.quantise import dequantise, hadamard, quantise, rotate
from kvcellar.cache.turn import turn
from kvcellar.contracts import Backend
from kvcellar.errors import BadRequest
from kvcellar.shapes import Arrangement, Kind, Plane, Rotation, Storage

PLAIN: Mapping[Kind, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Bytes of fp8 are kept as uint8: torch copies float8 by index on no CPU.
CODES: Mapping[Kind, torch.dtype] = {**PLAIN, "fp8": torch.uint8, "int8": torch.int8, "int4": torch.uint8}
# Where cells, heads and size are in a tensor of each arrangement.
AXES: Mapping[Arrangement, tuple[int, int, int]] = {"token": (0, 1, 2), "head": (1, 0, 2), "transposed": (2, 0, 1)}


class StoredPlane:
    """One plane of one layer, and how to read it (see `contracts.Stored`)."""

    def __init__(
        self,
        plane: Plane,
        storage: Storage,
        places: int,
        arrangement: Arrangement,
        device: torch.device,
        rotation: Tensor | None,
    ) -> None:
        """`rotation` [size,size] is `hadamard`'s, which the pool owns, if `storage` asks for one."""
        self.plane, self.storage = plane, storage
        self.arrangement: Arrangement = arrangement
        self._rotation = rotation
        kind, size = storage.kind, plane.size
        width = (size + 1) // 2 if kind == "int4" else size
        tensors = [self._allocated(places, width, CODES[kind], device)]
        if storage.quantised:
            tensors.append(self._allocated(places, storage.scales(size), torch.float16, device))
        self._bind(tensors)

    def _allocated(self, places: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`places` of `heads` vectors of `width` elements, as they are arranged; all but the null one undefined."""
        axes = AXES[self.arrangement]
        shape = [0, 0, 0]
        for axis, length in zip(axes, (places, self.plane.heads, width), strict=True):
            shape[axis] = length
        made = torch.empty(shape, dtype=dtype, device=device)
        self._rows(made)[0] = 0
        return made

    def _bind(self, tensors: Sequence[Tensor]) -> None:
        """Keep codes (and scales) in these tensors from now on. Views that steps use are made once, here."""
        self._tensors = list(tensors)
        codes = tensors[0]
        self.codes = codes.view(torch.float8_e4m3fn) if self.storage.kind == "fp8" else codes
        self.scales = tensors[1] if len(tensors) > 1 else None
        self.rows = self._rows(codes)  # [places,heads,width]
        self.by_head = self.rows.transpose(0, 1)[None]  # [1,heads,places,width]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def read(self, cells: Tensor | slice, dtype: torch.dtype, *, rotated: bool = False) -> Tensor:
        """[heads,n,size] of `cells`: a view where they are a slice and stored in `dtype`."""
        codes = self._by_head(self._tensors[0], cells)
        scales = None if self.scales is None else self._by_head(self.scales, cells)
        return self._values(codes, scales, dtype, rotated=rotated)

    def at(self, cells: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
        """[*,size] of these cells and heads, which broadcast to [*]; rotated keys as they were rotated."""
        scales = None if self.scales is None else self._rows(self.scales)[cells, heads]
        return self._values(self.rows[cells, heads], scales, dtype, rotated=True)

    def _values(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype, *, rotated: bool) -> Tensor:
        if scales is None:
            return codes.to(dtype)
        values = dequantise(codes, scales, self.storage.kind, self.plane.size)
        if self._rotation is not None and not rotated:
            values = values @ self._rotation
        return values.to(dtype)

    def meet(self, q: Tensor) -> Tensor:
        """Queries [T,H,size], rotated as the keys are that `read` answers if `rotated`."""
        return q if self._rotation is None else (q.float() @ self._rotation).to(q.dtype)

    def quantise(self, cells: Tensor, values: Tensor) -> None:
        """Store `values` [1,heads,n,size] in cells [n] as codes and scales."""
        made = quantise(rotate(values) if self.storage.hadamard else values, self.storage.kind)
        for tensor, new in zip(self._tensors, made, strict=True):
            self._rows(tensor).index_copy_(0, cells, new[0].transpose(0, 1))

    def resized(self, places: int) -> "StoredPlane":
        """A copy with so many places, bit for bit as far as it goes."""
        device = self.codes.device
        twin = StoredPlane(self.plane, self.storage, places, self.arrangement, device, self._rotation)
        for old, new in zip(self._tensors, twin._tensors, strict=True):
            kept, there = self._rows(old), self._rows(new)
            both = min(len(kept), len(there))
            there[:both] = kept[:both]
        return twin

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy what cells `source` hold, bit for bit, into cells `target`."""
        for tensor in self._tensors:
            rows = self._rows(tensor)
            rows.index_copy_(0, target, rows.index_select(0, source))

    def content(self, cells: Tensor) -> list[Tensor]:
        """A copy of what is stored in `cells`, bit for bit, for `restore`."""
        return [self._rows(tensor).index_select(0, cells) for tensor in self._tensors]

    def empty(self, n: int) -> list[Tensor]:
        """What `content` returns for n cells, with anything in it."""
        return [tensor.new_empty(n, *self._rows(tensor).shape[1:]) for tensor in self._tensors]

    def restore(self, cells: Tensor, content: Sequence[Tensor]) -> None:
        for tensor, rows in zip(self._tensors, content, strict=True):
            self._rows(tensor).index_copy_(0, cells, rows)

    def _rows(self, tensor: Tensor) -> Tensor:
        """[C,heads,width], a view."""
        return tensor.permute(AXES[self.arrangement])

    def _by_head(self, tensor: Tensor, cells: Tensor | slice) -> Tensor:
        """[heads,n,width]: a view of a slice."""
        axis = AXES[self.arrangement][0]
        if isinstance(cells, slice):
            return self._rows(tensor)[cells].transpose(0, 1)
        axes = AXES[self.arrangement]
        return tensor.index_select(axis, cells).permute(axes[1], axes[0], axes[2])


class Pool:
    """The planes of each layer of a group. `arrangement` is of all of them, or by the name of those it is told of."""

    def __init__(
        self,
        planes: tuple[Plane, ...],
        layers: tuple[int, ...],
        *,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
        arrangement: Arrangement | Mapping[str, Arrangement],
        padding: int = 1,
    ) -> None:
        self._padding = padding
        self._bytes_per_cell = sum(plane.bytes_per_cell(dtype.itemsize) for plane in planes)
        places = self._places(cells)
        self._rotations = {size: hadamard(size, device) for size in rotated_sizes(planes)}
        self._of: dict[int, dict[str, StoredPlane]] = {}
        for layer in layers:
            self._of[layer] = {}
            for plane in planes:
                wanted = arrangement if isinstance(arrangement, str) else arrangement.get(plane.name, "token")
                storage = storage_of(plane, dtype)
                rotation = self._rotations[plane.size] if storage.hadamard else None
                self._of[layer][plane.name] = StoredPlane(plane, storage, places, wanted, device, rotation)

    @classmethod
    def agreed(
        cls,
        planes: tuple[Plane, ...],
        layers: tuple[int, ...],
        backend: Backend,
        *,
        plain: bool,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Pool":
        """As `backend` would like it, or plain. Raises `BadRequest` if it cannot read what some plane is stored as."""
        for plane in planes:
            kind = storage_of(plane, dtype).kind
            if kind not in backend.kinds:
                readable = ", ".join(sorted(backend.kinds))
                raise BadRequest(f"{backend.name} cannot read {plane.name} stored as {kind}, only {readable}")
        arrangement: Arrangement | Mapping[str, Arrangement] = "token" if plain else backend.arrangement
        padding = 1 if plain else backend.padding
        return cls(planes, layers, cells=cells, dtype=dtype, device=device, arrangement=arrangement, padding=padding)

    def _places(self, cells: int) -> int:
        return -(-(cells + 1) // self._padding) * self._padding

    def layer_bytes(self, cells: int) -> int:
        """Bytes that one layer takes with places for so many cells."""
        return self._places(cells) * self._bytes_per_cell

    def resize(self, layer: int, cells: int) -> None:
        """Give one layer places for so many cells, and keep what is in them. All its planes, or, if it raises, none.

        Old and new planes are there together for a moment.
        """
        places = self._places(cells)
        self._of[layer].update({name: kept.resized(places) for name, kept in self._of[layer].items()})

    @property
    def bytes(self) -> int:
        """Bytes held, all layers and planes, scales and rotations included."""
        planes = sum(kept.bytes for planes in self._of.values() for kept in planes.values())
        return planes + sum(rotation.nbytes for rotation in self._rotations.values())

    def planes(self, layer: int) -> Mapping[str, StoredPlane]:
        """Of a layer, by name: the same mapping as long as the pool is there."""
        return self._of[layer]

    def stored(self, layer: int, name: str) -> StoredPlane:
        return self._of[layer][name]

    def check_new(self, layer: int, n: int, new: Mapping[str, Tensor]) -> None:
        """Raise `BadRequest` unless `new` are planes [n,heads,size] of floats: others torch may broadcast or cut."""
        for name, values in new.items():
            if name not in self._of[layer]:
                raise BadRequest(f"layer {layer} has no plane {name}, only {', '.join(self._of[layer])}")
            plane = self._of[layer][name].plane
            if values.shape != (n, plane.heads, plane.size) or not values.is_floating_point():
                raise BadRequest(
                    f"layer {layer} was given {name} {list(values.shape)} of {values.dtype}; it wants "
                    f"{[n, plane.heads, plane.size]} of floats"
                )

    def write(self, layer: int, cells: Tensor, new: Mapping[str, Tensor]) -> None:
        """Store `new` planes [1,heads,n,size] in cells [n]: what they are, not how they were computed."""
        planes = self._of[layer]
        for name, values in new.items():
            kept = planes[name]
            if values.requires_grad:
                values = values.detach()  # else the plane would keep the graph of every step that wrote it
            if kept.scales is not None:
                kept.quantise(cells, values)
                continue
            if values.dtype is not kept.codes.dtype:
                values = values.to(kept.codes.dtype)
            kept.by_head.index_copy_(2, cells, values)

    def move(self, layer: int, source: Tensor, target: Tensor, turns: Mapping[str, Rotation], by: int) -> None:
        """Copy what cells `source` hold into cells `target` (none of them a source), turned by `by` positions.

        What does not turn is copied bit for bit. What turns is rounded to its storage once more.
        """
        for name, kept in self._of[layer].items():
            rotation = turns.get(name)
            if rotation is None:
                kept.copy(source, target)
            else:
                self.write(layer, target, {name: as_new(turn(self.read(layer, name, source), rotation, by))})

    def turn(self, layer: int, name: str, cells: Tensor, rotation: Rotation, by: int) -> None:
        """Turn what a plane holds in `cells` by `by` positions, where it is; as `move` does it."""
        self.write(layer, cells, {name: as_new(turn(self.read(layer, name, cells), rotation, by))})

    def read(self, layer: int, name: str, cells: Tensor) -> Tensor:
        """A copy [n,heads,size] of what is stored in `cells`: float32 where it is quantised."""
        kept = self._of[layer][name]
        return kept.read(cells, PLAIN.get(kept.storage.kind, torch.float32)).transpose(0, 1)


def as_new(values: Tensor) -> Tensor:
    """[n,heads,size] -> [1,heads,n,size], a view: as models have new keys and values, and as they are written."""
    return values.transpose(0, 1)[None]


def rotated_sizes(planes: Iterable[Plane]) -> set[int]:
    """The sizes of vectors that are rotated before they are quantised: each needs a float32 matrix [size,size]."""
    return {plane.size for plane in planes if plane.storage is not None and plane.storage.hadamard}


def storage_of(plane: Plane, dtype: torch.dtype) -> Storage:
    """As what `plane` is stored in a memory of `dtype`. Raises `BadRequest` for a type that K/V cannot have."""
    if plane.storage is not None:
        return plane.storage
    return Storage(str(dtype).removeprefix("torch."))  # pyright: ignore[reportArgumentType]  # it checks the kind
