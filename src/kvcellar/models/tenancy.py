"""tenancy: who serves a network, and how it becomes what it was before the first of them came.

A network may be somebody's own: he gave it to an engine, and goes on with it afterwards. While it is served, its
attention is ours, its mixers ask the open door how they are called, it is in eval mode without gradients, and linear
layers may be packed. The last guest to leave takes all of that back.

Always true: the record of a network is with the network, from its first guest until the last has left.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedModel

from kvcellar.errors import WrongStage

_RECORD = "_kvcellar_tenancy"


class Tenant:
    """One adoption of a network. Guests that differ only in how they store K/V are one tenant."""

    def __init__(self, mode: str, refused: str | None) -> None:
        self.mode, self.refused = mode, refused  # as of its guest


class Tenancy:
    """Of one network. Begun by whoever is about to change something about it; `leave` ends it if nobody is there."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tenants: WeakSet[Tenant] = WeakSet()  # one that was forgotten without leaving keeps nobody from it
        self._undo = ExitStack()
        self._undo.callback(_set_modes, [(module, module.training) for module in model.modules()])
        self._undo.callback(_set_gradients, [(weight, weight.requires_grad) for weight in model.parameters()])
        self._undo.callback(set_attentions, attentions(model))

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Tenancy":
        """The one that there is, else a new one."""
        found = vars(model).get(_RECORD)
        if not isinstance(found, cls):
            found = cls(model)
            vars(model)[_RECORD] = found
        return found

    @property
    def tenant(self) -> Tenant | None:
        """One of those who are there: all run the network in the same way."""
        return next(iter(self._tenants), None)

    def enter(self, tenant: Tenant) -> None:
        self._tenants.add(tenant)

    def afterwards(self, undo: Callable[..., None], *args: Any) -> None:
        """What was changed for all guests to come, and how to take it back."""
        self._undo.callback(undo, *args)

    def leave(self, tenant: Tenant | None = None) -> None:
        """Go. If nobody is left, the network is what it was. May be called again."""
        if tenant is not None:
            self._tenants.discard(tenant)
        if not self._tenants:
            vars(self._model).pop(_RECORD, None)
            self._undo.close()

    def __reduce__(self) -> NoReturn:
        raise WrongStage("a network cannot be copied while it is served: copy it before, or close its engine")


Attentions = list[tuple[Any, str | None]]


def attentions(model: PreTrainedModel) -> Attentions:
    """Every config in a network, with the attention that it names: parts of a network may have different ones."""
    return [(config, config._attn_implementation) for config in _configs(model)]


def set_attentions(found: Attentions) -> None:
    """Give each config the attention that it named. It is one that the network had, so nobody checks it again."""
    for config, name in found:
        config._attn_implementation_internal = name  # the property's setter would hand it on to the configs inside


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config: Any = waiting.pop()
        if id(config) not in seen:
            seen.add(id(config))
            inside = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [one for one in inside if one is not None]
            yield config


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _set_gradients(weights: list[tuple[nn.Parameter, bool]]) -> None:
    for weight, wanted in weights:
        weight.requires_grad_(wanted)
