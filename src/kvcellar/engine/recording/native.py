"""native: a recorded forward in fixed memory, run by the compiled loop (`engine/recording/recorded.py`).

Linear layers, K/V writes and attention are native calls where their modules and backends have such; what has none is
called through the step's door, as the network's own modules are.

Recurrent states of a step in which each sequence has one new token are native copies of state rows.

Always true:
  * what is bound to a memory is used for that memory only, and made anew after its cells have moved;
  * the numbers of the rows of a step are at the same address in each step of so many sequences;
  * a step some of whose rows have logits is bound for one of them, or a multiple of `TOGETHER`, where each is computed
    alike beside any number of others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kvcellar.engine.models.mixers import of_heads
from kvcellar.engine.models.weights.scan import recurrent
from kvcellar.engine.recording.program import CONVOLVE, SCAN_STATES, Argument, Op, Program, Size, resolved
from kvcellar.engine.recording.recorded import FIXED, Recorded
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.recorded_lowering import COPIES
from kvcellar.engine.recording.recorded_outline import Bound, Call, Handler, Outline, outlined, symbols_of
from kvcellar.engine.recording.recording import Execute, Executor, RecordedStep, Results
from kvcellar.engine.recording.replay import constants_of, convolved, scanned, scans_of, sizes_of, tensor_of
from kvcellar.kernels.layers import OwnExperts, OwnHeads, OwnLinear, PanelWeight, merged
from kvcellar.kernels.scans import Recurrence, Rows, ScanKernel, runs_of
from kvcellar.memory.attention.cpu import TYPES, Cpu
from kvcellar.memory.kv.history import LayerHistory
from kvcellar.memory.memory import Memory
from kvcellar.memory.shapes import Scoring

READS = "kvcellar.states"
TOGETHER = 16  # rows with logits: their number changes with each prompt that ends, and binding takes milliseconds
Inputs = Sequence[Tensor]
Outputs = Sequence[Tensor | None]


def native(network: nn.Module, kernel: StepKernel) -> Execute:
    """What makes executors of programs of a network."""
    return lambda program: NativeExecutor(program, network, kernel)


@dataclass(frozen=True)
class _Network:
    """What bindings of all memories share. `fixed`: the addresses of constants."""

    module: nn.Module
    kernel: StepKernel
    fixed: frozenset[int]

    @cached_property
    def scans(self) -> ScanKernel:
        return scans_of(self.module)


class NativeExecutor(Executor):
    """Runs one program of a network."""

    name = "native"

    def __init__(self, program: Program, network: nn.Module, kernel: StepKernel) -> None:
        self._constants = constants_of(program, network)
        self._network = _Network(network, kernel, frozenset(one.data_ptr() for one in self._constants.values()))
        self._outline = outlined(program, self._constants, FIXED)  # for all memories
        self._of_step = sizes_of(program)
        self._alike = all(_alike(op, network) for op in program.ops if "W" in symbols_of(_sizes(op, program)))
        self._memories: WeakKeyDictionary[Memory, _Bound] = WeakKeyDictionary()

    @property
    def seconds(self) -> float:
        return self._network.kernel.seconds

    def clear(self) -> None:
        self._memories.clear()

    def run(self, step: RecordedStep) -> Results:
        bound = self._memories.get(step.memory)
        if bound is None:
            bound = self._memories[step.memory] = _Bound(self._outline, self._network)
        rows, count = len(step.ids), len(step.wanted)
        if 1 < count < rows and self._alike and not step.adapters:
            more = min(rows, -(-count // TOGETHER) * TOGETHER) - count
            step = replace(step, wanted=torch.cat([step.wanted, step.wanted[-1:].expand(more)]))
        results = bound.run(step, self._of_step(step))
        return replace(results, logits=results.logits[:count])


def _sizes(op: Op, program: Program) -> Iterator[Size]:
    """Of the values that it reads and makes."""
    for value in (*op.reads, *op.outputs):
        yield from () if value is None else program.values[value].shape


def _alike(op: Op, network: nn.Module) -> bool:
    """Whether an operator computes a row of logits alike beside any number of others."""
    if op.name == "kvcellar.linear":
        paths = op.args[1]
        assert isinstance(paths, tuple)
        return all(isinstance(network.get_submodule(str(path)), OwnLinear) for path in paths)
    return op.name in COPIES or op.name in ("aten.index.Tensor", "aten.index_select.default")


class _Bound:
    """A program that is bound to one memory."""

    def __init__(self, outline: Outline, network: _Network) -> None:
        states = [op.args[0] for op in outline.program.ops if op.name == READS]
        self._handlers = _Handlers(network, states)
        self._recorded = Recorded(outline, self._handlers.by_operator(), network.kernel)

    def run(self, step: RecordedStep, sizes: Mapping[str, int]) -> Results:
        with self._handlers.opened(step):
            inputs = {"ids": step.ids, "positions": step.positions, "wanted": step.wanted}
            outputs = self._recorded.run(sizes, inputs, step.adapters)
            step.door.mixing.end()
            for layer, planes in self._handlers.put.items():
                step.door.history(layer).step.written.update(planes)
            for layer in self._handlers.states:
                assert isinstance(layer, int)
                step.memory.states.written(layer, step.plan.states)
        return Results(outputs["logits"], outputs.get("hidden"))


class _Handlers:
    """Bind operators to one memory (`Handler`). Operators that are called through the door of the running step find it
    in `_open`. Nothing here refers to the bindings, so that they are freed with the last reference to them."""

    def __init__(self, of: _Network, states: Sequence[Argument]) -> None:
        self._of, self._network = of, of.module
        self.states = states  # layers whose states native calls read and store
        self._open: RecordedStep | None = None
        self.put: dict[int, tuple[tuple[int, str], ...]] = {}  # layers whose keys and values native calls store
        self._runs: dict[int, Tensor] = {}  # by the number of sequences: of one token each, as scans take them [n,4]
        self._merged: dict[Any, OwnLinear] = {}  # layers that are one call, by their paths

    def by_operator(self) -> dict[str, Handler]:
        return {
            "kvcellar.linear": self._linear,
            "kvcellar.embedding": self._embedding,
            "kvcellar.put": self._stored,
            "kvcellar.attend": self._attend,
            "kvcellar.attend_latent": self._attend,
            "kvcellar.dense": self._dense,
            "kvcellar.attend_dense": self._attend_dense,
            "kvcellar.experts": self._experts,
            "kvcellar.heads": self._heads,
            "kvcellar.states": self._state_rows,
            "kvcellar.keep_states": self._state_rows,
            "kvcellar.scan": self._scan,
            "kvcellar.convolve": self._convolve,
            CONVOLVE: self._convolved,
            SCAN_STATES: self._scanned,
            "kvcellar.mix": self._called,
            "kvcellar.module": self._called,
        }

    @contextmanager
    def opened(self, step: RecordedStep) -> Iterator[None]:
        """Within the block, `step` is the running one."""
        if self.states:
            segments = step.plan.states
            runs = runs_of([(one.read, [(1, one.write)]) for one in segments])
            self._runs.setdefault(len(segments), runs).copy_(runs)
        self._open = step
        try:
            yield
        finally:
            self._open = None

    @property
    def _step(self) -> RecordedStep:
        assert self._open is not None, "a step is open"
        return self._open

    def _history(self, layer: Argument) -> LayerHistory:
        assert isinstance(layer, int)
        return self._step.door.history(layer)

    # -- layers of ours -------------------------------------------------------------------------------------------

    def _linear(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """One or several linear layers with the same input, outputs side by side."""
        (x,), out, paths = inputs, _only(outputs), op.args[1]
        assert isinstance(paths, tuple)
        modules = [self._network.get_submodule(str(path)) for path in paths]
        rows, into = _as_rows(x), _as_rows(out)
        # A layer to which adapters add something in this step has a forward of its own.
        own = [module for module in modules if isinstance(module, OwnLinear) and "forward" not in vars(module)]
        if rows is not None and into is not None and len(own) == len(modules) and x.dtype is out.dtype:
            if all(module.dtype is module.computed is x.dtype for module in own):
                return self._joined(own, paths, rows, into)
        return _filling(out, lambda: torch.cat([one(x) for one in modules], -1) if len(modules) > 1 else modules[0](x))

    def _joined(self, modules: Sequence[OwnLinear], paths: Any, rows: Tensor, into: Tensor) -> Bound:
        """Modules that can be one call are merged, once; they are beside each other, as their outputs are."""
        if all(one.joins(modules[0]) for one in modules[1:]):
            if paths not in self._merged:
                self._merged[paths] = merged(modules) if len(modules) > 1 else modules[0]
            return self._merged[paths].native(rows, into)
        parts = into.split([module.out_features for module in modules], -1)
        return [module.native(rows, part) for module, part in zip(modules, parts, strict=True)]

    def _embedding(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """Rows of a weight that a layer has in panels."""
        (ids,), out, weight = inputs, _only(outputs), tensor_of(self._network, str(op.args[1]))
        fits = ids.dtype is torch.int64 and ids.is_contiguous() and out.is_contiguous() and ids.numel() > 0
        if isinstance(weight, PanelWeight) and fits:
            return weight.native(ids, out)
        return _filling(out, lambda: nn.functional.embedding(ids, weight))

    def _experts(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """Layers of many experts, of which each row uses some."""
        (x, index), out, share = inputs, _only(outputs), op.kwargs["share"]
        module = self._network.get_submodule(str(op.args[2]))
        assert isinstance(share, int)
        assert isinstance(module, OwnExperts)
        typed = x.dtype is out.dtype is module.dtype is module.computed and len(x) > 0
        if typed and (index.stride(0), x.stride(1), out.stride(1)) == (1, 1, 1):
            return module.native(x, index, share, out)
        return _filling(out, lambda: module(x, index, share))

    def _heads(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """A layer for each head."""
        (x,), out = inputs, _only(outputs)
        module = self._network.get_submodule(str(op.args[0]))
        assert isinstance(module, OwnHeads)
        if x.dtype is out.dtype is module.computed and len(x) == 1 == x.stride(3) == out.stride(3) and x.shape[1] > 0:
            return module.native(x[0], out[0])
        return _filling(out, lambda: module(x))

    # -- cells and states -----------------------------------------------------------------------------------------

    def _stored(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        (k, v), layer = inputs, op.args[2]
        assert isinstance(layer, int)
        history = self._history(layer)
        typed = k.dtype is v.dtype and k.dtype in TYPES and k.stride(-1) == 1 == v.stride(-1) and k.shape[2] > 0
        if typed and isinstance(history.backend, Cpu):
            self.put[layer] = ((layer, "k"), (layer, "v"))
            return history.backend.native_put(history, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return lambda: self._step.door.put(k, v, layer)

    def _attend(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """Attention over stored cells. Sinks that are no constants are read in each step, by the backend itself."""
        (q, *sinks), out, layer = inputs, _only(outputs), op.args[1]
        latent, scoring = op.name == "kvcellar.attend_latent", _scoring(op, sinks)
        rows = q if latent else q.transpose(1, 2)  # [1,T,H,D]
        history = self._history(layer)
        fixed = all(one.data_ptr() in self._of.fixed for one in sinks)
        typed = q.dtype is out.dtype and q.dtype in TYPES and q.stride(-1) == 1 and len(rows[0]) > 0
        if fixed and typed and isinstance(history.backend, Cpu):
            return history.backend.native(history, scoring, rows[0], out[0], latent=latent)

        def attended() -> Tensor:
            history = self._history(layer)
            attend = history.backend.attend_latent if latent else history.backend.attend
            return attend(rows, history, scoring)

        return _filling(out, attended)

    def _dense(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        layer, plane = op.args

        def stored() -> Tensor:
            history = self._history(layer)
            return history.planes[str(plane)].values(history.step.columns.cells).transpose(0, 1)[None]  # [1,G,N,D]

        return _filling(_only(outputs), stored)

    def _attend_dense(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        (q, k, v), scoring = inputs[:3], _scoring(op, inputs[3:])

        def attended() -> Tensor:
            history = self._history(op.args[3])
            keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)  # [N,G,D], [N,G,Dv]
            return history.backend.attend_dense(q.transpose(1, 2)[0], keys, values, history.step, scoring)[None]

        return _filling(_only(outputs), attended)

    def _state_rows(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """Copies of state rows, as each sequence has one new token."""
        layer, writes = op.args[-1], op.name != READS
        assert isinstance(layer, int)
        planes = self._step.memory.states.planes(layer)
        names, values = (op.args[1], inputs) if writes else (planes, outputs)
        assert isinstance(names, Iterable)
        used = [(planes[str(name)], one) for name, one in zip(names, values, strict=True) if one is not None]
        rows = self._of.kernel.rows
        return [rows(self._runs[len(one)][:, int(writes)], plane, one, writes=writes) for plane, one in used]

    def _scan(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """A recurrence of one token of each sequence, on state rows."""
        (layer, head, *rest), given, out = op.args, iter(inputs), _only(outputs)
        assert isinstance(layer, int)
        assert head is None or isinstance(head, int)
        of = Recurrence(*resolved(tuple(rest), lambda _: next(given), {}, None))
        plane = of_heads(self._step.memory.states.planes(layer)[recurrent(0)], head)
        return self._of.scans.native(of, Rows(plane, plane, self._runs[len(out)], len(out)), out)

    def _convolve(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """A convolution along the text, of each channel by itself."""
        (x, weight, *bias), (silu, by_token) = inputs, op.args[3:]
        out = _only(outputs).transpose(1, 2) if by_token else _only(outputs)
        return self._of.scans.native_convolution(x, weight, bias[0] if bias else None, out, silu=bool(silu))

    def _convolved(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """A convolution of each sequence by itself. Its inputs are copied: they may be kept until the step ends."""
        (new, weight, *bias), (*where, by_token), kernel = inputs, op.args[3:], self._of.scans
        out = _only(outputs).transpose(1, 2) if by_token else _only(outputs)

        def call() -> None:
            of = (new.clone(), weight, bias[0] if bias else None)
            out[..., -new.shape[2] :].copy_(convolved(self._step.door, kernel, *of, *where))

        return call

    def _scanned(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """A recurrence of each sequence by itself. Its inputs are copied, as those of convolutions are."""
        (layer, head, *rest), out, kernel = op.args, _only(outputs), self._of.scans

        def call() -> None:
            given = (one.clone() for one in inputs)
            of = Recurrence(*resolved(tuple(rest), lambda _: next(given), {}, None))
            out.copy_(scanned(self._step.door, kernel, layer, head, of, out.dtype))

        return call

    # -- modules --------------------------------------------------------------------------------------------------

    def _called(self, op: Op, inputs: Inputs, outputs: Outputs) -> Bound:
        """Modules that keep a state, or could not be traced."""
        path, arguments = op.args
        module = self._network.get_submodule(str(path))
        from kvcellar.engine.models.registered import GuestCache  # imports transformers

        def call() -> None:
            # Copies: a mixer may keep its inputs until the step is committed, and the arena is used again before.
            left, cache = (one.clone() for one in inputs), GuestCache(self._step.door)
            args, *kwargs = (resolved(one, lambda _: next(left), {}, cache) for one in (arguments, *op.kwargs.values()))
            made = tree_leaves(module(*args, **dict(zip(op.kwargs, kwargs, strict=True))))
            tensors = [one for one in made if isinstance(one, Tensor)]
            for out, one in zip(outputs, tensors, strict=True):
                if out is not None:
                    out.copy_(one)

        return call


def _only(outputs: Outputs) -> Tensor:
    """The one output of an operator."""
    (out,) = outputs
    assert out is not None
    return out


def _filling(out: Tensor, compute: Callable[[], Tensor]) -> Call:
    def call() -> None:
        out.copy_(compute())

    return call


def _as_rows(x: Tensor) -> Tensor | None:
    """The same as rows [n,width] whose elements are side by side; None if its rows are not equally far apart."""
    if x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else None
    except RuntimeError:
        return None


def _scoring(op: Op, sinks: Inputs) -> Scoring:
    kwargs: dict[str, Any] = {**op.kwargs, "sinks": sinks[0] if sinks else None}
    return Scoring(**kwargs)
