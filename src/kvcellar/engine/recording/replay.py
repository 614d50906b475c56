"""replay: run a program operator by operator, on torch. Slow and obvious; it judges what runs programs faster.

Always true: every value of a program has the strides that the program says, whatever an operator returned.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kvcellar.engine.models.mixers import StateView, scan_kernel, scan_rows
from kvcellar.engine.models.seam import FlatDoor
from kvcellar.engine.models.weights.scan import recurrent
from kvcellar.engine.recording.program import Op, Program, Sizes, resolved, size_of
from kvcellar.engine.recording.recorded_lowering import operator
from kvcellar.engine.recording.recording import Executor, NotRecordable, RecordedStep, Results
from kvcellar.kernels.scans import Recurrence, ScanKernel
from kvcellar.memory.shapes import Scoring


class Replay(Executor):
    """Runs one program of a network."""

    name = "torch"

    def __init__(self, program: Program, network: nn.Module) -> None:
        self.program, self.network = program, network
        self.device = next(network.parameters()).device
        self.constants = constants_of(program, network)
        self.functions = {op.name: operator(op.name) for op in program.ops if not op.name.startswith("kvcellar.")}
        self.sizes = sizes_of(program)
        self.last_uses = _last_uses(program)

    @cached_property
    def scans(self) -> ScanKernel:
        return scans_of(self.network)

    def run(self, step: RecordedStep) -> Results:
        run = _Run(self, step, self.sizes(step))
        for name, tensor in (("ids", step.ids), ("positions", step.positions), ("wanted", step.wanted)):
            run.store(self.program.inputs[name], tensor)
        for number, op in enumerate(self.program.ops):
            run.step(op)
            for storage in self.last_uses.get(number, ()):
                run.storages.pop(storage, None)
        step.door.mixing.end()
        outputs = {name: run.tensor(value) for name, value in self.program.outputs.items()}
        return Results(outputs["logits"], outputs.get("hidden"))


class _Run:
    """The values of one forward, by storage."""

    def __init__(self, replay: Replay, step: RecordedStep, sizes: Sizes) -> None:
        self._replay, self._step, self._door, self._sizes = replay, step, step.door, sizes
        self._values = replay.program.values
        self.storages: dict[int, Tensor] = dict(replay.constants)  # flat, or a constant

    @cached_property
    def _cache(self) -> Any:
        """What modules get."""
        from kvcellar.engine.models.registered import GuestCache  # imports transformers

        return GuestCache(self._door)

    def step(self, op: Op) -> None:
        if op.name.startswith("kvcellar."):
            made = self._ours(op)
        else:
            function = self._replay.functions[op.name]
            args, kwargs = self._resolved(op)
            if not op.reads and "device" in {argument.name for argument in function._schema.arguments}:
                kwargs["device"] = self._replay.device
            made = function(*args, **kwargs)
            if function._schema.is_mutable:
                return  # its arguments are the program's own storages
        for value, tensor in zip(op.outputs, tree_leaves(made), strict=True):
            if value is not None:
                self.store(value, tensor)

    def store(self, value: int, tensor: Tensor) -> None:
        """Write a new storage. The tensor is copied, unless it is laid out as the value is and nothing else is."""
        into = self._values[value]
        shape, strides = self._shape(into.shape), self._shape(into.strides)
        assert tuple(tensor.shape) == shape, f"an operator returned {tuple(tensor.shape)} for {shape}"
        if tensor.stride() != strides or tensor.storage_offset():
            copy = tensor.new_empty_strided(shape, strides)
            tensor = copy.copy_(tensor)
        self.storages[into.storage] = tensor

    def tensor(self, value: int) -> Tensor:
        """A view of a storage."""
        of = self._values[value]
        base = self.storages[of.storage]
        dtype = getattr(torch, of.dtype)
        offset = size_of(of.offset, self._sizes) + base.storage_offset()
        if dtype is base.dtype:
            return base.as_strided(self._shape(of.shape), self._shape(of.strides), offset)
        made = torch.empty(0, dtype=dtype, device=base.device)
        return made.set_(base.untyped_storage(), offset, self._shape(of.shape), self._shape(of.strides))

    def _shape(self, sizes: Sequence[int | str]) -> tuple[int, ...]:
        return tuple(size_of(size, self._sizes) for size in sizes)

    def _resolved(self, op: Op) -> tuple[Any, dict[str, Any]]:
        """Its arguments and keywords."""
        args, *kwargs = (resolved(one, self.tensor, self._sizes, self._cache) for one in (op.args, *op.kwargs.values()))
        return args, dict(zip(op.kwargs, kwargs, strict=True))

    def _dtype(self, op: Op) -> torch.dtype:
        """Of its first output."""
        return getattr(torch, self._values[op.outputs[0] or 0].dtype)

    def _convolved(self, op: Op, *args: Any) -> Tensor:
        *given, by_token = args
        longer = self._shape(self._values[op.outputs[0] or 0].shape)[1 if by_token else 2]
        new = convolved(self._door, self._replay.scans, *given)
        out = nn.functional.pad(new, (longer - new.shape[2], 0))
        return out.transpose(1, 2) if by_token else out

    def _scan(self, op: Op, layer: int, head: int | None, *given: Any) -> Tensor:
        of, plane = Recurrence(*given), self._step.memory.states.planes(layer)[recurrent(0)]
        out = of.first.new_empty(of.shape, dtype=self._dtype(op))
        scan_rows(self._replay.scans, of, plane, head, self._step.plan.states, out)
        return out

    def _ours(self, op: Op) -> Any:  # noqa: C901 - an operator of ours each
        args, kwargs = self._resolved(op)
        match op.name:
            case "kvcellar.linear":
                x, paths = args
                return torch.cat([self._replay.network.get_submodule(path)(x) for path in paths], -1)
            case "kvcellar.embedding":
                ids, path = args
                return nn.functional.embedding(ids, tensor_of(self._replay.network, path))
            case "kvcellar.experts":
                x, index, path = args
                return self._replay.network.get_submodule(path)(x, index, **kwargs)
            case "kvcellar.put":
                self._door.put(*args)
                return ()
            case "kvcellar.attend" | "kvcellar.attend_latent":
                q, layer = args
                history, scoring = self._door.history(layer), Scoring(**kwargs)
                if op.name == "kvcellar.attend_latent":
                    return history.backend.attend_latent(q, history, scoring)
                return history.backend.attend(q.transpose(1, 2), history, scoring)
            case "kvcellar.states":
                return list(self._step.memory.states.read(args[0], self._step.plan.states).values())
            case "kvcellar.keep_states":
                values, names, layer = args
                states = self._step.memory.states
                stored = [name for name in states.planes(layer) if name not in names]
                states.write(layer, self._step.plan.states, dict(zip(names, values, strict=True)), stored=stored)
                return ()
            case "kvcellar.convolve":
                x, weight, bias, silu, by_token = args
                out = self._replay.scans.convolve(x, weight, bias, silu=silu)
                return out.transpose(1, 2) if by_token else out
            case "kvcellar.convolve_states":
                return self._convolved(op, *args)
            case "kvcellar.scan":
                return self._scan(op, *args)
            case "kvcellar.scan_states":
                layer, head, *given = args
                return scanned(self._door, self._replay.scans, layer, head, Recurrence(*given), self._dtype(op))
            case "kvcellar.dense":
                layer, plane = args
                k, v, _ = self._door.history(layer).dense()
                stored = (k if plane == "k" else v).transpose(0, 1)[None]
                return stored.to(self._dtype(op))
            case "kvcellar.attend_dense":
                q, k, v, layer = args
                history = self._door.history(layer)
                k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)  # [N,G,D], [N,G,Dv]
                return history.backend.attend_dense(q.transpose(1, 2)[0], k, v, history.step, Scoring(**kwargs))[None]
            case _:
                path, arguments = args
                out = self._replay.network.get_submodule(path)(*arguments, **kwargs)
                return [one for one in tree_leaves(out) if isinstance(one, Tensor)]


def convolved(
    door: FlatDoor,
    kernel: ScanKernel,
    new: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: Any,
    plane: Any,
    silu: Any,
) -> Tensor:
    """[1,C,T] -> [1,C,T]: the new columns of `kvcellar.convolve_states`, as a mixer computes them."""

    def of_alike(view: StateView, x: Tensor) -> Tensor:  # [B,L,C], sequences with as many tokens
        longer = view.shift_in(x.transpose(1, 2), layer, plane)
        return kernel.convolve(longer, weight, bias, silu=silu)[..., -x.shape[1] :].transpose(1, 2)

    return door.mixing.part(layer, of_alike, new.transpose(1, 2), kernel).transpose(1, 2)


def scanned(door: FlatDoor, kernel: ScanKernel, layer: Any, head: Any, of: Recurrence, dtype: torch.dtype) -> Tensor:
    """The results [1,T,heads,elements] of `kvcellar.scan_states`, as a mixer computes them."""

    def of_alike(view: StateView, tokens: Any) -> Tensor:  # [B,L,heads,elements], sequences with as many tokens
        part = of._replace(tokens=tokens)
        out = part.first.new_empty(part.shape, dtype=dtype)
        view.recur(layer, head, part, out)
        return out

    return door.mixing.part(layer, of_alike, of.tokens, kernel)


def scans_of(network: nn.Module) -> ScanKernel:
    """The kernel of a network whose programs have scans or convolutions."""
    kernel = scan_kernel(network)
    assert kernel is not None, "a program has them where there is a kernel"
    return kernel


def sizes_of(program: Program) -> Callable[[RecordedStep], Sizes]:
    """What returns the number of each symbol in a step."""
    cells: dict[str, int] = {}  # by symbol that is a number of cells, a layer whose cells these are
    for op in program.ops:
        match op:
            case Op("kvcellar.dense", (int(layer), _), _, (int(stored),)):
                cells[str(program.values[stored].shape[2])] = layer
            case _:
                continue

    def sizes(step: RecordedStep) -> Sizes:
        counts = {symbol: len(step.door.history(layer).step.columns.cells) for symbol, layer in cells.items()}
        return {"T": len(step.ids), "W": len(step.wanted), **counts}

    return sizes


def constants_of(program: Program, network: nn.Module) -> dict[int, Tensor]:
    """The constants of a program, by storage: parameters and buffers of the network, and data."""
    device = next(network.parameters()).device
    found: dict[int, Tensor] = {}
    for storage, constant in program.constants.items():
        if constant.path is not None:
            tensor = found[storage] = tensor_of(network, constant.path).detach()
            if type(tensor) is not Tensor:
                raise NotRecordable(f"{constant.path} is a {type(tensor).__name__}, of which a program reads no memory")
        else:
            dtype = next(value.dtype for value in program.values if value.storage == storage)
            found[storage] = torch.tensor(constant.data, dtype=getattr(torch, dtype), device=device)
    return found


def tensor_of(network: nn.Module, path: str) -> Tensor:
    """A parameter or buffer of the network."""
    parent, _, name = path.rpartition(".")
    return getattr(network.get_submodule(parent), name)


def _last_uses(program: Program) -> Mapping[int, list[int]]:
    """Storages by the number of the operator after which they are not read."""
    kept = program.constants.keys() | {program.values[value].storage for value in program.outputs.values()}
    last: dict[int, int] = {}
    for number, op in enumerate(program.ops):
        for value in (*op.reads, *(one for one in op.outputs if one is not None)):
            last[program.values[value].storage] = number
    freed: dict[int, list[int]] = {}
    for storage, number in last.items():
        if storage not in kept:
            freed.setdefault(number, []).append(storage)
    return freed
