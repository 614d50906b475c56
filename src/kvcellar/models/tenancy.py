"""tenancy: who serves a network, and how it becomes what it was before the first of them came.

A network may be somebody's own: he gave it to an engine, and goes on with it afterwards. While it is served, its
attention is ours, its mixers ask the open door how they are called, it is in eval mode without gradients, and linear
layers may be packed. The last guest to leave takes all of that back.

Always true:
  * the record of a network is with the network, from before anything is changed about it until all of that is undone;
  * a record is used only in the process that made it: in a fork, where a thread that is not there may hold its lock,
    the network cannot be served again, and is not given back;
  * whoever runs the network or changes something about it holds the record's lock, and is inside meanwhile: so nobody
    meets a network that is half changed, and nobody gives it back beside somebody who relies on it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any, NoReturn
from weakref import WeakSet, ref

from torch import nn
from transformers import PreTrainedModel

from kvcellar.errors import WrongStage
from kvcellar.process import Origin

_RECORD = "_kvcellar_tenancy"


class Tenant:
    """One adoption of a network. Guests that differ only in how they store K/V are one tenant.

    One without a mode runs nothing yet: it is inside so that nobody gives the network back.
    """

    def __init__(self, mode: str = "", refused: str | None = None) -> None:
        self.mode, self.refused = mode, refused  # as of its guest


class Tenancy:
    """Of one network. Begun by a visit of whoever is about to change something; the last who leaves ends it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._lock = RLock()
        self._origin = Origin()
        self._model = model
        self._tenants: WeakSet[Tenant] = WeakSet()  # one that was forgotten without leaving keeps nobody from it
        self._undo = ExitStack()
        self._begun = False

    @classmethod
    @contextmanager
    def visited(cls, model: PreTrainedModel) -> Iterator["Tenancy"]:
        """The record that there is, else a new one. Within the block somebody is inside, whoever else leaves."""
        visitor = Tenant()
        tenancy = cls._of(model)
        try:
            while not tenancy._admits(visitor):
                tenancy = cls._of(model)
            yield tenancy
        finally:
            tenancy.leave(visitor)

    @property
    def lock(self) -> RLock:
        """Raises `WrongStage` in a fork of the process that serves the network."""
        if not self._origin.here:
            raise WrongStage(
                f"this network is served in {self._origin}: load it anew here, or close its engine before the fork"
            )
        return self._lock

    @classmethod
    def _of(cls, model: PreTrainedModel) -> "Tenancy":
        return vars(model).setdefault(_RECORD, cls(model))

    def _admits(self, visitor: Tenant) -> bool:
        """Whether he is inside; else this record ended before he came, and there is another."""
        self._tenants.add(visitor)
        with self.lock:
            if vars(self._model).get(_RECORD) is not self:
                return False
            if not self._begun:
                # Weak references: what is replaced for good, as the plain layers of a network of our own are, must be
                # freed, and there are twice as many weights otherwise.
                modules, weights = self._model.modules(), self._model.parameters()
                self._undo.callback(_set_modes, [(ref(module), module.training) for module in modules])
                self._undo.callback(_set_gradients, [(ref(weight), weight.requires_grad) for weight in weights])
                self._undo.callback(set_attentions, attentions(self._model))
                self._begun = True
            return True

    @property
    def tenant(self) -> Tenant | None:
        """One of those who run the network: all do so in the same way."""
        return next((tenant for tenant in self._tenants if tenant.mode), None)

    def enter(self, tenant: Tenant) -> None:
        """During a visit only: there may be nothing to enter any more otherwise."""
        self._tenants.add(tenant)

    def afterwards(self, undo: Callable[..., None], *args: Any) -> None:
        """What was changed for all guests to come, and how to take it back."""
        self._undo.callback(undo, *args)

    def leave(self, tenant: Tenant) -> None:
        """Go. If nobody is left, the network is what it was. May be called again.

        Does not wait for those who are inside: one of them may be waiting for this.
        """
        self._tenants.discard(tenant)
        if self._tenants or not self._origin.here:
            return
        with self.lock:
            if self._tenants or vars(self._model).get(_RECORD) is not self:
                return
            try:
                self._undo.close()
            finally:
                vars(self._model).pop(_RECORD)

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


def _set_modes(modes: "list[tuple[ref[nn.Module], bool]]") -> None:
    for found, training in modes:
        if (module := found()) is not None:
            module.training = training


def _set_gradients(weights: "list[tuple[ref[nn.Parameter], bool]]") -> None:
    for found, wanted in weights:
        if (weight := found()) is not None:
            weight.requires_grad_(wanted)
