"""calibrate: sums of x xᵀ over what linear layers read, from forwards of the unquantised network.

All sums at once may need more memory than the weights, so they are computed in rounds of a limited size. Layers that
read the same tensor (q, k and v; gate and up) share one sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.models.load import load
from kvcellar.models.quantize.windows import Windows, of_text, sampled
from kvcellar.progress import report

WINDOWS, LENGTH = 24, 256  # about 6 thousand tokens
FEWEST = 128  # rows that a sum needs: layers that read fewer have none
_BYTES = 4 << 30  # of the sums of one round
_SEED = 11


@dataclass(slots=True)
class _Sum:
    """Of the layers that read the same tensors. `hessian` is float32 [i,i]."""

    modules: list[str]
    inputs: int
    hessian: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: int = 0

    def add(self, read: Tensor) -> None:
        rows = read.detach().reshape(-1, self.inputs).float()
        self.hessian += (rows.T @ rows).cpu()
        self.rows += len(rows)


class Calibration:
    """A network and the windows that it reads."""

    def __init__(self, source: Path, text: str | None) -> None:
        loaded = load(source)
        self._model = loaded.model
        report("sampling from the model")
        self.windows: Windows = (
            sampled(loaded.model, WINDOWS, LENGTH, seed=_SEED)
            if text is None
            else of_text(loaded, text, WINDOWS, LENGTH)
        )

    def hessians(self, modules: Sequence[str]) -> Iterator[Mapping[str, Tensor | None]]:
        """Sums for these modules, in rounds; None for a module that is no linear layer, or read too little. Each is
        valid until the next round."""
        known = dict(self._model.named_modules())
        linear = [name for name in modules if isinstance(known.get(name), nn.Linear)]
        yield dict.fromkeys(name for name in modules if name not in set(linear))
        for number, sums in enumerate(_rounds(self._shared(linear))):
            for one in sums:
                one.hessian = torch.zeros(one.inputs, one.inputs)
            with self._hooks({one.modules[0]: one.add for one in sums}):
                for done, ids in enumerate(self.windows.ids):
                    report(f"calibrating, round {number + 1}", done, len(self.windows.ids))
                    _forward(self._model, ids)
            yield {name: one.hessian if one.rows >= FEWEST else None for one in sums for name in one.modules}
            for one in sums:
                one.hessian = torch.empty(0)

    def _shared(self, names: Sequence[str]) -> list[_Sum]:
        """The layers in the order of their first use, those that read one tensor together."""
        modules: Any = dict(self._model.named_modules())
        read: dict[int, tuple[Tensor, list[str]]] = {}  # holds the tensors, so that ids stay different
        ready: set[str] = set()

        def note(name: str) -> Callable[[Tensor], None]:
            def act(tensor: Tensor) -> None:
                if name not in ready:
                    ready.add(name)
                    read.setdefault(id(tensor), (tensor, []))[1].append(name)

            return act

        with self._hooks({name: note(name) for name in names}):
            _forward(self._model, self.windows.ids[0])
        sums = [_Sum(found, modules[found[0]].in_features) for _, found in read.values()]
        return sums + [_Sum([name], modules[name].in_features) for name in names if name not in ready]

    @contextmanager
    def _hooks(self, acts: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
        """Within the block, these are called with what the modules read."""
        modules = dict(self._model.named_modules())

        def calling(act: Callable[[Tensor], None]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _, read: act(read[0]) if read else None

        with ExitStack() as hooks:
            for name, act in acts.items():
                hooks.callback(modules[name].register_forward_pre_hook(calling(act)).remove)
            yield


def _rounds(sums: Sequence[_Sum]) -> Iterator[list[_Sum]]:
    """In order, so many at once as `_BYTES` allow, and at least one."""
    some: list[_Sum] = []
    size = 0
    for one in sums:
        more = 4 * one.inputs**2
        if some and size + more > _BYTES:
            yield some
            some, size = [], 0
        some.append(one)
        size += more
    if some:
        yield some


def _forward(model: PreTrainedModel, ids: Tensor) -> None:
    with torch.inference_mode():
        model(input_ids=ids[None].to(model.device), use_cache=False)
