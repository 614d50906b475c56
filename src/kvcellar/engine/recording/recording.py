"""recording: a guest's recorded forward in use: which steps it runs, and how many.

Always true:
  * a step that a recording does not run is counted, with the reason, and is run by the network's modules;
  * a network is recorded, and a recorded step runs, only while no module has a hook of its forward, and none has a
    `forward` of its own instance that is not ours: a recorded step would not run code that a user put around modules.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all

from kvcellar.engine.models.adapters.adapted import AdaptedLayer
from kvcellar.engine.models.adapters.adapters import linear_layers
from kvcellar.engine.models.mixers import Mixed
from kvcellar.engine.models.seam import FlatDoor
from kvcellar.engine.models.text_decoder import TextForward
from kvcellar.engine.models.weights.packing import Routed
from kvcellar.engine.recording.program import Op, Program
from kvcellar.errors import KvcellarError
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan

CAPTURING = "transformers.utils.output_capturing"  # its hooks do nothing unless a forward is to return more than logits
Registered = Mapping[int, Any]
OURS = (Mixed, Routed, AdaptedLayer, TextForward)  # forwards that instances of modules have


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


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The open step of `memory`. Its door is open. ids and positions [T], wanted [W].
    `adapters`: 0, or a number that is another one after adapters were added or removed, if rows have adapters."""

    memory: Memory
    plan: Plan
    door: FlatDoor
    ids: Tensor
    positions: Tensor
    wanted: Tensor
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class Results:
    """logits [W,V], and hidden [T,hidden] where the program has it."""

    logits: Tensor
    hidden: Tensor | None


class Executor(ABC):
    """Runs one program."""

    name: str

    @property
    def seconds(self) -> float:
        """What preparing steps of new sizes has taken, of the guest's executors: CPU time of the calling thread; on
        CUDA devices wall time (`engine/speculate/cost.py`)."""
        return 0.0

    def refuse(self, step: RecordedStep) -> str | None:
        """The reason why it does not run this step; None if it does."""
        return None

    @abstractmethod
    def run(self, step: RecordedStep) -> Results:
        """The results of an open step, which no later run changes."""

    def clear(self) -> None:  # noqa: B027 - not each leaves something
        """Free what runs leave for later ones."""


Execute = Callable[[Program], Executor]  # raises `KvcellarError` for a program that it cannot run


@dataclass(frozen=True, slots=True)
class Captured:
    """A program, and the classes of modules that could not be traced, each with the reason. `decoding` is the program
    of a step in which each sequence has one new token, with the code of recurrent layers; None without such layers, or
    where their code cannot be traced."""

    program: Program
    opaque: Mapping[str, str]
    decoding: Program | None = None


class NotRecordable(KvcellarError):
    """A forward, or a module of it, that cannot be written as a program. The message has the reason."""


def reason_of(error: Exception) -> str:
    """The first line of an error, for people."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, KvcellarError) else f"{type(error).__name__}: {text}"


@dataclass(slots=True)
class Recording:
    """A captured forward that was tested."""

    captured: Captured
    executor: Executor
    decoding: Executor | None = None  # of `captured.decoding`
    hooks: Hooks | None = None  # of its network, if that can get some
    inlined: Sequence[nn.Module] = ()  # layers whose adapters only modules add
    steps: int = 0
    by_modules: Counter[str] = field(default_factory=Counter)  # steps by the reason why modules ran them
    last_refusal: str | None = None  # why modules ran the last step; None: the recording ran it

    def run(self, step: RecordedStep, *, hidden: bool = False) -> Results | None:
        """The results; None if modules have to run the step. `hidden`: the hidden states are needed."""
        decodes = self.decoding is not None and all(segment.length == 1 for segment in step.plan.states)
        executor = self.decoding if decodes and self.decoding is not None else self.executor
        why = self.last_refusal = self._refused(step, hidden) or executor.refuse(step)
        if why is not None:
            self.by_modules[why] += 1
            return None
        self.steps += 1
        return executor.run(step)

    def _refused(self, step: RecordedStep, hidden: bool) -> str | None:
        if self.hooks is not None and self.hooks.found():
            return "hooks of modules"
        if step.adapters and any("forward" in vars(layer) for layer in self.inlined):
            return "adapters of layers with code of their own"
        return "hidden states" if hidden and "hidden" not in self.captured.program.outputs else None

    def clear(self) -> None:
        """Free what steps leave for later ones."""
        for executor in (self.executor, self.decoding):
            if executor is not None:
                executor.clear()
