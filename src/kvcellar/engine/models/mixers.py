"""mixers: run recurrent layers in a step of many sequences.

A mixer is a module that keeps a state in the cache: the last inputs of a convolution, the sums of a state space or of
linear attention. It takes rows [B,L,H] of equal length, one per sequence, while a step is one row [1,T,H] of sequences
of any length. So a mixer is called once for all sequences with the same number of tokens, with their states:

    view = StateView(memory.states, segments, length)   # copies of the states before the step
    out = forward(hidden[B,L,H], cache)          # the model reads and overwrites the copies
    view.put(rerun)                              # they are stored, in rows that only this step has

All other layers stay flat. A zero state equals no state, so the first step of a sequence is like any other.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kvcellar.engine.models.weights.scan import Call, Scanned, Scans, after, recurrent, with_our_scans
from kvcellar.errors import ModelRefused, NotSupported
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.scans import TYPES, Recurrence, Rows, ScanKernel, runs_of
from kvcellar.kernels.uploads import uploaded
from kvcellar.memory.kv.states import At
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import StateSegment

Forward = Callable[..., Any]
Opened = Callable[[], AbstractContextManager[Any]]


def conv(index: int) -> str:
    """The name of the plane of a layer's convolution of this index."""
    return f"conv {index}"


class StateRows(Protocol):
    """The states of sequences, as `Memory.states` has them in an open step."""

    def planes(self, layer: int) -> Mapping[str, Tensor]: ...

    def read(
        self, layer: int, segments: Sequence[StateSegment], names: Collection[str] | None = None
    ) -> dict[str, Tensor]: ...

    def write(
        self, layer: int, segments: Sequence[StateSegment], planes: Mapping[str, Tensor], at: At | None = None,
        between: At | None = None, stored: Collection[str] = (),
    ) -> None: ...  # fmt: skip


