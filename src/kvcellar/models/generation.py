"""generation: a cache for transformers' own `model.generate()` that keeps its K/V in a `Memory`.

    cache = GenerationCache.of(model, cells=4096)
    model.generate(ids, past_key_values=cache, use_cache=True)

The model is not changed: the loop, the masks and the attention are transformers'. Each row of the batch is a sequence;
a padding token takes a cell like any other, and the model's own masks hide it. Beams with a common past share cells.

Always true between two forwards:
  * `rows` names one sequence of memory for each row of the batch, all of the same length;
  * no step is open: a forward's step is committed when its last layer has stored, or abandoned by the next one.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcellar.attention.sdpa import Sdpa
from kvcellar.cache.memory import Group, Memory
from kvcellar.errors import BadRequest, ModelRefused, NotSupported
from kvcellar.models.shape import stored_shape
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span


class GenerationCache(Cache):
    """A cache for `model.generate` (greedy, sampling, beam search, assisted) that keeps K/V in `memory`."""

    def __init__(self, groups: tuple[Group, ...], memory: Memory) -> None:
        super().__init__(layers=[])
        self.memory = memory
        self.rows: list[int] = []
        self._layers = frozenset(layer for group in groups for layer in group.layers)
        self._stored: set[int] = set()  # layers that have stored in the open step
        self._next = 1

    @classmethod
    def of(cls, model: PreTrainedModel, *, cells: int) -> "GenerationCache":
        """For `model`, with room for `cells` tokens of all rows and beams together.

        Raises `ModelRefused` if the model stores nothing, or has recurrent layers, whose states it cannot keep.
        """
        shape = stored_shape(model)
        if shape.recurrent is not None:
            layers = sorted(shape.recurrent.layers)
            raise ModelRefused(
                f"{type(model).__name__} keeps recurrent or convolution state in layers {layers}, which this cache "
                f"does not support; an engine does"
            )
        device = model.device
        memory = Memory(
            shape.groups,
            cells={group.name: cells for group in shape.groups},
            dtype=model.dtype,
            device=device,
            backend=Sdpa(),
        )
        return cls(shape.groups, memory)

    # -- called by models and by `generate` ----------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Store k [B,G,L,D] and v [B,G,L,Dv]; returns all K/V of every row, [B,G,N,D] and [B,G,N,Dv]."""
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
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    @property
    def in_step(self) -> bool:
        """Whether some layers of a forward have stored and others have not."""
        return bool(self._stored)

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
        if self.rows and rows != len(self.rows):
            raise BadRequest(
                f"the cache holds {len(self.rows)} rows and was given {rows}; reset() it for another batch"
            )
        past = self.get_seq_length()
        seqs = self.rows or [self.fresh() for _ in range(rows)]
        self.memory.begin(Batch(tuple(Feed(seq, Span(past, past + tokens)) for seq in seqs)))
        self.rows = seqs

    def _end(self) -> None:
        """Commit the step: all layers have stored."""
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


def _rows(x: Tensor) -> Tensor:
    """[B,G,L,D] -> [B*L,G,D], row after row."""
    return x.transpose(1, 2).flatten(0, 1)
