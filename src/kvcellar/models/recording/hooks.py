"""hooks: code that a user put around modules, and adapters of layers, which a recorded step would not run.

Always true: a network is recorded, and a recorded step runs, only while no module has a hook of its forward, and none
has a `forward` of its own instance that is not ours.
"""

from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

from kvcellar.kernels.program import Op, Program
from kvcellar.models.adapted import AdaptedLayer
from kvcellar.models.adapters import linear_layers
from kvcellar.models.mixers import Mixed
from kvcellar.models.routers import Routed

CAPTURING = "transformers.utils.output_capturing"  # its hooks do nothing unless a forward is to return more than logits
Registered = Mapping[int, Any]
OURS = (Mixed, Routed, AdaptedLayer)  # forwards that instances of modules have


class Hooks:
    """Those of one network. Modules must not be added to it or removed from it afterwards."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        modules = [module for _, module in network.named_modules()]
        of_torch = of_all._global_forward_hooks, of_all._global_forward_pre_hooks
        every: list[Registered] = [*of_torch, *(hooks for module in modules for hooks in _of(module))]
        self._registered = [hooks for hooks in every if not hooks or not _are_harmless(hooks)]
        self._harmless = [(hooks, frozenset(hooks)) for hooks in every if hooks and _are_harmless(hooks)]
        self._attributes = [vars(module) for module in modules]

    def found(self) -> bool:
        """Whether there are some. It takes microseconds: each step calls it."""
        if any(self._registered) or any(not hooks.keys() <= known for hooks, known in self._harmless):
            return True
        for attributes in self._attributes:
            if "forward" in attributes and not isinstance(attributes["forward"], OURS):
                return True
        return False

    def reason(self) -> str:
        """Where the first is of those that were found."""
        for name, module in self._network.named_modules():
            where = f"its module {name or type(module).__name__} has"
            if not all(map(_are_harmless, _of(module))):
                return f"{where} forward hooks, which a recorded step would not call"
            if not isinstance(vars(module).get("forward"), (*OURS, NoneType)):
                return f"{where} a forward of its own, not that of its class, which a recorded step would not call"
        return "torch has forward hooks for all modules, which a recorded step would not call"


def inlined(network: nn.Module, programs: Iterable[Program]) -> list[nn.Module]:
    """Linear layers of which a program has the code (a class of their own, say), so that it does not call them: what an
    adapter adds to their outputs would be missing."""
    found: dict[str, nn.Module] = {}
    layers, weights = linear_layers(network), dict(network.named_parameters(remove_duplicate=False))
    for program in programs:
        called = {path for op in program.ops for path in _called(op)}
        read = {id(weights[one.path]) for one in program.constants.values() if one.path in weights}
        for name, layer in layers.items():
            outer = {name.rsplit(".", n)[0] for n in range(name.count(".") + 1)}
            if outer.isdisjoint(called) and any(id(one) in read for one in layer.parameters()):
                found[name] = layer
    return list(found.values())


def _called(op: Op) -> tuple[Any, ...]:
    """Paths of the modules that an operator calls."""
    match op:
        case Op("kvcellar.linear", (_, tuple(paths))):
            return paths
        case Op("kvcellar.mix" | "kvcellar.module", (path, *_)):
            return (path,)
        case _:
            return ()


def _of(module: nn.Module) -> tuple[Registered, Registered]:
    return module._forward_hooks, module._forward_pre_hooks


def _are_harmless(hooks: Registered) -> bool:
    return all(getattr(hook, "__module__", None) == CAPTURING for hook in hooks.values())
