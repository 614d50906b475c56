"""native: a recorded forward in fixed memory, run by the compiled loop (`kernels/recorded.py`).

Linear layers, K/V writes and attention are native calls where their modules and backends have such; what has none is
called through the step's door, as the network's own modules are.

Recurrent states of a step in which each sequence has one new token are native copies of state rows.

Always true:
  * what is bound to a memory is used for that memory only, and made anew after its cells have moved;
  * the numbers of the rows of a step are at the same address in each step of so many sequences.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kvcellar.attention.cpu import TYPES, Cpu
from kvcellar.cache.memory import Memory
from kvcellar.kernels.compiled import Native
from kvcellar.kernels.experts import OwnExperts
from kvcellar.kernels.heads import OwnHeads
from kvcellar.kernels.layers import OwnLinear, merged
from kvcellar.kernels.program import Argument, Cache, Dtype, Op, Program, Ref
from kvcellar.kernels.recorded import FIXED, Recorded
from kvcellar.kernels.recorded_kernel import StepKernel
from kvcellar.kernels.recorded_outline import Bound, Call, Outline, outlined
from kvcellar.models.recording.recording import Execute, RecordedStep, Results
from kvcellar.models.recording.replay import constants_of, layers_of_cells
from kvcellar.models.seam import FlatDoor
from kvcellar.shapes import Scoring

READS = "kvcellar.states"


class States:
    """Binds the operators of a program that read and store states."""

    def __init__(self, program: Program, kernel: StepKernel) -> None:
        self._kernel = kernel
        self._layers = [op.args[0] for op in program.ops if op.name == READS]
        self._rows: dict[int, Tensor] = {}  # by the number of sequences: rows that are read, and written [2,n]
        self._memory: Memory | None = None  # of the running step

    def begin(self, step: RecordedStep) -> None:
        if self._layers:
            segments = step.plan.states
            rows = torch.tensor([[one.read for one in segments], [one.write for one in segments]], device="cpu")
            self._rows.setdefault(len(segments), rows).copy_(rows)
            self._memory = step.memory

    def end(self) -> None:
        self._memory = None

    def written(self, step: RecordedStep) -> None:
        """Note what a step stored."""
        for layer in self._layers:
            assert isinstance(layer, int)
            step.memory.states.written(layer, step.plan.states)

    def bind(self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> list[Native]:
        layer, writes = op.args[-1], op.name != READS
        assert self._memory is not None, "a step is open"
        assert isinstance(layer, int)
        planes, values = self._memory.states.planes(layer).values(), inputs if writes else outputs
        used = [(plane, one) for plane, one in zip(planes, values, strict=True) if one is not None]
        return [self._kernel.rows(self._rows[len(one)][int(writes)], plane, one, writes=writes) for plane, one in used]


Inputs = Sequence[Tensor]
Outputs = Sequence[Tensor | None]


def native(network: nn.Module, kernel: StepKernel) -> Execute:
    """What makes executors of programs of a network."""
    return lambda program: NativeExecutor(program, network, kernel)


class NativeExecutor:
    """Runs one program of a network."""

    name = "native"

    def __init__(self, program: Program, network: nn.Module, kernel: StepKernel) -> None:
        self._network, self._kernel = network, kernel
        self._constants = constants_of(program, network)
        self._outline = outlined(program, self._constants, FIXED)  # for all memories
        self._counted = layers_of_cells(program)
        self._memories: WeakKeyDictionary[Memory, _Bound] = WeakKeyDictionary()

    @property
    def seconds(self) -> float:
        return self._kernel.seconds

    def refuse(self, step: RecordedStep) -> str | None:
        return None

    def clear(self) -> None:
        self._memories.clear()

    def run(self, step: RecordedStep) -> Results:
        bound = self._memories.get(step.memory)
        if bound is None:
            bound = _Bound(self._outline, self._constants, self._network, self._kernel)
            self._memories[step.memory] = bound
        cells = {symbol: len(step.door.history(layer).step.columns.cells) for symbol, layer in self._counted.items()}
        return bound.run(step, {"T": len(step.ids), "W": len(step.wanted), **cells})


class _Bound:
    """A program that is bound to one memory."""

    def __init__(
        self, outline: Outline, constants: Mapping[int, Tensor], network: nn.Module, kernel: StepKernel
    ) -> None:
        self._step = _Step()
        states = self._states = States(outline.program, kernel)
        called = _Called(network, self._step)
        attending = _Attend(self._step, {tensor.data_ptr() for tensor in constants.values()})
        handlers = {
            "kvcellar.linear": _Linear(network),
            "kvcellar.put": _Put(self._step),
            "kvcellar.attend": attending,
            "kvcellar.attend_latent": attending,
            "kvcellar.dense": _Dense(self._step),
            "kvcellar.attend_dense": _AttendDense(self._step),
            "kvcellar.experts": _Experts(network),
            "kvcellar.heads": _Heads(network),
            "kvcellar.states": states,
            "kvcellar.keep_states": states,
            "kvcellar.mix": called,
            "kvcellar.module": called,
        }
        self._recorded = Recorded(outline, handlers, kernel)
        self._resizes = 0  # of the memory, when its planes were bound

    def run(self, step: RecordedStep, sizes: Mapping[str, int]) -> Results:
        if (resizes := step.memory.storage.resizes) != self._resizes:
            self._recorded.clear()
            self._resizes = resizes
        self._step.open = step
        self._states.begin(step)
        try:
            inputs = {"ids": step.ids, "positions": step.positions, "wanted": step.wanted}
            outputs = self._recorded.run(sizes, inputs, step.adapters)
            for layer, planes in self._step.stored.items():
                step.door.history(layer).step.written.update(planes)
            self._states.written(step)
        finally:
            self._step.open = None
            self._states.end()
        return Results(outputs["logits"], outputs.get("hidden"))


class _Step:
    """The running step, for operators that are called through its door, and the layers whose keys and values native
    calls store."""

    def __init__(self) -> None:
        self.open: RecordedStep | None = None
        self.stored: dict[int, tuple[tuple[int, str], ...]] = {}

    @property
    def door(self) -> FlatDoor:
        assert self.open is not None, "a step is open"
        return self.open.door


class _Linear:
    """One or several linear layers with the same input, outputs side by side."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._merged: dict[Any, OwnLinear] = {}

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        (x,), (out,), paths = inputs, outputs, op.args[1]
        assert out is not None
        assert isinstance(paths, tuple)
        modules = [self._network.get_submodule(str(path)) for path in paths]
        rows, into = _as_rows(x), _as_rows(out)
        # A layer to which adapters add something in this step has a forward of its own.
        own = [module for module in modules if isinstance(module, OwnLinear) and "forward" not in vars(module)]
        if rows is not None and into is not None and len(own) == len(modules) and x.dtype is out.dtype:
            if all(module.dtype is module.computed is x.dtype for module in own):
                return self._calls(own, paths, rows, into)

        def call() -> None:
            out.copy_(torch.cat([module(x) for module in modules], -1) if len(modules) > 1 else modules[0](x))

        return call

    def _calls(self, modules: Sequence[OwnLinear], paths: Any, rows: Tensor, into: Tensor) -> Bound:
        """Modules that can be one call are merged, once; they are beside each other, as their outputs are."""
        if all(one.joins(modules[0]) for one in modules[1:]):
            if paths not in self._merged:
                self._merged[paths] = merged(modules) if len(modules) > 1 else modules[0]
            return self._merged[paths].native(rows, into)
        parts = into.split([module.out_features for module in modules], -1)
        return [module.native(rows, part) for module, part in zip(modules, parts, strict=True)]


