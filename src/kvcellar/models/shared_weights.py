"""shared_weights: a copy of a network that has modules and configs of its own, on the same weights.

A network that the caller built is served through such a copy. Attention, eval mode, mixers and packed layers are
changed in the copy, so the caller's network stays as it is: it can be called, saved, copied and moved at any time, and
when the copy is dropped there is nothing to put back.
"""

from copy import Error, deepcopy
from typing import TypeVar

from torch import Tensor, nn

from kvcellar.errors import ModelRefused

Network = TypeVar("Network", bound=nn.Module)


def sharing_weights(model: Network) -> Network:
    """A copy whose parameters and buffers are in the memory of the original's. Raises `ModelRefused`.

    The copy's parameters are objects of its own, without gradients: moving or casting the original, which replaces
    tensors, does not reach the copy. Writing into a weight does.
    """
    held = [vars(module) | module._parameters | module._buffers for module in model.modules()]
    shared = {id(t): _shared(t) for tensors in held for t in tensors.values() if isinstance(t, Tensor)}
    try:
        return deepcopy(model, shared)  # a memo: what is in it counts as copied
    except (Error, TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot be served: its modules cannot be copied: {error}. Load it from a directory"
        ) from error


def _shared(tensor: Tensor) -> Tensor:
    """Subclasses stay the same object: what else they hold may not survive `detach`."""
    return nn.Parameter(tensor.detach(), requires_grad=False) if type(tensor) is nn.Parameter else tensor
