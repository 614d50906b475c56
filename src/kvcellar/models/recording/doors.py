"""doors: what a network calls while it is traced, and while the shapes of a module's results are found out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.errors import ModelRefused
from kvcellar.models.recording.trace import Trace
from kvcellar.models.scan import Call
from kvcellar.models.seam import Door, Extras, scoring_of
from kvcellar.models.shape import Shape
from kvcellar.shapes import Scoring


class RecordingDoor(Door):
    """Writes down what a forward stores and reads, as operators of `trace`. Tensors are fake."""

    def __init__(self, trace: Trace, shape: Shape, past: int | Tensor, cells: Mapping[int, Any]) -> None:
        """`cells`: by layer that is read as a whole, the number of cells that a step sees."""
        self._trace, self._shape, self._past, self._cells = trace, shape, past, cells

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._trace.add("kvcellar.put", (k, v, layer), {}, ())
        if layer not in self._cells:
            return k, v
        return self._dense(k, layer, "k"), self._dense(v, layer, "v")

    def _dense(self, new: Tensor, layer: int, plane: str) -> Tensor:
        stored = self._trace.empty(new, (1, new.shape[1], self._cells[layer], new.shape[3]))
        self._trace.add("kvcellar.dense", (layer, plane), {}, (stored,))
        return stored

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        binding = self._shape.bindings.get(module)
        if binding is None:
            raise ModelRefused(f"{type(module).__name__} attends, and did not when the model was probed")
        out = self._trace.empty(q, (1, q.shape[2], q.shape[1], v.shape[3]))
        rows, scoring = ((q,) if binding.direct else (q, k, v)), _keywords(scoring_of(q, extras))
        name = "kvcellar.attend" if binding.direct else "kvcellar.attend_dense"
        self._trace.add(name, (*rows, binding.layer), scoring, (out,))
        return out

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, 1, dtype=torch.bool, device=device)  # not read: the plan decides

    def past_length(self, layer: int) -> int | Tensor:
        return self._past


class SampleDoor(Door):
    """Lets a module run by itself on a few rows, of one sequence without earlier tokens; nothing is stored."""

    def __init__(self, shape: Shape) -> None:
        self._states = {} if shape.recurrent is None else shape.recurrent.layers

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return k, v

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, 1, dtype=torch.bool, device=device)

    def past_length(self, layer: int) -> int | Tensor:
        return 0

    def state(self, layer: int, name: str) -> Tensor:
        plane = next(plane for plane in self._states[layer] if plane.name == name)
        return torch.zeros(1, *plane.shape, dtype=getattr(torch, plane.kind))

    def shift_in(self, new: Tensor, layer: int, name: str, kernel: int | None) -> Tensor:
        return torch.cat([self.state(layer, name).to(new), new], -1)

    def update_state(self, value: Tensor, layer: int, name: str) -> Tensor:
        return value

    def scan(self, layer: int, call: Call) -> Any:
        return call.run()


def _keywords(scoring: Scoring) -> dict[str, Any]:
    return {"scale": scoring.scale, "softcap": scoring.softcap, "sinks": scoring.sinks}