class _Experts:
    """Layers of many experts, of which each row uses some."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        (x, index), (out,), path, share = inputs, outputs, op.args[2], op.kwargs["share"]
        assert isinstance(share, int)
        assert out is not None
        module = self._network.get_submodule(str(path))
        assert isinstance(module, OwnExperts)
        typed = x.dtype is out.dtype is module.dtype is module.computed and len(x) > 0
        if typed and (index.stride(0), x.stride(1), out.stride(1)) == (1, 1, 1):
            return module.native(x, index, share, out)

        def call() -> None:
            out.copy_(module(x, index, share))

        return call


class _Heads:
    """A layer for each head."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        (x,), (out,), path = inputs, outputs, op.args[0]
        assert out is not None
        module = self._network.get_submodule(str(path))
        assert isinstance(module, OwnHeads)
        if x.dtype is out.dtype is module.computed and len(x) == 1 == x.stride(3) == out.stride(3) and x.shape[1] > 0:
            return module.native(x[0], out[0])

        def call() -> None:
            out.copy_(module(x))

        return call


def _as_rows(x: Tensor) -> Tensor | None:
    """The same as rows [n,width] whose elements are side by side; None if its rows are not equally far apart."""
    if x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else None
    except RuntimeError:
        return None


class _Put:
    def __init__(self, step: _Step) -> None:
        self._step = step

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        (k, v), layer = inputs, op.args[2]
        assert isinstance(layer, int)
        history = self._step.door.history(layer)
        typed = k.dtype is v.dtype and k.dtype in TYPES and k.stride(-1) == 1 == v.stride(-1) and k.shape[2] > 0
        if typed and isinstance(history.backend, Cpu):
            self._step.stored[layer] = ((layer, "k"), (layer, "v"))
            return history.backend.native_put(history, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return lambda: self._step.door.put(k, v, layer)


class _Attend:
    """Attention over stored cells. Sinks that are no constants are read in each step, by the backend itself."""

    def __init__(self, step: _Step, constants: Collection[int]) -> None:
        self._step, self._constants = step, constants

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        (q, *_), (out,), layer = inputs, outputs, op.args[1]
        assert isinstance(layer, int)
        assert out is not None
        latent, scoring = op.name == "kvcellar.attend_latent", _scoring(op, inputs[1:])
        rows = q if latent else q.transpose(1, 2)  # [1,T,H,D]
        history = self._step.door.history(layer)
        fixed = all(sinks.data_ptr() in self._constants for sinks in inputs[1:])
        typed = q.dtype is out.dtype and q.dtype in TYPES and q.stride(-1) == 1 and len(rows[0]) > 0
        if fixed and typed and isinstance(history.backend, Cpu):
            return history.backend.native(history, scoring, rows[0], out[0], latent=latent)

        def call() -> None:
            history = self._step.door.history(layer)
            attend = history.backend.attend_latent if latent else history.backend.attend
            out.copy_(attend(rows, history, scoring))

        return call


class _Dense:
    def __init__(self, step: _Step) -> None:
        self._step = step

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Call:
        (layer, plane), (out,) = op.args, outputs
        assert isinstance(layer, int)
        assert out is not None

        def call() -> None:
            history = self._step.door.history(layer)
            stored = history.planes[str(plane)].values(history.step.columns.cells)  # [N,G,D]
            out.copy_(stored.transpose(0, 1)[None])

        return call


class _AttendDense:
    def __init__(self, step: _Step) -> None:
        self._step = step

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Call:
        (q, k, v, *sinks), (out,), layer = inputs, outputs, op.args[3]
        assert isinstance(layer, int)
        assert out is not None
        scoring = _scoring(op, sinks)

        def call() -> None:
            history = self._step.door.history(layer)
            keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)  # [N,G,D], [N,G,Dv]
            out.copy_(history.backend.attend_dense(q.transpose(1, 2)[0], keys, values, history.step, scoring)[None])

        return call


