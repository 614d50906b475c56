"""mixers: recurrent layers in a step of many sequences.

A mixer is a module that keeps a state through the cache: the last inputs of a convolution, the sums of a state space or
of linear attention. It takes rows [B,L,H] of equal length, one a sequence, while a step is one row [1,T,H] of sequences
of any length. So a mixer is called once for all sequences that get equally many tokens, each time with their states:

    turn = StateView(memory, segments)                # copies of the states before the step
    out = forward(hidden[B,L,H], cache)          # the model reads, writes and overwrites them there
    turn.put()                                   # and they are stored, in rows that only this step has

Everything else of the model stays flat. A state of zeros is no state, exactly: nothing is special about a first step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kvcellar.cache.memory import Memory
from kvcellar.cache.states import At
from kvcellar.errors import ModelRefused
from kvcellar.models.scan import Call, Scans, in_our_hands, recurrent
from kvcellar.plan import StateSegment

Forward = Callable[..., Any]


def conv(index: int) -> str:
    """What the plane of a layer's convolution of this index is called."""
    return f"conv {index}"


class StateView:
    """States of B sequences that get L tokens each, while a mixer works on them."""

    def __init__(
        self, memory: Memory, segments: Sequence[StateSegment], length: int, *, revertible: bool = False
    ) -> None:
        """`revertible`: a part of the tokens may be kept, so what tells the states in between is kept, too."""
        self.segments, self.length = segments, length
        self._memory, self._keeps = memory, revertible and length > 1
        self._states: dict[int, dict[str, Tensor]] = {}
        self._longer: dict[tuple[int, str], Tensor] = {}  # a convolution's inputs [B,C,K+L], the new ones last
        self._scans: dict[int, list[Call]] = {}  # by layer; a mixer of several heads scans them one by one, in order
        self._made: dict[int, int] = {}  # by layer, how many scans were made

    def state(self, layer: int, name: str) -> Tensor:
        """[B,*shape], to be overwritten at will."""
        if layer not in self._states:
            self._states[layer] = self._memory.state(layer, self.segments)
        found = self._states[layer].get(name)
        if found is None:
            raise ModelRefused(
                f"layer {layer} asks for a state {name}, and had none when the model's shape was learned"
            )
        return found

    def shift_in(self, new: Tensor, layer: int, name: str) -> Tensor:
        """The inputs of a convolution [B,C,K] with `new` ones [B,C,L] behind them; the last K are its state now."""
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
        """Make the scan that a mixer asks for. One that takes no state in transformers is given its own."""
        state = self.state(layer, recurrent(0))
        if call.scan.ours is not None:
            heads, made = _heads(call, state), self._made.get(layer, 0)
            if made == len(heads):
                raise ModelRefused("one of its layers scans more often than it has states to go on from")
            call, self._made[layer] = call.going_on(heads[made]), made + 1
        elif call.arguments[call.scan.state] is None:  # a mixer may take nothing for zero
            call = call.going_on(state)
        if self._keeps:
            self._scans.setdefault(layer, []).append(call.kept())
        return call.made()

    def states(self, layer: int) -> dict[str, Tensor]:
        return self._states[layer]

    def put(self, again: "Again") -> None:
        """Store the states. If a part of the tokens may be kept, those after fewer can be asked for till the step ends:
        by `again`, where what was kept does not tell them.
        """
        for layer, planes in self._states.items():
            at = self._at(layer, again) if self._keeps else None
            self._memory.put_state(layer, self.segments, planes, at=at)

    def _at(self, layer: int, again: "Again") -> At:
        def at(indices: Sequence[int], counts: Sequence[int]) -> Mapping[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name, state in self._states[layer].items():
                longer, scans = self._longer.get((layer, name)), self._scans.get(layer)
                if longer is not None:
                    found[name] = _windows(longer, indices, counts, state.shape[-1])
                elif scans and name == recurrent(0):
                    before = self._memory.state(layer, [self.segments[i] for i in indices])[name]
                    heads = _heads(scans[0], before)
                    after = [scan.after(head, indices, counts) for scan, head in zip(scans, heads, strict=True)]
                    found[name] = torch.stack(after, 1) if after[0].dim() < state.dim() else after[0]
                else:
                    return self._by_count(layer, again, indices, counts)
            return found

        return torch.inference_mode()(at)

    def _by_count(
        self, layer: int, again: "Again", indices: Sequence[int], counts: Sequence[int]
    ) -> Mapping[str, Tensor]:
        """A mixer takes rows of equal length, so it runs again once for every count that there is."""
        found = {name: state.new_empty(len(indices), *state.shape[1:]) for name, state in self._states[layer].items()}
        for count in set(counts):
            places = [place for place, other in enumerate(counts) if other == count]
            for name, state in again([indices[place] for place in places], count).states(layer).items():
                found[name][places] = state
        return found


Again = Callable[
    [Sequence[int], int], StateView
]  # a mixer's turn for segments of these indices and so many of their tokens


def _windows(longer: Tensor, indices: Sequence[int], counts: Sequence[int], kernel: int) -> Tensor:
    """Of inputs [B,C,K+L] of a convolution, the K [b,C,K] that are behind it after so many tokens."""
    return torch.stack([longer[i, ..., n : n + kernel] for i, n in zip(indices, counts, strict=True)])


def _heads(call: Call, state: Tensor) -> Sequence[Tensor]:
    """The states [B,...] that a mixer's scans go on from, one by one: Mamba's first scan knows no heads."""
    return state.unbind(1) if call.scan.ours is not None and state.dim() > 3 else (state,)


class Mixes(Scans, Protocol):
    """A door, as far as mixers know it."""

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any: ...


class Mixed:
    """Stands in for the `forward` of a mixer: a door that is open decides how it is called."""

    def __init__(self, module: nn.Module, door: Callable[[], Mixes | None]) -> None:
        self._own, self._ours, self._door = module.forward, in_our_hands(module, door), door

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        door = self._door()
        return self._own(*args, **kwargs) if door is None else door.mix(self._ours, args, kwargs)


class Grid(NamedTuple):
    """B segments of L tokens each; `rows` [B,L] of the step are theirs, None if that is all of it, in order."""

    segments: Sequence[StateSegment]
    length: int
    rows: Tensor | None


@dataclass(slots=True)
class Mixing:
    """Runs mixers for the segments of one step of `tokens` rows. `turn` is that of the mixer which runs now."""

    memory: Memory
    segments: Sequence[StateSegment]
    tokens: int
    opened: Callable[[], AbstractContextManager[Any]]  # the door of the step, open again
    revertible: frozenset[int] = frozenset()  # sequences of which a part of the tokens may be kept
    turn: StateView | None = field(default=None, init=False)
    _grids: Sequence[Grid] = field(default=(), init=False)  # the same for all mixers: made once

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Call `forward` for every length that there is; what it answers [B,L,...] comes back as [1,T,...]."""
        self._grids = self._grids or self._all_grids()
        whole: Any = None
        for segments, length, rows in self._grids:
            if rows is None:
                change = self._all_of(len(segments), length)
                out = self._call(forward, _map(args, change), _map(kwargs, change), segments, length)
                return _map(out, lambda x: x.reshape(1, self.tokens, *x.shape[2:]) if x.dim() > 1 else x)
            change = self._some_of(rows)
            part = self._call(forward, _map(args, change), _map(kwargs, change), segments, length)
            whole = self._joined(whole, part, rows)
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
                torch.tensor([[s.row + i for i in range(length)] for s in segments], device=self.memory.device),
            )
            for length, segments in by_length.items()
        ]

    def _call(self, forward: Forward, args: Any, kwargs: Any, segments: Sequence[StateSegment], length: int) -> Any:
        def again(indices: Sequence[int], fewer: int) -> StateView:
            part = _part_of(list(indices), len(segments), length, fewer)
            turn = StateView(self.memory, [segments[i] for i in indices], fewer)
            some_args, some_kwargs = _map(args, part), _map(kwargs, part)
            with torch.inference_mode(), self.opened():
                self._run(turn, forward, some_args, some_kwargs)
            return turn

        revertible = any(segment.seq in self.revertible for segment in segments)
        turn = StateView(self.memory, segments, length, revertible=revertible)
        out = self._run(turn, forward, args, kwargs)
        turn.put(again)
        return out

    def _run(self, turn: StateView, forward: Forward, args: Any, kwargs: Any) -> Any:
        self.turn = turn
        try:
            return forward(*args, **kwargs)
        finally:
            self.turn = None

    def _is_flat(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.shape[:2] == (1, self.tokens)

    def _all_of(self, n: int, length: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.reshape(n, length, *x.shape[2:]) if self._is_flat(x) else x

    def _some_of(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x[0][rows] if self._is_flat(x) else x

    def _joined(self, whole: Any, part: Any, rows: Tensor) -> Any:
        """`part` [B,L,...] at its rows of `whole` [1,T,...], which is made if it is not there yet."""
        if isinstance(part, Tensor) and part.shape[:2] == rows.shape:
            if whole is None:
                whole = part.new_empty(1, self.tokens, *part.shape[2:])
            whole[0, rows] = part
            return whole
        if isinstance(part, tuple):
            wholes = whole if whole is not None else (None,) * len(part)
            return tuple(self._joined(w, p, rows) for w, p in zip(wholes, part, strict=True))
        return part


def _part_of(indices: list[int], n: int, length: int, fewer: int) -> Callable[[Tensor], Tensor]:
    """The first `fewer` of L tokens of some of n sequences, of a tensor that has all."""
    return lambda x: x[indices, :fewer] if x.dim() > 1 and x.shape[:2] == (n, length) else x


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _map(part, change) for key, part in value.items()}
    return value


def install(mixers: Iterable[nn.Module], door: Callable[[], Mixes | None]) -> None:
    """Let the doors decide how these modules are called. Where none is open, nothing has changed for them."""
    for module in mixers:
        if not isinstance(vars(module).get("forward"), Mixed):
            module.forward = Mixed(module, door)
