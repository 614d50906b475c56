"""attached_layers: what cache layers of transformers hold, as cells and state rows of a memory, in both directions.

A layer of transformers has one dense tensor for a batch, `[B,G,S,D]`: row r begins with `starts[r]` columns of padding,
and the token at position p of its text is in column `starts[r] + p`. A layer with a window has only the last columns.

No model name is looked at: the classes of the layers, which transformers chooses by the config, say what is kept.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvcellar.engine.models.input_limits import context_of, random_tokens
from kvcellar.engine.models.seam import cache_argument
from kvcellar.engine.models.selftest import TOLERANCE
from kvcellar.errors import ModelRefused
from kvcellar.memory.cells.layouts import Causal, Sliding
from kvcellar.memory.kv.history import indices
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Plan
from kvcellar.memory.shapes import Kind, Plane, Recurrent, StatePlane

TESTED = 12  # tokens, at most, that are tried before a memory is attached
ROOM = 64  # columns, at least, that are allocated ahead of those in use


class GrowingLayer(DynamicLayer):
    """The full layer of transformers, but new columns are written behind the others: they are not copied each step."""

    _room: tuple[Tensor, Tensor] | None = None  # of which `keys` and `values` are the first columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        end = held + key_states.shape[2]
        found: list[Tensor] = []
        rooms = self._room or (None, None)
        for now, new, room in zip((self.keys, self.values), (key_states, value_states), rooms, strict=True):
            assert now is not None
            if room is None or not _begins(room, now, end):
                room = new.new_empty(*new.shape[:2], end + max(ROOM, end // 4), new.shape[3])
                if held:
                    room[:, :, :held] = now
            room[:, :, held:end] = new
            found.append(room)
        self._room = found[0], found[1]
        self.keys, self.values = found[0][:, :, :end], found[1][:, :, :end]
        return self.keys, self.values


def _begins(room: Tensor, now: Tensor, end: int) -> bool:
    """Whether `now` are the first columns of `room`, and `end` columns fit."""
    return (
        end <= room.shape[2]
        and now.data_ptr() == room.data_ptr()
        and now.stride() == room.stride()
        and now.shape[:2] == room.shape[:2]
        and room.is_inference() == torch.is_inference_mode_enabled()
    )


_KNOWN = {
    DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer, DummyLayer,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window(Sliding):
    """Of a window W, transformers' layers keep the W - 1 columns that the next token sees, and no more."""

    def keep(self, end: int) -> int:
        return self.lowest(end)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a memory keeps of a model's cache layers. `dtype` is that of all keys and values. `at_once`: the model can
    go on from a cache by several tokens in one forward (transformers' code for some recurrent layers cannot)."""

    groups: tuple[Group, ...]
    recurrent: Recurrent | None
    dtype: torch.dtype
    at_once: bool

    @property
    def anywhere(self) -> bool:
        """Whether a text can be resumed at any position."""
        return self.recurrent is None and not any(group.bounded for group in self.groups)


def new_layers(model: PreTrainedModel) -> list[Any]:
    """Empty cache layers for `model`. Raises `ModelRefused` if there are some of a class that is not known."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if unknown := sorted({type(layer).__name__ for layer in layers} - {known.__name__ for known in _KNOWN}):
        raise ModelRefused(f"{type(model).__name__} keeps {' and '.join(unknown)} in its cache; `Engine` may serve it")
    return [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in layers]


@torch.no_grad()
def kept_of(model: PreTrainedModel) -> Kept:
    """By forwards of a few tokens. Raises `ModelRefused` if nothing can be kept, or the model cannot go on from it."""
    tokens, layers = min(TESTED, context_of(model)), new_layers(model)
    for seed in (0, 1):  # a near tie of a router's experts can fall either way
        ids = torch.tensor([random_tokens(model, tokens, torch.Generator().manual_seed(seed))], device=model.device)
        once, steps = (_difference(model, ids, layers, size) for size in (tokens, 1))
        if min(once, steps) <= (most := TOLERANCE.get(model.dtype, max(TOLERANCE.values()))):
            return _kept(model, layers, at_once=once <= most)
    raise ModelRefused(f"{type(model).__name__} goes on from its cache with other logits: it keeps more elsewhere")


def _difference(model: PreTrainedModel, ids: Tensor, layers: list[Any], size: int) -> float:
    """How far the last logits are from those without a cache, relative to these, where the model goes on from a cache
    by so many tokens at once, and has run on another cache meanwhile. `layers` become those of the cache."""
    accepts, half = frozenset(inspect.signature(model.forward).parameters), ids.shape[1] // 2
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    layers[:] = new_layers(model)
    cache, other = Cache(layers=layers), Cache(layers=new_layers(model))

    def run(held: Cache, start: int, end: int) -> Tensor:
        given = {"position_ids": places[:, start:end]} if "position_ids" in accepts else {}
        return model(
            input_ids=ids[:, start:end], use_cache=True, **{cache_argument(accepts): held, **given}
        ).logits  # as `generate` calls it: some models count positions otherwise without them

    run(cache, 0, half)
    run(other, 0, half - 1)
    logits = [run(cache, at, min(at + size, ids.shape[1])) for at in range(half, ids.shape[1], size)]
    expected = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return float((logits[-1][0, -1].float() - expected).abs().max() / expected.abs().max())


def _kept(model: PreTrainedModel, cache_layers: Sequence[Any], *, at_once: bool) -> Kept:
    buckets: dict[tuple[Any, ...], list[int]] = {}
    states: dict[int, tuple[StatePlane, ...]] = {}
    for number, layer in enumerate(cache_layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin) and (planes := _state_planes(layer)):
            states[number] = planes
        if isinstance(layer, DynamicLayer) and (k := layer.keys) is not None and (v := layer.values) is not None:
            window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
            planes = (Plane("k", k.shape[1], k.shape[3]), Plane("v", v.shape[1], v.shape[3]))
            buckets.setdefault((window, planes, k.dtype, v.dtype), []).append(number)
    types = {dtype for _, _, *both in buckets for dtype in both}
    if len(types) > 1:
        raise ModelRefused(f"{type(model).__name__} keeps keys and values in {' and '.join(map(str, types))}")
    groups: list[Group] = []
    for number, ((window, planes, *_), layers) in enumerate(buckets.items()):
        layout = Causal() if window is None else Window(window)
        groups.append(Group(f"{layout} #{number}", layout, planes, tuple(layers)))
    return Kept(tuple(groups), Recurrent(states) if states else None, types.pop() if types else model.dtype, at_once)


def _state_planes(layer: Any) -> tuple[StatePlane, ...]:
    found: list[StatePlane] = []
    for name, state in _states(layer).items():
        kind = str(state.dtype).removeprefix("torch.")
        if kind not in get_args(Kind):
            raise ModelRefused(f"a state of {type(layer).__name__} has {state.dtype}, which is no float")
        found.append(StatePlane(name, tuple(state.shape[1:]), cast(Kind, kind)))
    return tuple(found)


def _states(layer: Any) -> dict[str, Tensor]:
    """The states [B,*shape] of a recurrent layer, by name."""
    found = {f"conv {i}": state for i, state in layer.conv_states.items()}
    found |= {f"recurrent {i}": state for i, state in layer.recurrent_states.items()}
    return {name: state for name, state in found.items() if state is not None}


# -- from memory -------------------------------------------------------------------------------------------------------


def fill(layers: Sequence[Any], memory: Memory, seqs: Sequence[int], starts: Sequence[int], end: int) -> None:
    """Fill empty layers with `end` columns: row r is the sequence `seqs[r]`, which has `end - starts[r]` tokens."""
    for group, runs, held in zip(memory.storage.groups, _runs(memory, seqs), _held(memory, seqs), strict=True):
        cells = [indices(of_row, memory.device) for of_row in runs]
        for number in group.layers:
            layer, planes = layers[number], memory.layers[number].planes
            columns = end if not group.bounded else min(end, layer.sliding_window - 1)
            tensors: list[Tensor] = []
            for name in ("k", "v"):
                plane = planes[name].plane
                dense = torch.zeros(
                    len(seqs), plane.heads, columns, plane.size, dtype=memory.dtype, device=memory.device
                )
                for row, (of_row, first, start) in enumerate(zip(cells, held, starts, strict=True)):
                    at = start + first - (end - columns)  # column of the first cell; below 0: others are not needed
                    values = planes[name].values(of_row)[max(0, -at) :]
                    dense[row, :, max(0, at) :] = values.transpose(0, 1)
                tensors.append(dense)
            if not layer.is_initialized:
                layer.lazy_initialization(tensors[0][:, :, :0], tensors[1][:, :, :0])
            layer.keys, layer.values = tensors
            if group.bounded:
                layer.cumulative_length = end
    _fill_states(layers, memory, seqs)


def _runs(memory: Memory, seqs: Sequence[int]) -> list[tuple[Any, ...]]:
    """By group, the runs of each sequence."""
    return list(zip(*(memory.runs(seq) for seq in seqs), strict=True))


def _held(memory: Memory, seqs: Sequence[int]) -> list[tuple[int, ...]]:
    """By group, the first position that each sequence holds."""
    return list(zip(*([span.start for span in memory.held(seq).values()] for seq in seqs), strict=True))


def _fill_states(layers: Sequence[Any], memory: Memory, seqs: Sequence[int]) -> None:
    rows = [iter(memory.state(seq)) for seq in seqs]
    for number, planes in memory.recurrent.layers.items():
        layer = layers[number]
        for plane in planes:
            kind, _, index = plane.name.partition(" ")
            state, at = torch.stack([next(row) for row in rows]), int(index)
            if kind == "conv":
                LinearAttentionLayer.lazy_initialization(layer, conv_states=state, state_idx=at)
                layer.conv_states[at].copy_(state)
                layer.has_previous_state[at] = True
            else:
                LinearAttentionLayer.lazy_initialization(layer, recurrent_states=state, state_idx=at)
                layer.recurrent_states[at].copy_(state)


# -- to memory ---------------------------------------------------------------------------------------------------------


def store(layers: Sequence[Any], memory: Memory, plan: Plan, row: int, start: int, columns: int) -> None:
    """Put the only feed of an open step: tokens of `row`, which begins in column `start` of `columns`.

    What layers with windows no longer have is stored as zeros, and states as they are after the last column: they are
    valid once a step has come to the end.
    """
    (feed,) = plan.feeds
    for group in memory.storage.groups:
        for number in group.layers:
            put: Mapping[str, Tensor] = {
                name: _cut(tensor, row, columns, start + feed.pos.start, start + feed.pos.end)
                for name, tensor in (("k", layers[number].keys), ("v", layers[number].values))
            }
            memory.put(number, put["k"], put["v"])
    for number, planes in memory.recurrent.layers.items():
        states = _states(layers[number])
        after = {plane.name: _last(states[plane.name], plane)[row : row + 1] for plane in planes}
        memory.states.write(number, plan.states, after)


def _last(state: Tensor, plane: StatePlane) -> Tensor:
    """Convolutions that record their past have more inputs than the last ones."""
    return state if state.shape[1:] == plane.shape else state[..., -plane.shape[-1] :]


def _cut(tensor: Tensor, row: int, columns: int, begin: int, end: int) -> Tensor:
    """Columns `[begin,end)` of a row [G,s,D], which has the last s of `columns`, as [n,G,D]."""
    first = columns - tensor.shape[2]
    there = tensor[row, :, max(0, begin - first) : max(0, end - first)].transpose(0, 1)
    missing = end - begin - len(there)
    return torch.cat([there.new_zeros(missing, *there.shape[1:]), there]) if missing else there


def lengths(layers: Sequence[Any]) -> set[int]:
    """Columns of the layers that count them."""
    return {layer.get_seq_length() for layer in layers if isinstance(layer, DynamicLayer) and layer.is_initialized}
