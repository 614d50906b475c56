"""hooks: code that a user put around modules, which a recorded step would not run.

Always true: a network is recorded, and a recorded step runs, only while no module has a hook of its forward, and none
has a `forward` of its own instance that is not ours.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

from kvcellar.models.adapted import AdaptedLayer
from kvcellar.models.mixers import Mixed
from kvcellar.models.routers import Routed

CAPTURING = "transformers.utils.output_capturing"  # its hooks do nothing unless a forward is to return more than logits
Registered = Mapping[int, Any]
OURS = Mixed | Routed  # forwards for good


class Hooks:
    """Those of one network. Modules must not be added to it or removed from it afterwards."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        modules = [module for _, module in network.named_modules()]
        every = [of_all._global_forward_hooks, of_all._global_forward_pre_hooks, *(h for m in modules for h in _of(m))]
        self._registered: list[Registered] = [hooks for hooks in every if not hooks or not _are_harmless(hooks)]
        self._attributes = [vars(module) for module in modules if not isinstance(vars(module).get("forward"), OURS)]

    def found(self) -> bool:
        """Whether there are some. It takes microseconds: each step calls it."""
        if any(self._registered):
            return True
        for attributes in self._attributes:
            if "forward" in attributes and not isinstance(attributes["forward"], AdaptedLayer):
                return True
        return False

    def reason(self) -> str:
        """Where the first is of those that were found."""
        for name, module in self._network.named_modules():
            where = f"its module {name or type(module).__name__} has"
            if not all(map(_are_harmless, _of(module))):
                return f"{where} forward hooks, which a recorded step would not call"
            if not isinstance(vars(module).get("forward"), OURS | AdaptedLayer | None):
                return f"{where} a forward of its own, not that of its class, which a recorded step would not call"
        return "torch has forward hooks for all modules, which a recorded step would not call"


def _of(module: nn.Module) -> tuple[Registered, Registered]:
    return module._forward_hooks, module._forward_pre_hooks


def _are_harmless(hooks: Registered) -> bool:
    return all(getattr(hook, "__module__", None) == CAPTURING for hook in hooks.values())
