"""generation: caches for transformers' own `model.generate()` of models whose decoder attends to an encoder's output.
Other models have `kvcellar.attach`, whose keys depend on tokens alone.

    cache = cross_attention_cache(model, cells=4096, input_cells=3000)
    model.generate(**inputs, past_key_values=cache, use_cache=True)

The model is not changed: the loop, the masks and the attention are transformers'. Each row of the batch is a sequence;
a padding token takes a cell like any other, and the model's own masks hide it. Beams with a common past share cells.

The first forward computes the keys and values of its cross-attention, for each row of the batch. They are written into
the memory once, rows with the same input share their cells, and every later forward reads them there. Models with an
encoder of their own (BART, T5, Whisper) keep two caches, and number the layers of both from 0. Those whose
cross-attention layers stand between the others (Mllama) keep one.

Always true between two forwards:
  * `rows` names one sequence of memory for each row of the batch, all of the same length;
  * no step is open: a forward's step is committed when its last layer has stored, or abandoned by the next one;
  * either every row of the batch has its input in memory, or none has, and no input is pending: `is_updated`, which
    models read and set, is true exactly in the first case.
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

from kvcellar.engine.models.input_limits import embedding_rows
from kvcellar.engine.models.registered import GuestCache
from kvcellar.engine.models.shape import PROBE_TOKENS, StoreProbe, causal_shape
from kvcellar.errors import BadRequest, ModelRefused, NotSupported
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Input
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span

Stored = Mapping[int, tuple[Tensor, Tensor]]  # by layer: k [B,G,n,D] and v [B,G,n,Dv]


class DecoderCache(Cache):
    """The decoder's own keys and values and, in the same memory, those of its cross-attention.

    `cross_layers` maps the model's numbers of the cross-attention layers to the memory's.
    """

    def __init__(self, groups: tuple[Group, ...], memory: Memory, cross_layers: Mapping[int, int]) -> None:
        super().__init__(layers=[])
        self.memory = memory
        self.rows: list[int] = []
        self.cross_layers = dict(cross_layers)
        self.layers: list[Any] = [InputLayer(self, layer) for layer in range(max(cross_layers) + 1)]
        self._layers = frozenset(layer for group in groups for layer in group.layers)
        self._stored: set[int] = set()  # layers that have stored in the open step
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}  # computed by this forward and not yet written
        self._read: tuple[tuple[Any, ...], Tensor] | None = None  # the last result: models read each plane twice
        self._next = 1
        self._inputs = 0
        self._past = 0  # length of the rows before the last forward

    # -- called by models and by `generate` ----------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Store k [B,G,L,D] and v [B,G,L,Dv]; returns all K/V of every row, [B,G,N,D] and [B,G,N,Dv]."""
        if layer_idx in self.cross_layers and layer_idx not in self._layers:
            return self.update_input(key_states, value_states, layer_idx)
        if layer_idx not in self._layers:
            raise ModelRefused(f"layer {layer_idx} stores keys and values, and did not when the model was probed")
        if layer_idx in self._stored:  # the previous forward failed
            self._abandon()
        if not self._stored:
            self._begin(key_states.shape[0], key_states.shape[2])
        self._stored.add(layer_idx)  # before `put`: if that raises, the next forward abandons this step
        self.memory.put(layer_idx, _rows(key_states), _rows(value_states))
        held = self.memory.get(layer_idx).each_in_order()
        if self._stored == self._layers:
            self._end()
        keys, values = (torch.stack(planes).transpose(1, 2) for planes in zip(*held, strict=True))
        self._settle()
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.memory.length(self.rows[0]) if self.rows else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a fork of row `beam_idx[i]`, which copies no K/V."""
        self._become([self.rows[row] for row in beam_idx.tolist()])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._become([seq for seq in self.rows for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row."""
        length = self.get_seq_length()
        if not -length <= tokens_to_remove <= 0:
            raise BadRequest(f"crop({tokens_to_remove}) of {length} tokens; a number from {-length} to 0 is needed")
        for seq in self.rows:  # their layers are causal, so any end can be removed
            self.memory.remove(seq, Span(length + tokens_to_remove, length))

    def reset(self) -> None:
        """Drop all rows."""
        self.memory.clear()
        self.rows.clear()
        self._stored.clear()
        self._pending.clear()
        self._read = None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return bool(self.rows)

    @property
    def is_croppable(self) -> bool:
        return True

    def _recurrent(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupported("this cache does not support recurrent or convolution state")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _recurrent
    has_previous_state = update_indexer = _recurrent

    # -- internal -----------------------------------------------------------------------------------------------

    def _begin(self, rows: int, tokens: int) -> None:
        self._pending.clear()  # of a forward that failed
        if self.rows and rows != len(self.rows):
            raise BadRequest(
                f"the cache holds {len(self.rows)} rows and was given {rows}; reset() it for another batch"
            )
        past = self.get_seq_length()
        seqs = self.rows or [self.fresh() for _ in range(rows)]
        self.memory.begin(Batch(tuple(Feed(seq, Span(past, past + tokens)) for seq in seqs)))
        self.rows, self._past = seqs, past

    def _end(self) -> None:
        """Commit the step, all layers of which have stored, but not while the input of this forward is incomplete."""
        if self._pending.keys() in (set(), self.cross_layers.keys()):
            self.memory.commit()
            self._stored.clear()

    def _abandon(self) -> None:
        """Abandon the open step, and forget rows of which it was the first."""
        self.memory.abandon()
        self._stored.clear()
        self.rows = [seq for seq in self.rows if self.memory.has(seq)]

    def _become(self, sources: list[int]) -> None:
        """Replace row i by a fork of `sources[i]`. Every source is forked before any is dropped."""
        length = self.get_seq_length()
        fresh = [self.fresh() for _ in sources]
        for seq, source in zip(fresh, sources, strict=True):
            self.memory.fork(source, seq, length)
        for seq in self.rows:
            self.memory.drop(seq)
        self.rows = fresh

    def fresh(self) -> int:
        """The number of a new sequence."""
        self._next += 1
        return self._next

    def check(self) -> None:
        """Assert what is always true between two forwards."""
        self.memory.check()
        assert not self._stored, "a step is open"
        assert sorted(self.memory.sequences) == sorted(self.rows), "rows and sequences differ"
        assert len({self.memory.length(seq) for seq in self.rows}) <= 1, "rows of different lengths"
        assert not self._pending, f"the input of layers {sorted(self._pending)} was not written"
        assert len({self.memory.inputs.length(seq) for seq in self.rows}) <= 1, "inputs of different lengths"

    # -- the encoder's output -----------------------------------------------------------------------------------

    @property
    def has_input(self) -> bool:
        """Whether the rows have their inputs in memory."""
        return bool(self.rows) and self.memory.inputs.length(self.rows[0]) > 0

    def update_input(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take the cross-attention's k [B,G,n,D] and v [B,G,n,Dv] of one layer for the rows' inputs; returns both."""
        if layer not in self.cross_layers:
            raise ModelRefused(f"layer {layer} has cross-attention, and had none when the model was probed")
        if self.has_input:
            raise NotSupported("the rows already have an input: reset() the cache for another", self.get_seq_length())
        self._pending[layer] = (k, v)
        if self._stored == self._layers:
            self._end()
        self._settle()
        return k, v

    def read(self, layer: int, plane: str) -> Tensor:
        """[B,heads,n,size], as it was written."""
        key = (layer, plane, *self.rows)
        if self._read is None or self._read[0] != key:
            self._read = key, self.memory.inputs.read(self.cross_layers[layer], plane, self.rows).transpose(1, 2)
        return self._read[1]

    def _settle(self) -> None:
        """Write the pending input once all layers have it and the forward's step is closed: for all rows, or for none.

        If that fails, the tokens that this forward stored are removed.
        """
        if self._pending.keys() != self.cross_layers.keys() or self._stored:
            return
        pending, self._pending, self._read = self._pending, {}, None
        try:
            self._write(pending)
        except BaseException:
            self._cut_back()
            raise

    def _cut_back(self) -> None:
        """Cut the rows to their length before the last forward; drop them if it was their first."""
        if not self._past:
            self.reset()
        for seq in self.rows:
            self.memory.remove(seq, Span(self._past, self.memory.length(seq)))

    def _write(self, pending: Stored) -> None:
        """Each input is first written for a sequence of its own, so that no row gets one if another does not fit."""
        names = self._names(pending)
        sources: dict[str, int] = {}
        try:
            for row, name in enumerate(names):
                if name not in sources:
                    sources[name] = self.fresh()
                    planes = {
                        self.cross_layers[layer]: (k[row].transpose(0, 1), v[row].transpose(0, 1))
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
        """A name for every row's input; rows with equal inputs (beams, several completions) have the same."""
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


def _rows(x: Tensor) -> Tensor:
    """[B,G,L,D] -> [B*L,G,D], row after row."""
    return x.transpose(1, 2).flatten(0, 1)


class InputLayer:
    """`cache.layers[layer]` as models read it: the inputs of all rows for the cross-attention of that layer."""

    def __init__(self, own: DecoderCache, layer: int) -> None:
        self._own, self._layer = own, layer

    @property
    def is_initialized(self) -> bool:
        return self._layer in self._own.cross_layers and self._own.has_input

    @property
    def keys(self) -> Tensor:
        return self._own.read(self._layer, "k")

    @property
    def values(self) -> Tensor:
        return self._own.read(self._layer, "v")


class InputCache(Cache):
    """The second cache of a model with an encoder. Rows are reordered and dropped in the first, inputs with them."""

    def __init__(self, own: DecoderCache) -> None:
        super().__init__(layers=own.layers)
        self._own = own

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        return self._own.update_input(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._own.memory.inputs.length(self._own.rows[0]) if self._own.has_input else 0

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    reorder_cache = batch_select_indices = batch_repeat_interleave = reset = _nothing


class _IsUpdated(dict[int, bool]):
    """`is_updated` by layer. Models set it before the input is written, so what they set is ignored."""

    def __init__(self, own: DecoderCache) -> None:
        super().__init__()
        self._own = own

    def __getitem__(self, layer: int) -> bool:
        return self._own.has_input

    def get(self, layer: int, default: Any = None) -> bool:
        return self._own.has_input


class CrossAttentionCache(EncoderDecoderCache):
    """Both caches of a model with an encoder of its own, over one memory."""

    def __init__(self, own: DecoderCache) -> None:
        super().__init__(own, InputCache(own))
        self.own = own
        self.is_updated: dict[int, bool] = _IsUpdated(own)

    @property
    def memory(self) -> Memory:
        return self.own.memory

    @property
    def rows(self) -> list[int]:
        return self.own.rows

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing to check: transformers refuses some methods for caches that are not its own, and these have them."""

    def check(self) -> None:
        """Assert what is always true between two forwards."""
        self.own.check()


def cross_attention_cache(
    model: PreTrainedModel, *, cells: int, input_cells: int
) -> CrossAttentionCache | DecoderCache:
    """A cache for `model.generate`, with room for `cells` tokens and `input_cells` positions of inputs.

    Both are totals of all rows and beams, where shared cells count once. Raises `ModelRefused`.
    """
    has_encoder = bool(model.config.is_encoder_decoder)
    own, crossed = _with_encoder(model) if has_encoder else _interleaved(model)
    if not own or not crossed:
        raise ModelRefused(f"{type(model).__name__} keeps no keys and values of an encoder's output in its cache")
    if not has_encoder and min(crossed) < min(own):
        raise ModelRefused(f"{type(model).__name__} has cross-attention before it has stored a token")
    text, inputs = (_groups(model, stored) for stored in (own, crossed))
    offset = 1 + max(own.keys() | crossed.keys())  # the memory's numbers of cross-attention layers begin here
    inputs = tuple(
        replace(group, name=f"input {i}", layout=Input(input_cells), layers=tuple(offset + at for at in group.layers))
        for i, group in enumerate(inputs)
    )
    memory = Memory(
        text + inputs,
        cells=dict.fromkeys((g.name for g in text), cells) | dict.fromkeys((g.name for g in inputs), input_cells),
        dtype=model.dtype,
        device=model.device,
        backend=Sdpa(),
    )
    cache = DecoderCache(text, memory, {layer: offset + layer for layer in crossed})
    return CrossAttentionCache(cache) if has_encoder else cache


def _groups(model: PreTrainedModel, stored: Stored) -> tuple[Group, ...]:
    dtype = str(model.dtype).removeprefix("torch.")
    return causal_shape(stored, None, dtype=dtype, device=model.device.type).groups


# -- what a model stores, found by probing -----------------------------------------------------------------------------


def _with_encoder(model: PreTrainedModel) -> tuple[Stored, Stored]:
    """What the decoder stores of its own tokens, and of the encoder's output."""
    own, cross = StoreProbe(), StoreProbe()
    size = model.get_encoder().config.hidden_size
    output = torch.zeros(1, PROBE_TOKENS, size, dtype=model.dtype, device=model.device)
    caches = EncoderDecoderCache(GuestCache(own), GuestCache(cross))
    _run(model, encoder_outputs=BaseModelOutput(last_hidden_state=output), decoder_input_ids=_ids(model), cache=caches)
    return own.stored, cross.stored


def _interleaved(model: PreTrainedModel) -> tuple[Stored, Stored]:
    """Layers that store only if there is an encoder's output have cross-attention; the others store tokens."""
    if "cross_attention_states" not in inspect.signature(model.forward).parameters:
        return {}, {}
    without, both = StoreProbe(), StoreProbe()
    _run(model, input_ids=_ids(model), cache=GuestCache(without))
    size = model.config.get_text_config(decoder=True).hidden_size
    output = torch.zeros(1, PROBE_TOKENS, size, dtype=model.dtype, device=model.device)
    _run(model, input_ids=_ids(model), cross_attention_states=output, cache=GuestCache(both))
    return without.stored, {layer: held for layer, held in both.stored.items() if layer not in without.stored}


def _ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(PROBE_TOKENS, device=model.device)[None] % embedding_rows(model)


@torch.inference_mode()
def _run(model: PreTrainedModel, *, cache: Cache, **inputs: Any) -> None:
    model(**inputs, past_key_values=cache, use_cache=True)
