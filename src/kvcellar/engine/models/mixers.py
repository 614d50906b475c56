"""mixers: run recurrent layers in a step of many sequences.

A mixer is a module that keeps a state in the cache: the last inputs of a convolution, the sums of a state space or of
linear attention. It takes rows [B,L,H] of equal length, one per sequence, while a step is one row [1,T,H] of sequences
of any length. So a mixer is called once for all sequences with the same number of tokens, with their states:

    view = StateView(memory.states, segments, length)   # copies of the states before the step
    out = forward(hidden[B,L,H], cache)          # the model reads and overwrites the copies
    view.put(rerun)                              # they are stored, in rows that only this step has

All other layers stay flat. A zero state equals no state, so the first step of a sequence is like any other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kvcellar.engine.models.weights.scan import Call, Scans, recurrent, with_our_scans
from kvcellar.errors import ModelRefused
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

    def read(self, layer: int, segments: Sequence[StateSegment]) -> dict[str, Tensor]: ...

    def write(
        self, layer: int, segments: Sequence[StateSegment], planes: Mapping[str, Tensor], at: At | None = None
    ) -> None: ...


class StateView:
    """Copies of the states of B sequences with L new tokens each, which a mixer reads and overwrites."""

    def __init__(
        self, rows: StateRows, segments: Sequence[StateSegment], length: int, *, revertible: bool = False
    ) -> None:
        """`revertible`: a part of the tokens may be committed, so what determines the states in between is kept."""
        self.segments, self.length = segments, length
        self._rows, self._keeps = rows, revertible and length > 1
        self._states: dict[int, dict[str, Tensor]] = {}
        self._longer: dict[tuple[int, str], Tensor] = {}  # a convolution's inputs [B,C,K+L], the new ones last
        self._scans: dict[int, list[Call]] = {}  # by layer; a mixer may scan its heads one by one, in order
        self._done: dict[int, int] = {}  # by layer, the number of scans so far

    def state(self, layer: int, name: str) -> Tensor:
        """[B,*shape], a copy that may be overwritten."""
        if layer not in self._states:
            self._states[layer] = self._rows.read(layer, self.segments)
        found = self._states[layer].get(name)
        if found is None:
            raise ModelRefused(f"layer {layer} reads a state {name}, and had none when the model was probed")
        return found

    def shift_in(self, new: Tensor, layer: int, name: str) -> Tensor:
        """The inputs of a convolution [B,C,K] followed by `new` ones [B,C,L]; the last K become its state."""
        before = self.state(layer, name)
        longer = torch.cat([before.to(new.dtype), new], -1)
        self._states[layer][name] = longer[..., -before.shape[-1] :]
        if self._keeps and new.shape[-1] == self.length:
            self._longer[layer, name] = longer
        return longer

    def update(self, value: Tensor, layer: int, name: str) -> Tensor:
        self.state(layer, name)
        self._states[layer][name] = value
        return value

    def scan(self, layer: int, call: Call) -> Any:
        """Run a scan of a mixer, from its state, also where transformers' own scan takes none."""
        state = self.state(layer, recurrent(0))
        if call.scan.ours is not None:
            heads, done = _heads(call, state), self._done.get(layer, 0)
            if done == len(heads):
                raise ModelRefused("one of its layers has more scans than states")
            call, self._done[layer] = call.from_state(heads[done]), done + 1
        elif call.arguments[call.scan.state] is None:  # mixers may pass None for zero
            call = call.from_state(state)
        if self._keeps:
            self._scans.setdefault(layer, []).append(call.without_state())
        return call.run()

    def states(self, layer: int) -> dict[str, Tensor]:
        return self._states[layer]

    def put(self, rerun: "Rerun") -> None:
        """Store the states. If a part of the tokens may be committed, those after fewer tokens can be computed until
        the step ends: from what was kept, or else by `rerun`.
        """
        for layer, planes in self._states.items():
            at = self._at(layer, rerun) if self._keeps else None
            self._rows.write(layer, self.segments, planes, at=at)

    def _at(self, layer: int, rerun: "Rerun") -> At:
        def at(indices: Sequence[int], counts: Sequence[int]) -> Mapping[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name, state in self._states[layer].items():
                longer, scans = self._longer.get((layer, name)), self._scans.get(layer)
                if longer is not None:
                    found[name] = _windows(longer, indices, counts, state.shape[-1])
                elif scans and name == recurrent(0):
                    before = self._rows.read(layer, [self.segments[i] for i in indices])[name]
                    heads = _heads(scans[0], before)
                    after = [scan.after(head, indices, counts) for scan, head in zip(scans, heads, strict=True)]
                    found[name] = torch.stack(after, 1) if after[0].dim() < state.dim() else after[0]
                else:
                    return self._by_count(layer, rerun, indices, counts)
            return found

        return torch.inference_mode()(at)

    def _by_count(
        self, layer: int, rerun: "Rerun", indices: Sequence[int], counts: Sequence[int]
    ) -> Mapping[str, Tensor]:
        """Run the mixer again once per distinct count, since it takes rows of equal length."""
        found = {name: state.new_empty(len(indices), *state.shape[1:]) for name, state in self._states[layer].items()}
        for count in set(counts):
            places = [place for place, other in enumerate(counts) if other == count]
            for name, state in rerun([indices[place] for place in places], count).states(layer).items():
                found[name][places] = state
        return found


# The states of a mixer after the first so many tokens of the segments of these indices.
Rerun = Callable[[Sequence[int], int], StateView]


def _windows(longer: Tensor, indices: Sequence[int], counts: Sequence[int], kernel: int) -> Tensor:
    """The state [b,C,K] of a convolution after the first `counts` tokens, from its inputs [B,C,K+L]."""
    return torch.stack([longer[i, ..., n : n + kernel] for i, n in zip(indices, counts, strict=True)])


def _heads(call: Call, state: Tensor) -> Sequence[Tensor]:
    """The initial states [B,...] of a mixer's scans, one per head where the scan takes a single head."""
    return state.unbind(1) if call.scan.ours is not None and state.dim() > 3 else (state,)


class Mixes(Scans, Protocol):
    """The part of a door that mixers call."""

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any: ...


class Mixed:
    """Replaces the `forward` of a mixer: an open door decides how the original is called."""

    def __init__(self, module: nn.Module, door: Callable[[], Mixes | None]) -> None:
        self._own, self._ours, self._door = module.forward, with_our_scans(module, door), door

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
    """Runs mixers for the segments of one step of `tokens` rows. `view` has the states of the running mixer."""

    memory: Memory
    segments: Sequence[StateSegment]
    tokens: int
    revertible: frozenset[int] = frozenset()  # sequences of which a part of the tokens may be committed
    view: StateView | None = field(default=None, init=False)
    _grids: Sequence[Grid] = field(default=(), init=False)  # the same for all mixers

    def mix(self, forward: Forward, args: Any, kwargs: Any, opened: Opened) -> Any:
        """Call `forward` once per distinct length; its results [B,L,...] are returned as [1,T,...]. `opened` opens the
        door of the step again."""
        self._grids = self._grids or self._all_grids()
        whole: Any = None
        for grid in self._grids:
            out = self._call(grid, forward, args, kwargs, opened)
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

    def _call(self, grid: Grid, forward: Forward, args: Any, kwargs: Any, opened: Opened) -> Any:
        segments, length, rows = grid

        def selected(x: Tensor) -> Tensor:
            """[1,T,...] -> [B,L,...]"""
            if x.dim() < 2 or x.shape[:2] != (1, self.tokens):
                return x
            return x.reshape(len(segments), length, *x.shape[2:]) if rows is None else x[0][rows]

        args, kwargs = mapped(args, selected), mapped(kwargs, selected)

        def rerun(indices: Sequence[int], fewer: int) -> StateView:
            def part(x: Tensor) -> Tensor:
                """Of some segments, the first `fewer` tokens."""
                of_all = x.dim() > 1 and x.shape[:2] == (len(segments), length)
                return x[list(indices), :fewer] if of_all else x

            view = StateView(self.memory.states, [segments[i] for i in indices], fewer)
            with torch.inference_mode(), opened():
                self._run(view, forward, mapped(args, part), mapped(kwargs, part))
            return view

        revertible = any(segment.seq in self.revertible for segment in segments)
        view = StateView(self.memory.states, segments, length, revertible=revertible)
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


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    return value


def wrap_mixers(mixers: Iterable[nn.Module], door: Callable[[], Mixes | None]) -> None:
    """Let an open door decide how these modules are called. Without one they are called as before."""
    for module in mixers:
        if not isinstance(vars(module).get("forward"), Mixed):
            module.forward = Mixed(module, door)
