"""adapted: the linear layers of a network add what adapters say, for the rows of a step that have one.

The matrices of an adapter stay beside the weights, so one step computes rows of several adapters and of none:

    out = layer(x)                         # all rows
    out[rows] += x[rows] A^T B^T           # the rows of each adapter, its scale in B

Always true:
  * the weights of the network never change;
  * the `forward` of layers is replaced from a step with an adapter on until the next one without, which runs them as
    they are; layers that no adapter changes are never touched;
  * outside of a step, a replaced `forward` adds nothing, unless `whole` is set.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kvcellar.engine.models.adapters.adapter_rows import EVERY, Part
from kvcellar.engine.models.adapters.adapters import Adapter, Lora, linear_layers
from kvcellar.engine.models.seam import current_door
from kvcellar.errors import ModelRefused
from kvcellar.kernels.packed import BLOCK, padded
from kvcellar.memory.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdaptedLayer:
    """Replaces the `forward` of a linear layer."""

    def __init__(self, name: str, module: nn.Module, network: "AdaptedNetwork", *, head: bool) -> None:
        self.module, self._own, self._instance = module, module.forward, "forward" in vars(module)
        self.loras: dict[int, Lora] = {}
        self._name, self._network, self._head = name, network, head

    def __call__(self, x: Tensor) -> Tensor:
        out = self._own(x)
        for number, rows in self._parts(x):
            if (lora := self.loras.get(number)) is not None:
                _add(x.reshape(-1, x.shape[-1]), lora, out.view(-1, out.shape[-1]), rows)
        return out

    def restore(self) -> None:
        """Let the layer be as it was."""
        if self._instance:
            self.module.forward = self._own
        else:
            del self.module.forward

    def _parts(self, x: Tensor) -> Sequence[Part]:
        if (door := current_door()) is None:
            return ((self._network.whole, EVERY),)
        if door.adapted is None:
            return ()
        try:
            return door.adapted.parts(x.numel() // x.shape[-1], head=self._head)
        except ModelRefused as error:
            raise ModelRefused(f"the layer {self._name} cannot have an adapter: {error}") from error


def _add(x: Tensor, lora: Lora, out: Tensor, rows: slice | Tensor) -> None:
    """x [T,in], out [T,out]: add the products of some rows, block by block, which bounds the memory that it takes."""
    if isinstance(rows, slice):
        for some, into in zip(x[rows].split(BLOCK), out[rows].split(BLOCK), strict=True):
            into += _product(some, lora).to(out.dtype)
    else:
        for some in rows.split(BLOCK):
            out.index_add_(0, some, _product(x[some], lora).to(out.dtype))


def _product(x: Tensor, lora: Lora) -> Tensor:
    """x [n,in] -> [n,out]. On a CPU with few numbers of rows, as in `kernels/packed.py`."""
    n = len(x)
    if x.device.type == "cpu" and (size := padded(n)) > n:
        x = nn.functional.pad(x, (0, 0, 0, size - n))
    return (x.to(lora.a.dtype) @ lora.a.T @ lora.b.T)[:n]


class AdaptedNetwork:
    """The adapters of one network, by number. To be used between forwards, on the thread that runs them."""

    def __init__(self, network: "PreTrainedModel") -> None:
        self._network = network
        self._layers: dict[str, AdaptedLayer] = {}
        self.adapters: dict[int, Adapter] = {}
        self.changes = 0  # how often adapters were added or removed
        self.whole = 0  # the adapter of all rows of a forward outside of a step; 0: none
        self._replaced = False

    def add(self, number: int, adapter: Adapter) -> None:
        """Know an adapter that was read for this network."""
        assert number and number not in self.adapters
        self.restore()
        self.changes += 1
        linear, head = linear_layers(self._network), self._network.get_output_embeddings()
        for name, lora in adapter.loras.items():
            layer = self._layers.get(name) or AdaptedLayer(name, linear[name], self, head=linear[name] is head)
            self._layers[name] = layer
            layer.loras[number] = lora
        self.adapters[number] = adapter

    def remove(self, number: int) -> None:
        """Forget an adapter, which frees its matrices."""
        self.restore()
        self.changes += 1
        for name in self.adapters.pop(number).loras:
            del self._layers[name].loras[number]
            if not self._layers[name].loras:
                del self._layers[name]

    def begin(self, plan: Plan) -> bool:
        """A step is about to run. Whether some of its rows have an adapter."""
        numbers = {feed.adapter for feed in plan.feeds} - {0}
        assert numbers <= self.adapters.keys(), "a sequence has an adapter that is not loaded"
        if numbers:
            self.replace()
        else:
            self.restore()
        return bool(numbers)

    def replace(self) -> None:
        """Let the layers add what adapters say."""
        if not self._replaced:
            for layer in self._layers.values():
                layer.module.forward = layer
            self._replaced = True

    def restore(self) -> None:
        """Let all layers be as they were."""
        if self._replaced:
            for layer in self._layers.values():
                layer.restore()
            self._replaced = False

    def modules(self, number: int) -> Mapping[str, nn.Module]:
        """The layers that an adapter changes."""
        return {name: self._layers[name].module for name in self.adapters[number].loras}

    def check(self) -> None:
        """Assert what is always true."""
        for name, module in self._network.named_modules():
            ours: Any = vars(module).get("forward")
            assert isinstance(ours, AdaptedLayer) == (self._replaced and name in self._layers), name
        known = {name: set(layer.loras) for name, layer in self._layers.items()}
        held: dict[str, set[int]] = {}
        for number, adapter in self.adapters.items():
            for name in adapter.loras:
                held.setdefault(name, set()).add(number)
        assert known == held
