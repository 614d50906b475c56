"""pool: the K/V planes of one group: allocates and moves them.

Always true:
  * every plane of every layer has `cells + 1` places, the first of them null, in the arrangement of the backend;
  * only the null place is defined when a plane is allocated: it is zero, which reads back as zero in every storage.
    The content of others is undefined until a step writes them: on a CPU they use no memory until then, or until they
    are zeroed;
  * all planes whose vectors have the same size share one Hadamard matrix; `bytes` is exactly the size of planes and
    matrices.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcellar.errors import BadRequest
from kvcellar.memory.kv.group import Group, rotated_sizes
from kvcellar.memory.kv.history import Backend, StoredPlane, write_planes
from kvcellar.memory.kv.quantise import hadamard
from kvcellar.memory.plan import Run
from kvcellar.memory.shapes import Plane, Rotation, Storage


class Pool:
    """The planes of each layer of a group."""

    def __init__(self, group: Group, backend: Backend, *, cells: int, dtype: torch.dtype, device: torch.device) -> None:
        """In the arrangement of `backend`. Raises `BadRequest` if it cannot read a plane's storage."""
        self._rotations = {size: hadamard(size, device) for size in rotated_sizes(group.planes)}
        self._of: dict[int, dict[str, StoredPlane]] = {layer: {} for layer in group.layers}
        for plane in group.planes:
            storage = storage_of(plane, dtype)
            if storage.kind not in backend.kinds:
                readable = ", ".join(sorted(backend.kinds))
                raise BadRequest(f"{backend.name} cannot read {plane.name} stored as {storage.kind}, only {readable}")
            rotation = self._rotations[plane.size] if storage.hadamard else None
            for planes in self._of.values():
                planes[plane.name] = StoredPlane(plane, storage, cells + 1, backend.arrangement, device, rotation)

    def zero(self, run: Run) -> None:
        """Zero free cells in all planes."""
        for planes in self._of.values():
            for plane in planes.values():
                plane.zero(run)

    @property
    def bytes(self) -> int:
        """Bytes held, all layers and planes, scales and rotations included."""
        planes = sum(kept.bytes for planes in self._of.values() for kept in planes.values())
        return planes + sum(rotation.nbytes for rotation in self._rotations.values())

    def planes(self, layer: int) -> Mapping[str, StoredPlane]:
        """The planes of a layer by name: always the same mapping."""
        return self._of[layer]

    def check_new(self, layer: int, n: int, new: Mapping[str, Tensor]) -> None:
        """Raise `BadRequest` unless `new` are planes [n,heads,size] of floats: others torch may broadcast or cut."""
        for name, values in new.items():
            if name not in self._of[layer]:
                raise BadRequest(f"layer {layer} has no plane {name}, only {', '.join(self._of[layer])}")
            plane = self._of[layer][name].plane
            if values.shape != (n, plane.heads, plane.size) or not values.is_floating_point():
                raise BadRequest(
                    f"plane {name} of layer {layer} is {[n, plane.heads, plane.size]} of floats, not "
                    f"{list(values.shape)} of {values.dtype}"
                )

    def move(self, layer: int, source: Tensor, target: Tensor, rotations: Mapping[str, Rotation], by: int) -> None:
        """Copy the content of cells `source` to cells `target` (none of them a source), rotated by `by` positions.

        Planes without a rotation are copied bit for bit. The others are rounded to their storage once more.
        """
        for name, plane in self._of[layer].items():
            rotation = rotations.get(name)
            if rotation is None:
                plane.restore(target, plane.content(source))
            else:
                self.rotate(layer, name, source, target, rotation, by)

    def rotate(self, layer: int, name: str, source: Tensor, target: Tensor, rotation: Rotation, by: int) -> None:
        """Write the content of cells `source` of one plane, rotated by `by` positions, to cells `target`."""
        rotated = rope_rotated(self._of[layer][name].values(source), rotation, by)
        write_planes(self._of[layer], target, {name: as_new(rotated)})


def as_new(values: Tensor) -> Tensor:
    """[n,heads,size] -> [1,heads,n,size], a view: the shape in which models pass new keys and values."""
    return values.transpose(0, 1)[None]


def storage_of(plane: Plane, dtype: torch.dtype) -> Storage:
    """The storage of `plane` in a memory of `dtype`. Raises `BadRequest` for a type that K/V cannot have."""
    if plane.storage is not None:
        return plane.storage
    return Storage(str(dtype).removeprefix("torch."))  # pyright: ignore[reportArgumentType]  # it checks the kind


def rope_rotated(x: Tensor, rotation: Rotation, by: int) -> Tensor:
    """Stored keys x [n,heads,size] rotated by `by` positions, which may be negative. A new tensor of the same dtype.

    RoPE rotates pairs of elements by angles proportional to the position, and the angles of successive rotations add up
    (RoFormer, arXiv 2104.09864, section 3.2). So a key stored at position p and rotated by d positions equals the key
    of the same token computed at p + d. Each rotation rounds a key of lower precision than float32 once.
    """
    pairs = len(rotation.frequencies)
    # Angles in float64: at by = 100 000 a float32 product is off by more than a bfloat16 rounding.
    angle = torch.tensor(rotation.frequencies, dtype=torch.float64, device=x.device) * by  # [pairs]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    out = x.to(wide, copy=True)
    left, right = _pairs(out, rotation, pairs)
    a, b = left.clone(), right.clone()
    left.copy_(a * cos - b * sin)
    right.copy_(b * cos + a * sin)
    return out.to(x.dtype)


def _pairs(x: Tensor, rotation: Rotation, pairs: int) -> tuple[Tensor, Tensor]:
    """Views [n,heads,pairs] of the two elements of every pair."""
    start, end = rotation.start, rotation.start + 2 * pairs
    if rotation.interleaved:
        return x[..., start:end:2], x[..., start + 1 : end : 2]
    return x[..., start : start + pairs], x[..., start + pairs : end]
