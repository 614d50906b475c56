"""shared_weights: a copy of a network with its own modules and configs, on the same weights.

A network that the caller built is served through such a copy. Attention, eval mode, mixers and packed layers are
changed in the copy, so the caller's network can be called, saved, copied and moved at any time, and there is nothing to
restore when the copy is dropped.
"""

from copy import Error, deepcopy
from typing import TypeVar

from torch import Tensor, nn

from kvcellar.errors import ModelRefused

Network = TypeVar("Network", bound=nn.Module)


def sharing_weights(model: Network) -> Network:
    """A copy whose parameters and buffers share the storage of the original's. Raises `ModelRefused`.

    The copy has its own parameter objects, without gradients. Moving or casting the original replaces its tensors, so
    it does not affect the copy. Writing into a weight does.
    """
    held = [vars(module) | module._parameters | module._buffers for module in model.modules()]
    shared = {id(t): _shared(t) for tensors in held for t in tensors.values() if isinstance(t, Tensor)}
    try:
        return deepcopy(model, shared)  # a memo: objects in it are taken as copied
    except (Error, TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot be served: its modules cannot be copied: {error}. Load it from a directory"
        ) from error


def _shared(tensor: Tensor) -> Tensor:
    """A subclass of Parameter stays the same object, since `detach` may lose its other attributes."""
    return nn.Parameter(tensor.detach(), requires_grad=False) if type(tensor) is nn.Parameter else tensor
