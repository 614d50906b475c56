"""A call that a door does not override is refused with the reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcellar.engine.models.registered import GuestCache
from kvcellar.engine.models.seam import Door
from kvcellar.errors import ModelRefused
from kvcellar.memory.shapes import Scoring

X = torch.zeros(1, 1, 2, 4)


class StoringDoor(Door):
    """Overrides only the abstract methods."""

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return k, v

    def past_length(self, layer: int) -> int:
        return 0


CACHE = {
    "update_indexer": (X[0], 0),
    "get_conv_state": (0,),
    "update_conv_state": (X[0], 0),
    "get_recurrent_state": (0,),
    "update_recurrent_state": (X, 0),
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "own_layer": (0,),
    "attend": (nn.Identity(), X, X, X, None, Scoring(1.0)),
    "mask": (None, None, 2, X.device),
    "scan": (0, None),
}


@pytest.mark.parametrize("name", CACHE)
def test_a_cache_call_that_a_door_does_not_override_is_refused(name: str) -> None:
    with pytest.raises(ModelRefused):
        getattr(GuestCache(StoringDoor()), name)(*CACHE[name])


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_call_that_a_door_does_not_override_is_refused(name: str) -> None:
    with pytest.raises(ModelRefused):
        getattr(StoringDoor(), name)(*OTHERS[name])
