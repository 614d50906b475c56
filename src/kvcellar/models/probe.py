"""probe: a small forward of a model through a door that records what it stores and reads."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcellar.errors import ModelRefused
from kvcellar.models.facts import embedding_rows, first_position
from kvcellar.models.seam import cache_argument, opened
from kvcellar.models.shape import PROBE_TOKENS, Shape, StoreProbe, causal_shape


def stored_shape(model: PreTrainedModel, *, fresh: Callable[[int], Any] | None = None) -> Shape:
    """What a model stores, found by a small forward with its own attention. Raises `ModelRefused`.

    So it does for layers that store more of a token than keys and values (an indexer's keys, say), unless the caller
    keeps that, too, and says with `fresh` how cache layers of the model's own class are made.
    """
    door = StoreProbe(fresh=fresh)
    probe(model, door, range(PROBE_TOKENS))
    if not door.stored and not door.states:
        raise ModelRefused("its forward stores nothing through the cache, so there is nothing to remember")
    dtype = str(model.dtype).removeprefix("torch.")
    return causal_shape(door.stored, door.recurrent, beside=door.planes, dtype=dtype, device=model.device.type)


@torch.inference_mode()
def probe(model: PreTrainedModel, door: StoreProbe, positions: Sequence[int]) -> None:
    ids = (torch.arange(PROBE_TOKENS, device=model.device)[None] + first_position(model)) % embedding_rows(model)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    accepts = frozenset(inspect.signature(model.forward).parameters)
    if "position_ids" in accepts:
        inputs["position_ids"] = torch.tensor(positions, device=model.device)[None] + first_position(model)
    watches = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, _: door.running.append(module)),
            module.register_forward_hook(lambda *_: [door.running.pop()] and None, always_call=True),
        )
    ]
    try:
        with opened(door) as cache:
            model(**inputs, **{cache_argument(accepts): cache})
    finally:
        for watch in watches:
            watch.remove()
