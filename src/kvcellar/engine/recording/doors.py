"""doors: what a network calls while it is traced: a door, and modules that are one operator of a program.

These modules are linear layers, mixers, and what cannot be traced. The shapes of their results are known for linear
layers. For others they are found by running the module on zeros, with two values of each symbol: a size of a result is
a sum of multiples of symbols.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from kvcellar.engine.models.adapters.adapters import sizes_of
from kvcellar.engine.models.mixers import Forward, StateView, kernel_of, mapped
from kvcellar.engine.models.registered import GuestCache, opened_cache
from kvcellar.engine.models.seam import Binding, Door, Extras, StepDoor, scoring_of
from kvcellar.engine.models.shape import Shape
from kvcellar.engine.models.weights.scan import Call, recurrent
from kvcellar.engine.recording.program import CONVOLVE, SCAN_STATES, size_of
from kvcellar.engine.recording.program import Sizes as Values
from kvcellar.engine.recording.recording import NotRecordable
from kvcellar.engine.recording.trace import Sizes, Trace
from kvcellar.errors import ModelRefused
from kvcellar.kernels.layers import OwnExperts, OwnHeads
from kvcellar.kernels.scans import Recurrence, ScanKernel
from kvcellar.memory.shapes import Scoring


class RecordingDoor(Door):
    """Writes down what a forward stores and reads, as operators of `trace`. Tensors are fake."""

    SCAN = SCAN_STATES

    def __init__(self, trace: Trace, shape: Shape, past: int | Tensor, cells: Mapping[int, Any], ids: Tensor) -> None:
        """`cells`: by layer that is read as a whole, the number of cells that a step sees. `ids` [T]."""
        self._trace, self._shape, self._past, self._cells = trace, shape, past, cells
        self._states = _TracedStates(trace, shape, ids, self.SCAN)
        self._running: StateView | None = None
        self._latent = frozenset(one.layer for one in shape.bindings.values() if one.latent is not None)
        self._longer: tuple[Tensor, tuple[Tensor, int, str]] | None = None  # of the convolution that is about to run

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        self._trace.add("kvcellar.put", (k, v, layer), {}, ())
        if layer in self._latent:
            return k[:, :, :1], v[:, :, :1]
        if layer not in self._cells:
            return k, v
        return self._dense(k, layer, "k"), self._dense(v, layer, "v")

    def _dense(self, new: Tensor, layer: int, plane: str) -> Tensor:
        stored = self._trace.empty(new, (1, new.shape[1], self._cells[layer], new.shape[3]))
        self._trace.add("kvcellar.dense", (layer, plane), {}, (stored,))
        return stored

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        binding = self._shape.bindings.get(module)
        if binding is None:
            raise ModelRefused(f"{type(module).__name__} attends, and did not when the model was probed")
        scoring = _keywords(scoring_of(q, extras))
        if binding.latent is not None:
            return binding.latent(q.transpose(1, 2), lambda rows: self._attend_latent(rows, binding, scoring))
        out = self._trace.empty(q, (1, q.shape[2], q.shape[1], v.shape[3]))
        rows = (q,) if binding.direct else (q, k, v)
        name = "kvcellar.attend" if binding.direct else "kvcellar.attend_dense"
        self._trace.add(name, (*rows, binding.layer), scoring, (out,))
        return out

    def _attend_latent(self, rows: Tensor, binding: Binding, scoring: Mapping[str, Any]) -> Tensor:
        assert binding.latent is not None
        out = self._trace.empty(rows, (*rows.shape[:3], binding.latent.values.in_features))
        self._trace.add("kvcellar.attend_latent", (rows, binding.layer), scoring, (out,))
        return out

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, 1, dtype=torch.bool, device=device)  # not read: the plan decides

    def past_length(self, layer: int) -> int | Tensor:
        return self._past

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        if kernel_of(forward) is None:
            return forward(*args, **kwargs)
        return self._within(_TracedView(self._states, (), 1, kernel=kernel_of(forward)), forward, args, kwargs)

    def _within(self, view: StateView, forward: Forward, args: Any, kwargs: Any) -> Any:
        self._running = view
        try:
            return forward(*args, **kwargs)
        finally:
            self._running = None

    def state(self, layer: int, name: str) -> Tensor | None:
        if name.startswith("conv"):
            return torch.empty(0)  # mixers look whether there is one
        return None if self._is_scanned(name) else super().state(layer, name)

    def update_state(self, value: Tensor, layer: int, name: str) -> Tensor:
        return value if self._is_scanned(name) else super().update_state(value, layer, name)

    def _is_scanned(self, name: str) -> bool:
        """Whether a kernel reads and stores that state of the running mixer."""
        return self._running is not None and name == recurrent(0)

    def scan(self, layer: int, call: Call) -> Any:
        return super().scan(layer, call) if self._running is None else self._running.scan(layer, call)

    def shift_in(self, new: Tensor, layer: int, name: str, kernel: int | None) -> Tensor:
        planes = {} if self._shape.recurrent is None else {one.name: one for one in self._shape.recurrent.layers[layer]}
        longer = self._along(new, (1, new.shape[1], new.shape[2] + planes[name].shape[-1]))[1]
        self._longer = longer, (new, layer, name)
        return longer

    def convolve(self, kernel: ScanKernel, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        if self._longer is None or self._longer[0] is not x:
            raise ModelRefused("its convolution is not behind the inputs of a state")
        stored, out = self._along(x, x.shape)  # of its columns, those of new tokens are written
        (new, layer, name), by_token = self._longer[1], stored is not out
        self._trace.add(CONVOLVE, (new, weight, bias, layer, name, silu, by_token), {}, (stored,))
        return out

    def _along(self, like: Tensor, shape: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """What stores a result [B,C,L] in the order of `like`, and the result."""
        if like.stride(2) == 1:
            out = self._trace.empty(like, shape)
            return out, out
        stored = self._trace.empty(like, (shape[0], shape[2], shape[1]))
        return stored, stored.transpose(1, 2)


class DecodingDoor(StepDoor, RecordingDoor):
    """Also writes down what recurrent layers do where each sequence has one new token: the rows of the step [1,T,...]
    are those of T sequences [T,1,...]."""

    SCAN = "kvcellar.scan"

    def __init__(self, trace: Trace, shape: Shape, past: int | Tensor, cells: Mapping[int, Any], ids: Tensor) -> None:
        super().__init__(trace, shape, past, cells, ids)
        self._rows = ids.shape[0]

    def _view(self, layer: int) -> StateView:
        if self._running is None:
            raise ModelRefused(f"layer {layer} reads its state outside of its mixer, unlike when the model was probed")
        return self._running

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        view = _TracedView(self._states, (), 1, kernel=kernel_of(forward))
        out = self._within(view, forward, mapped(args, self._apart), mapped(kwargs, self._apart))
        view.put("one token has no part")
        return mapped(out, self._together)

    def convolve(self, kernel: ScanKernel, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        stored, out = self._along(x, x.shape)
        self._trace.add("kvcellar.convolve", (x, weight, bias, silu, stored is not out), {}, (stored,))
        return out

    def _apart(self, x: Tensor) -> Tensor:
        flat = x.dim() > 1 and [str(size) for size in x.shape[:2]] == ["1", str(self._rows)]
        return x.reshape(self._rows, 1, *x.shape[2:]) if flat else x

    def _together(self, x: Tensor) -> Tensor:
        return x.reshape(1, self._rows, *x.shape[2:]).contiguous() if x.dim() > 1 else x


class _TracedStates:
    """States as operators of a trace."""

    def __init__(self, trace: Trace, shape: Shape, ids: Tensor, scan: str) -> None:
        """`scan` is the name of the operator."""
        self._trace, self._ids, self._scan = trace, ids, scan
        self._layers = {} if shape.recurrent is None else shape.recurrent.layers

    def planes(self, layer: int) -> dict[str, Tensor]:
        """Fake ones, in place of those of a memory."""
        planes = self._layers.get(layer, ())
        made = [self._trace.empty(self._ids, (1, *one.shape), getattr(torch, one.kind)) for one in planes]
        return {plane.name: one for plane, one in zip(planes, made, strict=True)}

    def read(self, layer: int, segments: Any, names: Collection[str] | None = None) -> dict[str, Tensor]:
        planes, rows = self._layers[layer], self._ids.shape[0]
        made = [self._trace.empty(self._ids, (rows, *one.shape), getattr(torch, one.kind)) for one in planes]
        self._trace.add("kvcellar.states", (layer,), {}, made)
        found = {plane.name: one for plane, one in zip(planes, made, strict=True)}
        return {name: one for name, one in found.items() if names is None or name in names}

    def scan(self, layer: int, head: int | None, of: Recurrence, out: Tensor) -> None:
        self._trace.add(self._scan, (layer, head, *of), {}, (out,))

    def write(
        self, layer: int, segments: Any, planes: Mapping[str, Tensor], at: Any = None, between: Any = None,
        stored: Collection[str] = (),
    ) -> None:  # fmt: skip
        kept = {one.name: getattr(torch, one.kind) for one in self._layers[layer] if one.name not in stored}
        values = tuple(planes[name].to(dtype).contiguous() for name, dtype in kept.items())
        self._trace.add("kvcellar.keep_states", (values, tuple(kept), layer), {}, ())


class _TracedView(StateView):
    """Its states are operators of a trace."""

    _rows: _TracedStates

    def _scan(self, kernel: ScanKernel, layer: int, head: int | None, of: Recurrence, out: Tensor) -> None:
        self._rows.scan(layer, head, of, out)


class SampleDoor(Door):
    """Lets a module run by itself on a few rows, of one sequence without earlier tokens; nothing is stored."""

    def __init__(self, shape: Shape) -> None:
        self._states = {} if shape.recurrent is None else shape.recurrent.layers

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        return k, v

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, 1, dtype=torch.bool, device=device)

    def past_length(self, layer: int) -> int | Tensor:
        return 0

    def state(self, layer: int, name: str) -> Tensor:
        plane = next(plane for plane in self._states[layer] if plane.name == name)
        return torch.zeros(1, *plane.shape, dtype=getattr(torch, plane.kind))

    def shift_in(self, new: Tensor, layer: int, name: str, kernel: int | None) -> Tensor:
        return torch.cat([self.state(layer, name).to(new), new], -1)

    def update_state(self, value: Tensor, layer: int, name: str) -> Tensor:
        return value

    def scan(self, layer: int, call: Call) -> Any:
        return call.run()


def _keywords(scoring: Scoring) -> dict[str, Any]:
    return {"scale": scoring.scale, "softcap": scoring.softcap, "sinks": scoring.sinks}


Symbols = Mapping[str, Any]  # of torch, by name


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Within the block, modules have another `forward`."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.callback(_restore, module, vars(module).get("forward"))
            module.forward = forward
        yield


def _restore(module: nn.Module, own: Forward | None) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own


def layer_operator(trace: Trace, path: str, module: nn.Module) -> Forward:
    """The forward of a linear layer, of layers of experts or of one for each head: it is written down where its input
    is fake."""
    own = module.forward
    width = module.out_features if isinstance(module, OwnExperts | OwnHeads) else sizes_of(module)[1]

    def forward(x: Tensor, *more: Any) -> Tensor:
        if not isinstance(x, FakeTensor):
            return own(x, *more)
        name, args, kwargs, rows = "kvcellar.linear", (x, (path,)), {}, x.shape[:-1]
        if isinstance(module, OwnHeads):
            name, args = "kvcellar.heads", (path, (x,))
        elif isinstance(module, OwnExperts):
            index, share = more
            name, args, kwargs, rows = "kvcellar.experts", (x, index, path), {"share": share}, index.shape[:1]
        out = trace.empty(x, (*rows, width))
        trace.add(name, args, kwargs, (out,))
        return out

    return forward


class Opaque:
    """Makes forwards of modules that are written down as one operator."""

    def __init__(self, trace: Trace, shape: Shape, sizes: Sizes, symbols: Symbols, values: Values) -> None:
        """`symbols` by name, and the values with which the network is traced."""
        self._trace, self._shape, self._sizes, self._symbols, self._values = trace, shape, sizes, symbols, values

    def operator(self, name: str, path: str, module: nn.Module) -> Forward:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs))):
                return own(*args, **kwargs)
            out = self._result(own, args, kwargs)
            tensors = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
            self._trace.add(name, (path, args), kwargs, tensors)
            return out

        return forward

    def _result(self, own: Forward, args: Any, kwargs: Any) -> Any:
        """Fake tensors like the results of a module."""
        like = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor))
        base = self._sample(own, args, kwargs, self._values)
        other = {
            name: self._sample(own, args, kwargs, {**self._values, name: value + 2})
            for name, value in self._values.items()
            if self._depend(name, args, kwargs)
        }
        leaves = {name: tree_leaves(sample) for name, sample in other.items()}
        numbers = iter(range(len(tree_leaves(base))))

        def fake(one: Any) -> Any:
            number = next(numbers)
            if not isinstance(one, Tensor):
                return one
            shape = [self._size(dim, size, number, leaves) for dim, size in enumerate(one.shape)]
            return self._trace.empty(like, shape, one.dtype)

        return tree_map(fake, base)

    def _size(self, dim: int, size: int, number: int, samples: Mapping[str, list[Any]]) -> Any:
        total: Any = size
        for name, leaves in samples.items():
            times, rest = divmod(leaves[number].shape[dim] - size, 2)
            if rest:
                raise NotRecordable("the size of its result is no multiple of the number of rows")
            if times:
                total = total + times * (self._symbols[name] - self._values[name])
        return total

    def _depend(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a size of an argument depends on a symbol."""
        other = {**self._values, name: self._values[name] + 2}
        sizes = (
            self._sizes.of(dim) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) for dim in one.shape
        )
        return any(size_of(size, self._values) != size_of(size, other) for size in sizes)

    def _sample(self, own: Forward, args: Any, kwargs: Any, values: Values) -> Any:
        """What the module returns for zeros."""

        def real(tensor: Tensor) -> Tensor:
            shape = [size_of(self._sizes.of(dim), values) for dim in tensor.shape]
            return (
                torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
                if isinstance(tensor, FakeTensor)
                else tensor
            )

        with _disable_current_modes(), torch.no_grad(), opened_cache(SampleDoor(self._shape)) as cache:
            given = tree_map_only(Tensor, real, (args, kwargs))
            some_args, some_kwargs = tree_map(lambda one: cache if isinstance(one, GuestCache) else one, given)
            tensors = [one for one in tree_leaves((some_args, some_kwargs)) if isinstance(one, Tensor)]
            versions = [one._version for one in tensors]
            out = own(*some_args, **some_kwargs)
            if versions != [one._version for one in tensors]:
                raise NotRecordable("it writes into its arguments")
        return out
