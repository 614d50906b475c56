"""own_layers: models with their own class of cache layers, whose methods they call.

DeepSeek-V4 keeps compressed entries there, MiniMax-M3 the keys of its indexer. The content of such a layer is computed
from one value per token, in order of position. So these values are stored in cells, as planes beside keys and values,
and in each forward an empty layer of the model's own class gets those of all tokens and computes its content again. A
sequence can be forked, cut and resumed at any token, and no state is kept beside the cells. The cost is one more pass
over the stored values per step.

Always true: between two forwards nothing is stored here; `fresh` layers are used for one forward.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvcellar.errors import ModelRefused

INDEX = "index"  # the plane of an indexer's keys
OWN = "its layers use a cache layer of their own class, which needs one sequence in order"

Keep = Callable[[str, Tensor, int], Tensor]  # plane, new [1,T,D], layer -> the values of all tokens [1,N,D]


class OwnLayer:
    """Wraps an empty cache layer of the model's own class (`fresh`): its methods get the values of all tokens."""

    def __init__(self, fresh: Any, layer: int, keep: Keep) -> None:
        self._fresh, self._layer, self._keep = fresh, layer, keep

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """DeepSeek-V4: kv and gate [1,T,D] of new tokens -> those of all complete windows, and the start of these."""
        kv, gate = (self._keep(f"{name} {what}", new, self._layer) for what, new in (("kv", kv), ("gate", gate)))
        return self._fresh.store_compression_weights(name, kv, gate)

    def update_overlap_state(self, *args: Any) -> tuple[Tensor | None, Tensor | None]:
        """DeepSeek-V4: the overlap with the window before the first one, which is empty at position 0."""
        return self._fresh.update_overlap_state(*args)

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """DeepSeek-V4: the entries [1,n,D] of all complete windows."""
        return self._fresh.update_compressor_states(name, compressed)

    def update_index(self, keys: Tensor) -> Tensor:
        """MiniMax-M3: keys [1,1,T,D] of its indexer -> those of all tokens [1,1,N,D]."""
        return self._fresh.update_index(self._keep(INDEX, keys[:, 0], self._layer)[:, None])

    def __getattr__(self, name: str) -> NoReturn:
        raise ModelRefused(f"layer {self._layer} uses {name} of a cache layer of its own class, which is not supported")


class OwnLayers:
    """The own layers of one forward, made on first use. `fresh(layer)` makes an empty one."""

    def __init__(self, fresh: Callable[[int], Any], keep: Keep) -> None:
        self._fresh, self._keep = fresh, keep
        self._made: dict[int, OwnLayer] = {}

    def of(self, layer: int) -> OwnLayer:
        if layer not in self._made:
            self._made[layer] = OwnLayer(self._fresh(layer), layer, self._keep)
        return self._made[layer]


def fresh_layers(model: PreTrainedModel) -> Callable[[int], Any]:
    """A function that makes empty cache layers, of the classes that transformers uses for `model`."""

    def fresh(layer: int) -> Any:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        if layer >= len(layers):
            raise ModelRefused(f"layer {layer} uses a cache layer of its own class, and transformers has none for it")
        return layers[layer]

    return fresh
