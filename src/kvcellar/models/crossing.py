"""crossing: decoders that look at an encoder's output, under transformers' own `generate()`, on our cells.

    cache = crossing(model, cells=4096, input_cells=3000)
    model.generate(ids, past_key_values=cache)

The first forward of a model computes the keys and values of its cross-attention, for each row of the batch. They are
written into the memory once, rows with the same input sharing their cells, and every later forward reads them there.
Beams share them as they share their past; a row that is dropped gives them back.

Two kinds of models are served. Those with an encoder of their own (BART, T5, Whisper) keep two caches, and number the
layers of both from 0. Those whose cross-attention layers stand between the others (Mllama) keep one.

Always true between two forwards:
  * every row of the batch has its input in memory, or none has and nothing of it is pending;
  * what models are told of `is_updated` is what is in memory, whatever they have noted themselves.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from kvcellar.attention.sdpa import Sdpa
from kvcellar.cache.layouts import Input
from kvcellar.cache.memory import Group, Memory
from kvcellar.errors import BadRequest, ModelRefused, NotSupported
from kvcellar.models.facts import embedding_rows
from kvcellar.models.generation import GenerationCache
from kvcellar.models.seam import GuestCache
from kvcellar.models.shape import PROBE_TOKENS, StoreProbe, causal_shape
from kvcellar.spans import Span

Stored = Mapping[int, tuple[Tensor, Tensor]]  # by layer: k [B,G,n,D] and v [B,G,n,Dv]


class DecoderCache(GenerationCache):
    """The decoder's own keys and values, and beside them, in the same memory, what its cross-attention reads.

    `crossed` are the layers that do: from the model's number to the memory's.
    """

    def __init__(self, groups: tuple[Group, ...], memory: Memory, crossed: Mapping[int, int]) -> None:
        super().__init__(groups, memory)
        self.crossed = dict(crossed)
        self.layers: list[Any] = [InputLayer(self, layer) for layer in range(max(crossed) + 1)]
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}  # what this forward has computed and nobody has written
        self._read: tuple[tuple[Any, ...], Tensor] | None = None  # the last answer: models ask for it twice
        self._inputs = 0
        self._past = 0  # how long the rows were before the last forward

    @property
    def written(self) -> bool:
        """Do the rows have their inputs?"""
        return bool(self.rows) and self.memory.inputs.length(self.rows[0]) > 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx in self.crossed and layer_idx not in self._layers:
            return self.cross(key_states, value_states, layer_idx)
        held = super().update(key_states, value_states, layer_idx)
        self._settle()
        return held

    def cross(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What the encoder made of the rows' inputs for one layer: k [B,G,n,D] and v [B,G,n,Dv], which it answers."""
        if layer not in self.crossed:
            raise ModelRefused(f"layer {layer} did not look at an encoder when the model was probed, and does now")
        if self.written:
            raise NotSupported(
                "the rows have an input, and can have no other: reset() the cache", self.get_seq_length()
            )
        self._pending[layer] = (k, v)
        if self._stored == self._layers:
            self._end()
        self._settle()
        return k, v

    def read(self, layer: int, plane: str) -> Tensor:
        """[B,heads,n,size], as it was written."""
        asked = (layer, plane, *self.rows)
        if self._read is None or self._read[0] != asked:
            self._read = asked, self.memory.inputs.read(self.crossed[layer], plane, self.rows).transpose(1, 2)
        return self._read[1]

    def reset(self) -> None:
        super().reset()
        self._pending.clear()
        self._read = None

    def _begin(self, rows: int, tokens: int) -> None:
        self._pending.clear()  # the forward that computed it did not come to its end
        super()._begin(rows, tokens)
        self._past = self.get_seq_length()

    def _end(self) -> None:
        """Keep the step, but not before the input is whole, if this forward brings one."""
        if self._pending.keys() in (set(), self.crossed.keys()):
            super()._end()

    def _settle(self) -> None:
        """Write what is pending, once all layers are there and the forward's step is closed: for all rows, or for none.

        If that fails the tokens of this forward, which have been stored, are forgotten.
        """
        if self._pending.keys() != self.crossed.keys() or self.in_step:
            return
        pending, self._pending, self._read = self._pending, {}, None
        try:
            self._write(pending)
        except BaseException:
            self._cut_back()
            raise

    def _cut_back(self) -> None:
        """The rows as they were before the last forward; none if it was their first, or they cannot go on there."""
        ends = [self.memory.remove(seq, Span(self._past, self.memory.length(seq))) for seq in self.rows]
        if not self._past or set(ends) != {self._past}:
            self.reset()

    def _write(self, pending: Stored) -> None:
        """Each input is written for a sequence of its own first, so that no row has one if another finds no room."""
        names = self._names(pending)
        sources: dict[str, int] = {}
        try:
            for row, name in enumerate(names):
                if name not in sources:
                    sources[name] = self.fresh()
                    planes = {
                        self.crossed[layer]: (k[row].transpose(0, 1), v[row].transpose(0, 1))
                        for layer, (k, v) in pending.items()
                    }
                    self.memory.inputs.write(sources[name], len(next(iter(planes.values()))[0]), planes, digest=name)
            for seq, name in zip(self.rows, names, strict=True):
                self.memory.inputs.share(seq, name)
        finally:
            for seq in sources.values():
                if self.memory.has(seq):
                    self.memory.drop(seq)

    def _names(self, pending: Stored) -> list[str]:
        """For every row a name of its input: that of the first row which has the same (beams, several answers)."""
        if any(len(k) != len(self.rows) for k, _ in pending.values()):
            raise BadRequest(f"inputs of {len(next(iter(pending.values()))[0])} rows for {len(self.rows)} rows of text")
        planes = [plane for pair in pending.values() for plane in pair]
        named: dict[int, str] = {}  # by the first row that has it
        names: list[str] = []
        for row in range(len(self.rows)):
            equal = (name for first, name in named.items() if all(torch.equal(x[first], x[row]) for x in planes))
            name = next(equal, None)
            if name is None:
                self._inputs += 1
                name = named[row] = f"input {self._inputs}"
            names.append(name)
        return names

    def check(self) -> None:
        super().check()
        assert not self._pending, f"the input of layers {sorted(self._pending)} was not written"
        assert len({self.memory.inputs.length(seq) for seq in self.rows}) <= 1, "inputs of different lengths"