class StateView:
    """Copies of the states of B sequences with L new tokens each, which a mixer reads and overwrites.

    A kernel that scans reads and writes the rows themselves, those of checkpoints inside segments too.
    """

    def __init__(
        self, rows: StateRows, segments: Sequence[StateSegment], length: int, *, revertible: bool = False,
        kernel: ScanKernel | None = None,
    ) -> None:  # fmt: skip
        """`revertible`: a part of the tokens may be committed, so what determines the states in between is kept."""
        self.segments, self.length = segments, length
        self._rows, self._kernel, self._revertible = rows, kernel, revertible and length > 1
        self._keeps = self._revertible or any(segment.between for segment in segments)
        self._states: dict[int, dict[str, Tensor]] = {}
        self._longer: dict[tuple[int, str], Tensor] = {}  # a convolution's inputs [B,C,K+L], the new ones last
        self._scans: dict[int, list[Recurrence]] = {}  # by layer; a mixer may scan its heads one by one, in order
        self._done: dict[int, int] = {}  # by layer, the number of scans so far

    def state(self, layer: int, name: str) -> Tensor | None:
        """[B,*shape], a copy that may be overwritten; None for the state that a kernel scans from, so that a mixer
        calls its scan for any number of tokens."""
        if self._kernel is not None and name == recurrent(0):
            return None
        if layer not in self._states:
            names = [name for name in self._rows.planes(layer) if self._kernel is None or name != recurrent(0)]
            self._states[layer] = self._rows.read(layer, self.segments, names)
        found = self._states[layer].get(name)
        if found is None:
            raise ModelRefused(f"layer {layer} reads a state {name}, and had none when the model was probed")
        return found

    def shift_in(self, new: Tensor, layer: int, name: str) -> Tensor:
        """The inputs of a convolution [B,C,K] followed by `new` ones [B,C,L]; the last K become its state."""
        before = self.state(layer, name)
        assert before is not None
        before = before.to(new.dtype)
        if new.stride(-1) == 1:
            longer = torch.cat([before, new], -1)
        else:  # channels of a token are beside each other, as they come from a linear layer
            longer = torch.cat([before.transpose(1, 2), new.transpose(1, 2)], 1).transpose(1, 2)
        self._states[layer][name] = longer[..., -before.shape[-1] :]
        if self._keeps and new.shape[-1] == self.length:
            self._longer[layer, name] = longer
        return longer

    def update(self, value: Tensor, layer: int, name: str) -> Tensor:
        if self._kernel is None or name != recurrent(0):
            self.state(layer, name)
            self._states[layer][name] = value
        return value

    def scan(self, layer: int, call: Call) -> Any:
        """Run a scan of a mixer, from its state, also where transformers' own scan takes none."""
        plane, of = self._rows.planes(layer).get(recurrent(0)), call.recurrence
        if plane is None:
            raise ModelRefused(f"layer {layer} scans, and had no state when the model was probed")
        heads = plane.shape[1] if call.by_head and plane.dim() > 3 else 1
        done = self._done.get(layer, 0)
        if done == heads and call.by_head:
            raise ModelRefused("one of its layers has more scans than states")
        if self._kernel is not None:
            of = of.of(lambda x: x if x.dtype in TYPES else x.float())
            out = of.first.new_empty(of.shape, dtype=torch.float32 if call.scan.wide else of.first.dtype)
            self.recur(layer, done if heads > 1 else None, of, out)
            shape = plane.shape[2 if heads > 1 else 1 :]
            final = of.first.new_empty((), dtype=torch.float32).expand(of.shape[0], *shape)  # nothing reads it
            return call.outputs(out.to(call.recurrence.first.dtype) if not call.scan.wide else out), final
        self._note(layer, of)
        state = self.state(layer, recurrent(0))
        assert state is not None
        if call.by_head:
            call = call.from_state(state[:, done] if heads > 1 else state)
        elif call.arguments[call.scan.state] is None:  # mixers may pass None for zero
            call = call.from_state(state)
        return call.run()

    def recur(self, layer: int, head: int | None, of: Recurrence, out: Tensor) -> None:
        """Fill out [B,L,heads,elements] by the kernel, which stores the states. `head`: of a mixer that scans head by
        head."""
        assert self._kernel is not None
        self._note(layer, of)
        self._scan(self._kernel, layer, head, of, out)

    def _note(self, layer: int, of: Recurrence) -> None:
        self._done[layer] = self._done.get(layer, 0) + 1
        if self._keeps:
            self._scans.setdefault(layer, []).append(of)

    def _scan(self, kernel: ScanKernel, layer: int, head: int | None, of: Recurrence, out: Tensor) -> None:
        scan_rows(kernel, of, self._rows.planes(layer)[recurrent(0)], head, self.segments, out)

    def states(self, layer: int) -> dict[str, Tensor]:
        return self._states[layer]

    def put(self, rerun: "Rerun") -> None:
        """Store the states. If a part of the tokens may be committed, those after fewer tokens can be computed until
        the step ends: from what was kept, or else by `rerun`, unless that is the reason why they cannot.
        """
        stored = () if self._kernel is None else (recurrent(0),)
        for layer in self._states.keys() | self._done.keys():
            at = self._at(layer, rerun) if self._revertible else None
            between = self._at(layer, rerun, stored) if self._keeps else None
            self._rows.write(layer, self.segments, self._states.get(layer, {}), at, between, stored)

    def _at(self, layer: int, rerun: "Rerun", stored: Collection[str] = ()) -> At:
        """Without the planes that are `stored` already."""

        def at(indices: Sequence[int], counts: Sequence[int]) -> Mapping[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name in self._rows.planes(layer):
                longer, scans = self._longer.get((layer, name)), self._scans.get(layer)
                if name in stored:
                    continue
                if longer is not None:
                    kernel = self._states[layer][name].shape[-1]
                    found[name] = _windows(longer, indices, counts, kernel)
                elif scans and name == recurrent(0):
                    each = [
                        self._after(layer, head if len(scans) > 1 else None, of, indices, counts)
                        for head, of in enumerate(scans)
                    ]
                    found[name] = torch.cat(each, 1) if len(scans) > 1 else each[0]
                else:
                    return self._by_count(layer, rerun, indices, counts)
            return found

        return torch.inference_mode()(at)

    def _after(
        self, layer: int, head: int | None, of: Recurrence, indices: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """The states [b,*shape] after the first `counts` tokens of the segments `indices`."""
        name = recurrent(0)
        if self._kernel is None:
            before = self._rows.read(layer, [self.segments[i] for i in indices], [name])[name]
            return after(of, before if head is None else before[:, head : head + 1], indices, counts)
        plane = self._rows.planes(layer)[name]
        parts = {i: (n, row) for row, (i, n) in enumerate(zip(indices, counts, strict=True), 1)}
        made = plane.new_empty(1 + len(counts), *(plane if head is None else plane[:, head : head + 1]).shape[1:])
        ends = [(one.read, [parts.get(i, (0, 0))]) for i, one in enumerate(self.segments)]
        rows = Rows(of_heads(plane, head), of_heads(made, None), runs_of(ends), len(ends))
        self._kernel.run(of, rows, of.first.new_empty(()).expand(of.shape))  # outputs that nothing reads
        return made[1:]

    def _by_count(
        self, layer: int, rerun: "Rerun", indices: Sequence[int], counts: Sequence[int]
    ) -> Mapping[str, Tensor]:
        """Run the mixer again once per distinct count, since it takes rows of equal length."""
        if isinstance(rerun, str):
            raise NotSupported(rerun)
        found: dict[str, Tensor] = {}
        for count in set(counts):
            places = [place for place, other in enumerate(counts) if other == count]
            for name, state in rerun([indices[place] for place in places], count).states(layer).items():
                found.setdefault(name, state.new_empty(len(indices), *state.shape[1:]))[places] = state
        return found


def scan_rows(
    kernel: ScanKernel, of: Recurrence, plane: Tensor, head: int | None, segments: Sequence[StateSegment], out: Tensor
) -> None:
    """Fill `out`, and the rows of `plane` that segments name. `head`: of a mixer that scans head by head."""
    plane = of_heads(plane, head)
    ends = [(one.read, [*one.between, (one.length, one.write)]) for one in segments]
    kernel.run(of, Rows(plane, plane, runs_of(ends), len(ends)), out)


def of_heads(plane: Tensor, head: int | None) -> Tensor:
    """A plane of states as a kernel takes it [rows,heads,.,.]; of one head of a mixer that scans head by head."""
    if head is not None:
        return plane[:, head : head + 1]
    return plane if plane.dim() == 4 else plane[:, None]


# The states of a mixer after the first so many tokens of the segments of these indices; or why there are none.
Rerun = Callable[[Sequence[int], int], StateView] | str


def _windows(longer: Tensor, indices: Sequence[int], counts: Sequence[int], kernel: int) -> Tensor:
    """The state [b,C,K] of a convolution after the first `counts` tokens, from its inputs [B,C,K+L]."""
    return torch.stack([longer[i, ..., n : n + kernel] for i, n in zip(indices, counts, strict=True)])


class Mixes(Scans, Protocol):
    """The part of a door that mixers call."""

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any: ...


class Mixed:
    """Replaces the `forward` of a mixer: an open door decides how the original is called."""

    def __init__(self, module: nn.Module, door: Callable[[], Mixes | None], kernel: ScanKernel | None) -> None:
        self._own, self._ours, self._door = module.forward, with_our_scans(module, door, kernel), door

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        door = self._door()
        return self._own(*args, **kwargs) if door is None else door.mix(self._ours, args, kwargs)


class Grid(NamedTuple):
    """B segments of L tokens each, and their rows [B,L] of the step; None if these are all rows, in order."""

    segments: Sequence[StateSegment]
    length: int
    rows: Tensor | None


@dataclass(slots=True)
class Mixing:
    """Runs mixers for the segments of one step of `tokens` rows, as a whole (`mix`) or in parts (`part`). `view` has
    the states of the mixer that runs as a whole.

    Always true: parts of one layer share their views, whose states are stored before those of another layer begin."""

    memory: Memory
    segments: Sequence[StateSegment]
    tokens: int
    revertible: frozenset[int] = frozenset()  # sequences of which a part of the tokens may be committed
    view: StateView | None = field(default=None, init=False)
    _grids: Sequence[Grid] = field(default=(), init=False)  # the same for all mixers
    _layer: int | None = field(default=None, init=False)  # that is called in parts
    _views: dict[int, StateView] = field(default_factory=dict[int, StateView], init=False)  # its views, by length

    def mix(self, forward: Forward, args: Any, kwargs: Any, opened: Opened) -> Any:
        """Call `forward` once per distinct length; its results [B,L,...] are returned as [1,T,...]. `opened` opens the
        door of the step again."""
        return self._by_length(lambda grid: self._call(grid, forward, args, kwargs, opened))

    def part(self, layer: int, compute: Callable[[StateView, Any], Tensor], x: Any, kernel: ScanKernel) -> Tensor:
        """Call `compute` with tensors [B,L,...] of x [1,T,...], as `mix` does. States are stored by the next layer's
        first part, or by `end`."""
        if layer != self._layer:
            self.end()
            self._layer = layer

        def called(grid: Grid) -> Tensor:
            if grid.length not in self._views:
                self._views[grid.length] = self._viewed(grid, kernel)
            return compute(self._views[grid.length], mapped(x, lambda one: self._selected(grid, one)))

        return self._by_length(called)

    def end(self) -> None:
        """Store the states of the layer that was called in parts, if there is one."""
        for view in self._views.values():
            view.put("a part of the tokens cannot be kept: a layer that is called in parts did not read its states")
        self._layer = None
        self._views.clear()

    def _by_length(self, call: Callable[[Grid], Any]) -> Any:
        self._grids = self._grids or self._all_grids()
        whole: Any = None
        for grid in self._grids:
            out = call(grid)
            if grid.rows is None:
                # In the order that results of several lengths have: sums over a row depend on its strides.
                return mapped(out, lambda x: x.reshape(1, self.tokens, *x.shape[2:]).contiguous() if x.dim() > 1 else x)
            whole = self._joined(whole, out, grid.rows)
        return whole

    def _all_grids(self) -> list[Grid]:
        by_length: dict[int, list[StateSegment]] = {}
        for segment in self.segments:
            by_length.setdefault(segment.length, []).append(segment)
        if len(by_length) == 1:
            return [Grid(segments, length, None) for length, segments in by_length.items()]
        return [
            Grid(
                segments,
                length,
                uploaded([[s.row + i for i in range(length)] for s in segments], torch.int64, self.memory.device),
            )
            for length, segments in by_length.items()
        ]

    def _selected(self, grid: Grid, x: Tensor) -> Tensor:
        """[1,T,...] -> [B,L,...]"""
        if x.dim() < 2 or x.shape[:2] != (1, self.tokens):
            return x
        return x.reshape(len(grid.segments), grid.length, *x.shape[2:]) if grid.rows is None else x[0][grid.rows]

    def _viewed(self, grid: Grid, kernel: ScanKernel | None) -> StateView:
        revertible = any(segment.seq in self.revertible for segment in grid.segments)
        return StateView(self.memory.states, grid.segments, grid.length, revertible=revertible, kernel=kernel)

    def _call(self, grid: Grid, forward: Forward, args: Any, kwargs: Any, opened: Opened) -> Any:
        segments, length, _ = grid
        args, kwargs = (mapped(one, lambda x: self._selected(grid, x)) for one in (args, kwargs))

        def rerun(indices: Sequence[int], fewer: int) -> StateView:
            def part(x: Tensor) -> Tensor:
                """Of some segments, the first `fewer` tokens."""
                of_all = x.dim() > 1 and x.shape[:2] == (len(segments), length)
                return x[list(indices), :fewer] if of_all else x

            view = StateView(self.memory.states, [segments[i] for i in indices], fewer)
            with torch.inference_mode(), opened():
                self._run(view, forward, mapped(args, part), mapped(kwargs, part))
            return view

        view = self._viewed(grid, kernel_of(forward) if self.memory.device.type == "cpu" else None)
        out = self._run(view, forward, args, kwargs)
        view.put(rerun)
        return out

    def _run(self, view: StateView, forward: Forward, args: Any, kwargs: Any) -> Any:
        self.view = view
        try:
            return forward(*args, **kwargs)
        finally:
            self.view = None

    def _joined(self, whole: Any, part: Any, rows: Tensor) -> Any:
        """Write `part` [B,L,...] at its rows of `whole` [1,T,...], which is allocated if it is None."""
        if isinstance(part, Tensor) and part.shape[:2] == rows.shape:
            if whole is None:
                whole = part.new_empty(1, self.tokens, *part.shape[2:])
            whole[0, rows] = part
            return whole
        if isinstance(part, tuple):
            wholes = whole if whole is not None else (None,) * len(part)
            return tuple(self._joined(w, p, rows) for w, p in zip(wholes, part, strict=True))
        return part


def scan_kernel(network: nn.Module, environment: Mapping[str, str] = os.environ) -> ScanKernel | None:
    """What can run the scans of a network; None where torch has to: on other devices, in float64, or if it cannot be
    compiled."""
    weight = next(network.parameters())
    if weight.device.type != "cpu" or weight.dtype is torch.float64:
        return None
    try:
        return ScanKernel(environment)
    except NotCompiled:
        return None


def kernel_of(forward: Forward) -> ScanKernel | None:
    """What runs the scans of a mixer's forward."""
    return forward.kernel if isinstance(forward, Scanned) else None


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    return value


def wrap_mixers(
    mixers: Iterable[nn.Module], door: Callable[[], Mixes | None], kernel: ScanKernel | None = None
) -> None:
    """Let an open door decide how these modules are called. Without one they are called as before. `kernel` runs their
    scans, if there is one."""
    for module in mixers:
        if not isinstance(vars(module).get("forward"), Mixed):
            module.forward = Mixed(module, door, kernel)
