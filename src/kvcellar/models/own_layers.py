"""own_layers: models that bring a class of cache layers of their own, and call its methods.

DeepSeek-V4 keeps compressed entries there, MiniMax-M3 the keys of its indexer. What such a layer holds is computed from
values that each token has by itself, in order of position. So these values are stored in cells, as planes beside keys
and values, and in each forward an empty layer of the model's own class is given those of all tokens: it computes again
what it would have held. Any token can be forked, cut off or resumed at, and no state has to be kept beside the cells.
The cost is one more pass over the stored values a step; attention makes one, too.

Always true: between two forwards nothing is held here; `fresh` layers live as long as the forward that made them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvcellar.errors import ModelRefused

INDEX = "index"  # the plane of an indexer's keys
OWN = "its layers keep what they compute in a cache layer of their own class, which sees one sequence in order"

Keep = Callable[[str, Tensor, int], Tensor]  # plane, new [1,T,D], layer -> the values of all tokens [1,N,D]


class OwnLayer:
    """One cache layer of a model's own class, empty (`fresh`), with methods that are given the values of all tokens."""

    def __init__(self, fresh: Any, layer: int, keep: Keep) -> None:
        self._fresh, self._layer, self._keep = fresh, layer, keep

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """DeepSeek-V4: kv and gate [1,T,D] of the new tokens -> those of all complete windows, and where they begin."""
        kv, gate = (self._keep(f"{name} {what}", new, self._layer) for what, new in (("kv", kv), ("gate", gate)))
        return self._fresh.store_compression_weights(name, kv, gate)

    def update_overlap_state(self, *args: Any) -> tuple[Tensor | None, Tensor | None]:
        """DeepSeek-V4: what the window before the first one left: nothing, as the first one is that of position 0."""
        return self._fresh.update_overlap_state(*args)

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """DeepSeek-V4: the entries [1,n,D] of all complete windows, and none before them."""
        return self._fresh.update_compressor_states(name, compressed)

    def update_index(self, keys: Tensor) -> Tensor:
        """MiniMax-M3: keys [1,1,T,D] of its indexer -> those of all tokens [1,1,N,D]."""
        return self._fresh.update_index(self._keep(INDEX, keys[:, 0], self._layer)[:, None])

    def __getattr__(self, name: str) -> NoReturn:
        raise ModelRefused(f"layer {self._layer} uses {name} of a cache layer of its own class, which is not supported")


class OwnLayers:
    """The own layers of one forward, each made when the model first asks for it. `fresh(layer)` makes an empty one."""

    def __init__(self, fresh: Callable[[int], Any], keep: Keep) -> None:
        self._fresh, self._keep = fresh, keep
        self._made: dict[int, OwnLayer] = {}

    def of(self, layer: int) -> OwnLayer:
        if layer not in self._made:
            self._made[layer] = OwnLayer(self._fresh(layer), layer, self._keep)
        return self._made[layer]


def fresh_layers(model: PreTrainedModel) -> Callable[[int], Any]:
    """A maker of empty cache layers, of the classes that transformers would use for `model`."""

    def fresh(layer: int) -> Any:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        if layer >= len(layers):
            raise ModelRefused(f"layer {layer} uses a cache layer of its own class, and transformers knows none")
        return layers[layer]

    return fresh
