"""pool: the K/V tensors of one group. The only file that writes them.

Always true:
  * every plane of every layer has `cells + 1` places, the first of them null, in the arrangement the backend asked for;
  * planes are allocated once, zeroed; `bytes` is exactly what they take.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcellar.cache.turn import turn
from kvcellar.contracts import Arrangement, Plane, Rotation


class Pool:
    """Planes [C,heads,size] (arranged by token) or [heads,C,size] (by head), for each layer of a group."""

    def __init__(
        self,
        planes: tuple[Plane, ...],
        layers: tuple[int, ...],
        *,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
        arrangement: Arrangement,
    ) -> None:
        self.arrangement: Arrangement = arrangement
        self._of: dict[int, dict[str, Tensor]] = {}
        for layer in layers:
            self._of[layer] = {}
            for plane in planes:
                shape = (cells + 1, plane.heads) if arrangement == "token" else (plane.heads, cells + 1)
                self._of[layer][plane.name] = torch.zeros(*shape, plane.size, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """Bytes held, all layers and planes."""
        return sum(tensor.nbytes for planes in self._of.values() for tensor in planes.values())

    def plane(self, layer: int, name: str) -> Tensor:
        return self._of[layer][name]

    def write(self, layer: int, cells: Tensor | slice, new: Mapping[str, Tensor]) -> None:
        """Store `new` planes [T,heads,size] into `cells` (T of them; a slice where they are one run)."""
        for name, values in new.items():
            plane = self._of[layer][name]
            if self.arrangement == "token":
                if isinstance(cells, slice):
                    plane[cells] = values
                else:
                    plane.index_copy_(0, cells, values.to(plane.dtype))
            elif isinstance(cells, slice):
                plane[:, cells] = values.transpose(0, 1)
            else:
                plane.index_copy_(1, cells, values.to(plane.dtype).transpose(0, 1))

    def move(self, layer: int, source: Tensor, target: Tensor, turns: Mapping[str, Rotation], by: int) -> None:
        """Copy what cells `source` hold into cells `target` (none of them a source), turned by `by` positions."""
        for name in self._of[layer]:
            values = self.read(layer, name, source)
            rotation = turns.get(name)
            self.write(layer, target, {name: values if rotation is None else turn(values, rotation, by)})

    def read(self, layer: int, name: str, cells: Tensor) -> Tensor:
        """A copy [n,heads,size] of what is stored in `cells`."""
        plane = self._of[layer][name]
        return plane[cells] if self.arrangement == "token" else plane[:, cells].transpose(0, 1)
