"""registered: what a network of transformers calls in place of its own: a cache-shaped door, attention and masks.

The doors themselves (`seam.py`) do not import transformers: steps of a recording run without it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicCache

from kvcellar.engine.models.mixers import conv
from kvcellar.engine.models.seam import INDEX, Door, OwnLayer, current_door, opened
from kvcellar.engine.models.weights.scan import recurrent
from kvcellar.errors import ModelRefused, WrongStage

ATTENTION = "kvcellar"  # our name in transformers' registries


def fresh_layers(model: PreTrainedModel) -> Callable[[int], Any]:
    """A function that makes empty cache layers, of the classes that transformers uses for `model`."""

    def fresh(layer: int) -> Any:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        if layer >= len(layers):
            raise ModelRefused(f"layer {layer} uses a cache layer of its own class, and transformers has none for it")
        return layers[layer]

    return fresh


def layers_with_masks(model: PreTrainedModel) -> list[str]:
    """The classes of its own cache layers that decide what tokens see: a forward without a cache does not show that."""
    kinds: Sequence[str] = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    own = {one for kind in kinds if (one := DYNAMIC_LAYER_TYPE_MAPPING.get(kind)) is not None}
    sizes = {one.__name__: getattr(one, "get_mask_sizes", None) for one in own}
    return sorted(name for name, found in sizes.items() if found and found.__module__ != Cache.__module__)


@contextmanager
def opened_cache(door: Door) -> Iterator["GuestCache"]:
    """Within the block, `door` handles the model's calls; yields the cache to pass as `past_key_values`."""
    with opened(door):
        yield GuestCache(door)


class GuestCache(Cache):
    """The cache-shaped door. It stores nothing."""

    def __init__(self, door: Door) -> None:
        super().__init__(layers=[])
        self.layers: Any = _Layers(door)
        self.update: Any = door.update  # the door's own method: every layer calls it
        self._door = door

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._door.past_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._door.mask_sizes(query_length, layer_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._door.state(layer_idx, conv(state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        return self._door.shift_in(conv_states, layer_idx, conv(state_idx), conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._door.state(layer_idx, recurrent(state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        return self._door.update_state(recurrent_states, layer_idx, recurrent(state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # a convolution is called in the same way for any number of tokens

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True  # a zero state equals no state

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self._door.update_plane(INDEX, indexer_key_states, layer_idx)


class _Layers(Sequence[OwnLayer]):
    """`layers` of a cache: empty for iteration by transformers; by index, cache layers of the model's own class."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[OwnLayer]:
        return iter(())

    def __getitem__(self, layer: Any) -> Any:
        return self._door.own_layer(layer)


UNOPENED = "a guest's network is run by `Guest.forward` only: pass `build_guest` a copy to call it yourself"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **extras: Any):
    door = current_door()
    if door is None:
        raise WrongStage(UNOPENED)
    return door.attend(module, query, key, value, attention_mask, extras), None


def _mask(*, q_length: int, mask_function: Any, local_size: int | None = None, device: Any = None, **_: Any) -> Tensor:
    door = current_door()
    if door is None:
        raise WrongStage(UNOPENED)
    return door.mask(mask_function, local_size, q_length, torch.device(device or "cpu"))


def register() -> None:
    """Register our attention and mask functions with transformers. They hold no state."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


def own_attention(model: PreTrainedModel) -> None:
    """Select the eager attention of transformers, where the model's attention can be selected."""
    if model._can_set_attn_implementation():
        _select(model, "eager")


def our_attention(model: PreTrainedModel) -> None:
    """Select the attention function that calls the open door."""
    _select(model, ATTENTION)


def _select(model: PreTrainedModel, name: str) -> None:
    """Of the language model: towers keep theirs."""
    config = model.config
    model.set_attn_implementation({"": name, **_of_text(config, config.get_text_config(decoder=True), name)})


def _of_text(config: Any, text: Any, name: str) -> dict[str, Any]:
    """The part of `config` that is `text`, by its place."""
    found: dict[str, Any] = {}
    for key in config.sub_configs:
        part = getattr(config, key)
        if part is text:
            found[key] = name
        elif part is not None and (inside := _of_text(part, text, name)):
            found[key] = inside | {"": part._attn_implementation}
    return found
