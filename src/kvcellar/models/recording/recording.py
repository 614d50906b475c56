"""recording: a guest's recorded forward in use: which steps it runs, and how many.

Always true: a step that a recording does not run is counted, with the reason, and is run by the network's modules.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from kvcellar.cache.memory import Memory
from kvcellar.errors import KvcellarError
from kvcellar.kernels.program import Program
from kvcellar.models.recording.hooks import Hooks
from kvcellar.models.seam import FlatDoor, GuestCache
from kvcellar.plan import Plan


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The open step of `memory`. Its door is open; `cache` is what modules get. ids and positions [T], wanted [W].
    `adapters`: 0, or a number that is another one after adapters were added or removed, if rows have adapters."""

    memory: Memory
    plan: Plan
    door: FlatDoor
    cache: GuestCache
    ids: Tensor
    positions: Tensor
    wanted: Tensor
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class Results:
    """logits [W,V], and hidden [T,hidden] where the program has it."""

    logits: Tensor
    hidden: Tensor | None


class Executor(Protocol):
    """Runs one program."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float:
        """What preparing steps of new sizes has taken, of the guest's executors: CPU time of the calling thread; on
        CUDA devices wall time (`speculate/cost.py`)."""
        ...

    def refuse(self, step: RecordedStep) -> str | None:
        """The reason why it does not run this step; None if it does."""
        ...

    def run(self, step: RecordedStep) -> Results:
        """The results of an open step, which no later run changes."""
        ...

    def clear(self) -> None:
        """Free what runs leave for later ones."""
        ...


Execute = Callable[[Program], Executor]  # raises `KvcellarError` for a program that it cannot run


@dataclass(frozen=True, slots=True)
class Captured:
    """A program, and the classes of modules that could not be traced, each with the reason. `decoding` is the program
    of a step in which each sequence has one new token, with the code of recurrent layers; None without such layers, or
    where their code cannot be traced."""

    program: Program
    opaque: Mapping[str, str]
    decoding: Program | None = None


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