class InputLayer:
    """What models look at in `cache.layers[layer]`: the input of all rows, as their cross-attention wants it."""

    def __init__(self, own: DecoderCache, layer: int) -> None:
        self._own, self._layer = own, layer

    @property
    def is_initialized(self) -> bool:
        return self._layer in self._own.crossed and self._own.written

    @property
    def keys(self) -> Tensor:
        return self._own.read(self._layer, "k")

    @property
    def values(self) -> Tensor:
        return self._own.read(self._layer, "v")


class CrossCache(Cache):
    """The second cache of a model with an encoder. All that happens to rows happens to the first."""

    def __init__(self, own: DecoderCache) -> None:
        super().__init__(layers=own.layers)
        self._own = own

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        return self._own.cross(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._own.memory.inputs.length(self._own.rows[0]) if self._own.written else 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to do: the rows have been reordered, and their inputs with them."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing to do, likewise."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing to do, likewise."""

    def reset(self) -> None:
        """Nothing to do: the rows are gone, and their inputs with them."""


class _Written(dict[int, bool]):
    """By layer: is what it looks at in memory? Models set flags before they know; here the memory is asked."""

    def __init__(self, own: DecoderCache) -> None:
        super().__init__()
        self._own = own

    def __getitem__(self, layer: int) -> bool:
        return self._own.written

    def get(self, layer: int, default: Any = None) -> bool:
        return self._own.written


class CrossingCache(EncoderDecoderCache):
    """Both caches of a model with an encoder of its own, over one memory."""

    def __init__(self, own: DecoderCache) -> None:
        super().__init__(own, CrossCache(own))
        self.own = own
        self.is_updated: dict[int, bool] = _Written(own)

    @property
    def memory(self) -> Memory:
        return self.own.memory

    @property
    def rows(self) -> list[int]:
        return self.own.rows

    def check_dynamic_cache(self, method: str) -> None:
        """Both caches can do what transformers believes only its own can."""

    def check(self) -> None:
        """Assert what is always true between two forwards."""
        self.own.check()


def crossing(model: PreTrainedModel, *, cells: int, input_cells: int) -> CrossingCache | DecoderCache:
    """A cache for `model.generate`, with room for `cells` tokens and `input_cells` positions of inputs.

    Both are of all rows and beams together, where what is shared counts once. Raises `ModelRefused`.
    """
    has_encoder = bool(model.config.is_encoder_decoder)
    own, crossed = _with_encoder(model) if has_encoder else _interleaved(model)
    if not own or not crossed:
        raise ModelRefused(f"{type(model).__name__} keeps no keys and values of an encoder's output in its cache")
    if not has_encoder and min(crossed) < min(own):
        raise ModelRefused(f"{type(model).__name__} looks at an encoder's output before it has stored a token")
    dtype, device = str(model.dtype).removeprefix("torch."), model.device
    text = causal_shape(own, None, dtype=dtype, device=device.type).groups
    behind = 1 + max(own.keys() | crossed.keys())
    inputs = tuple(
        replace(group, name=f"input {i}", layout=Input(input_cells), layers=tuple(behind + at for at in group.layers))
        for i, group in enumerate(causal_shape(crossed, None, dtype=dtype, device=device.type).groups)
    )
    memory = Memory(
        text + inputs,
        cells=dict.fromkeys((g.name for g in text), cells) | dict.fromkeys((g.name for g in inputs), input_cells),
        dtype=model.dtype,
        device=device,
        backend=Sdpa(),
    )
    cache = DecoderCache(text, memory, {layer: behind + layer for layer in crossed})
    return CrossingCache(cache) if has_encoder else cache


# -- what a model stores, learned by watching one small forward -------------------------------------------------------


def _with_encoder(model: PreTrainedModel) -> tuple[Stored, Stored]:
    """What the decoder stores of its own tokens, and of the encoder's output."""
    own, cross = StoreProbe(), StoreProbe()
    size = model.get_encoder().config.hidden_size
    seen = torch.zeros(1, PROBE_TOKENS, size, dtype=model.dtype, device=model.device)
    caches = EncoderDecoderCache(GuestCache(own), GuestCache(cross))
    _run(model, encoder_outputs=BaseModelOutput(last_hidden_state=seen), decoder_input_ids=_ids(model), cache=caches)
    return own.stored, cross.stored


def _interleaved(model: PreTrainedModel) -> tuple[Stored, Stored]:
    """Layers that store only if there is something to look at look at it; the others store tokens."""
    if "cross_attention_states" not in inspect.signature(model.forward).parameters:
        return {}, {}
    without, both = StoreProbe(), StoreProbe()
    _run(model, input_ids=_ids(model), cache=GuestCache(without))
    size = model.config.get_text_config(decoder=True).hidden_size
    seen = torch.zeros(1, PROBE_TOKENS, size, dtype=model.dtype, device=model.device)
    _run(model, input_ids=_ids(model), cross_attention_states=seen, cache=GuestCache(both))
    return without.stored, {layer: held for layer, held in both.stored.items() if layer not in without.stored}


def _ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(PROBE_TOKENS, device=model.device)[None] % embedding_rows(model)


@torch.inference_mode()
def _run(model: PreTrainedModel, *, cache: Cache, **inputs: Any) -> None:
    model(**inputs, past_key_values=cache, use_cache=True)