class _Called:
    """Modules that keep a state, or could not be traced."""

    def __init__(self, network: nn.Module, step: _Step) -> None:
        self._network, self._step = network, step

    def bind(self, op: Op, inputs: Inputs, outputs: Outputs) -> Call:
        path, arguments = op.args
        module = self._network.get_submodule(str(path))

        def call() -> None:
            assert self._step.open is not None
            # Copies: a mixer may keep its inputs until the step is committed, and the arena is used again before.
            left, cache = (one.clone() for one in inputs), self._step.open.cache
            args = _given(arguments, left, cache)
            made = tree_leaves(module(*args, **{name: _given(one, left, cache) for name, one in op.kwargs.items()}))
            tensors = [one for one in made if isinstance(one, Tensor)]
            for out, one in zip(outputs, tensors, strict=True):
                if out is not None:
                    out.copy_(one)

        return call


def _scoring(op: Op, sinks: Inputs) -> Scoring:
    kwargs: dict[str, Any] = {**op.kwargs, "sinks": sinks[0] if sinks else None}
    return Scoring(**kwargs)


def _given(argument: Argument, left: Iterator[Tensor], cache: Any) -> Any:
    """An argument of a module, tensors in order."""
    match argument:
        case Ref():
            return next(left)
        case Cache():
            return cache
        case Dtype(name):
            return getattr(torch, name)
        case tuple():
            return tuple(_given(one, left, cache) for one in argument)
        case _:
            return argument
