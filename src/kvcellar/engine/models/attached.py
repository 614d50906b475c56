"""attached: a memory beside a network of transformers, which its own `generate` reads and fills.

    memory = kvcellar.attach(model)
    model.generate(**inputs, past_key_values=memory.cache())

The working buffer of a call is a cache of transformers: `MemoryCache` is a `DynamicCache`, so attention, masks, beams,
crops and rollbacks are those of transformers. Memory is read when a call begins (the longest beginning of the prompts
that earlier calls computed), and written when it ends. A cache is told which tokens its columns are by hooks on the
network, since layers only see keys and values.

On the network are two hooks and a `generate` of its own, all of them functions without state: they do nothing where no
`MemoryCache` is passed, and a copy of the network has them, too, without sharing anything with this one.

With a store, what is kept is written to a directory, and what memory lacks is read back, by the tiers of the engine; a
call waits for what it reads.

Always true between two calls:
  * the memory has no sequences, only what the prefix tree holds;
  * what the tree has was computed by the present weights, as far as torch counts their changes.
"""

import copy
import functools
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcellar.engine.arguments import namespace_name
from kvcellar.engine.models.attached_layers import Kept, fill, lengths, new_layers, store
from kvcellar.engine.models.input_limits import context_of
from kvcellar.engine.models.seam import CACHES, cache_argument
from kvcellar.errors import BadRequest, CacheFull, ModelRefused, shown
from kvcellar.events import Recall
from kvcellar.memory.cells.rows import NAME as ROWS
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.policy import EVERY
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.why import ReadBack
from kvcellar.memory.prefix_cache import PrefixCache
from kvcellar.memory.prefixes import Prefix
from kvcellar.memory.spans import Span
from kvcellar.memory.store import Store

STEP = 512  # tokens that are written to memory at once
log = logging.getLogger("kvcellar.engine")
ATTACHED = "_kvcellar_attached"  # an attribute: the id of the model that has a memory
LOOK = 0.1  # seconds between two looks at what is being read back, if nothing is reported
BEHIND = -1  # stands for a token behind a text, since the last token of a key is never restored
_GIVEN = frozenset(  # what may be a tensor, or have a length
    {
        "input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep", "cache_position",
        *CACHES,
    }
)  # fmt: skip


# Of some columns, [B,T] each: ids, whether they are tokens or padding, and positions.
Columns = tuple[Tensor, Tensor, Tensor]


class MemoryCache(DynamicCache):
    """The cache of one call, or of several that continue each other. `recalls` says for each row of the last prompts
    what was read from memory, and why not more."""

    def __init__(self, owner: "Attached", namespace: str = "") -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.owner, self.namespace = owner, namespace
        self.layers = new_layers(owner.model)
        self.recalls: tuple[Recall, ...] = ()
        self._empty()

    def _empty(self) -> None:
        self._log: list[Columns] = []
        self._real: Tensor | None = None  # [B,columns]: all flags of the log
        self._columns = self._kept = 0
        self._prompt = 0  # columns of the prompt of which a part was read
        self._running = False  # a forward has begun, and not ended
        self._parts: set[int] = set()  # columns where later prompts may part from this one
        self._weights: int | None = None  # those of the first forward, or of what was read

    # -- called by transformers ---------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        counts = any(isinstance(layer, DynamicLayer) for layer in self.layers)
        return super().get_seq_length(layer_idx) if counts else self._columns

    @property
    def is_compileable(self) -> bool:
        return False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]  # any tensor of integers
        if self._log:
            ids, real, places = (x.index_select(0, beam_idx.to(x.device)) for x in self._all())
            self._log, self._real, self._kept = [(ids, real, places)], real, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.rows).repeat_interleave(repeats))

    @property
    def rows(self) -> int:
        """Of the batch; 0 before the first."""
        return len(self._log[0][0]) if self._log else 0

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove and self._log:
            ids, real, places = (x[:, :tokens_to_remove] for x in self._all())
            self._log, self._real, self._columns = [(ids, real, places)], real, ids.shape[1]
            self._kept = min(self._kept, self._columns)

    def reset(self) -> None:
        layers = new_layers(self.owner.model)  # those of recurrent layers would keep the rows of their batch
        for layer, new in zip(self.layers, layers, strict=True):
            if getattr(layer, "record_past", False):  # assisted generation has asked for it
                new.record_past = True
        self.layers = layers
        self._empty()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemoryCache":
        return self.fork()

    def fork(self) -> "MemoryCache":
        """A cache with the same content, of the same memory."""
        twin = MemoryCache(self.owner, self.namespace)
        twin.layers, twin._log, twin._columns = copy.deepcopy(self.layers), list(self._log), self._columns
        twin._kept, twin._prompt, twin.recalls = self._kept, self._prompt, self.recalls
        twin._real, twin._weights = self._real, self._weights
        return twin

    # -- called by hooks ----------------------------------------------------------------------------------------

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Check the arguments of a forward, and cut what was read from memory off a prompt that still has it."""
        given = self.owner._named(model, args, kwargs)
        ids: Tensor = given["input_ids"]
        if (rows := self.rows or len(ids)) != len(ids):
            if len(ids) % rows:
                raise BadRequest(
                    f"the cache has {rows} rows and was given {len(ids)}; take a new one for another batch"
                )
            self.batch_repeat_interleave(len(ids) // rows)
        if self._prompt and self._columns and ids.shape[1] >= self._prompt:
            for name in ("input_ids", "position_ids"):
                if given.get(name) is not None and given[name].shape[-1] == ids.shape[1]:
                    given[name] = given[name][..., self._columns :]
        if self._columns and not self.owner.kept.groups:
            given["attention_mask"] = None  # it is for the columns, of which these layers have none
        if self._weights is None:
            self._weights = self.owner._versions()
        self._prompt, self._running = 0, True
        return (), given

    def _after_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the tokens of a forward that has ended."""
        given = self.owner._names_of(args) | kwargs
        ids, mask, places = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        real = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        if places is None:
            places = torch.arange(self._columns, self._columns + ids.shape[1], device=ids.device)[None]
        hidden = mask is not None and self._hides(mask)
        if hidden or real.dim() != 2 or places.dim() != 2:  # it is not known what was seen: no row of it is kept
            real = places = torch.zeros_like(ids)
        real = real.bool()
        self._log.append((ids, real, places.expand(ids.shape)))
        self._real = real if self._real is None else torch.cat([self._real, real], 1)
        self._columns += ids.shape[1]
        self._running = False

    def _hides(self, mask: Tensor) -> bool:
        """Whether a mask of all columns hides some of those before, or shows padding."""
        if self._real is None or mask.dim() != 2 or mask.shape[1] <= self._columns:
            return False
        return not torch.equal(mask[:, : self._columns].bool(), self._real)

    def _all(self) -> Columns:
        ids, real, places = (torch.cat(parts, 1) for parts in zip(*self._log, strict=True))
        return ids, real, places

    # -- memory -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self, ids: Tensor, mask: Tensor | None, *, copies: int = 1, compute: bool = True) -> None:
        """Read what memory has of prompts [B,L], unless the cache already has a beginning of them. With `compute`, and
        where later calls need a checkpoint or rows are equal, compute the prompts but for their last token."""
        if self._running or lengths(self.layers) - {self._columns}:  # a forward failed, some layers have its columns
            self.reset()
        ids = ids.to(device := self.owner.model.device)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(device).bool()
        if real.shape != ids.shape:
            return  # the rest of a text of which the cache has the beginning
        if self._columns and (self._weights != self.owner._follow_weights() or not self._begins(ids, real)):
            self.keep()
            self.reset()
        which, length = list(range(len(ids))), ids.shape[1]
        if not self._columns:  # rows that are equal are read and computed once
            rows: dict[tuple[Any, ...], int] = {}
            texts = zip(map(tuple, ids.tolist()), map(tuple, real.tolist()), strict=True)
            which = [rows.setdefault(text, len(rows)) for text in texts]
            first = torch.tensor([which.index(row) for row in range(len(rows))], device=device)
            ids, real = ids[first], real[first]
        starts = [_start(row) for row in real.tolist()]
        if not all(row[start:].all() for row, start in zip(real, starts, strict=True)):
            return  # padding behind a text, or inside: what a network makes of it depends on the network
        if not self._columns:
            self._read(ids, real, starts)
        elif self.rows != len(ids):
            return
        for end in self._ends(length, starts, copies > 1 or len(ids) < len(which)) if compute else ():
            self.owner._compute(self, ids[:, self._columns : end], real[:, :end])
            self.keep()
        if self._columns and len(ids) < len(which):
            self.reorder_cache(torch.tensor(which, device=device))
        self._prompt = length if compute else 0

    def _begins(self, ids: Tensor, real: Tensor) -> bool:
        """Whether the columns are the first of these, and not all."""
        if (n := self._columns) >= ids.shape[1] or len(ids) % self.rows:
            return False
        own, flags = (one.repeat_interleave(len(ids) // self.rows, 0) for one in self._all()[:2])
        given, tokens = ids[:, :n], real[:, :n]
        return bool((((own == given) | ~tokens) & (flags == tokens)).all())

    def _read(self, ids: Tensor, real: Tensor, starts: Sequence[int]) -> None:
        texts = [row[start:] for row, start in zip(ids.tolist(), starts, strict=True)]
        self._weights = self.owner._follow_weights()
        end, self.recalls, self._parts = self.owner._read(self.layers, texts, starts, self.namespace)
        if end:
            self._log, self._real = [(ids[:, :end], real[:, :end], _places(real)[:, :end])], real[:, :end]
            self._columns = self._kept = end

    def _ends(self, length: int, starts: Sequence[int], shared: bool) -> list[int]:
        """Where to compute up to before transformers does: every end is kept."""
        wanted = {length - 1} if shared or not self.owner.kept.anywhere else set[int]()
        if len(starts) == 1 and not self.owner.kept.anywhere:
            wanted |= self._parts
        return sorted(end for end in wanted if max(self._columns, *starts) < end < length)

    def _end(self) -> None:
        """Of a call of `generate`: what it has computed is kept."""
        self._prompt = 0
        self.keep()

    @torch.no_grad()
    def keep(self) -> int:
        """Give memory what was computed since the last time; returns the tokens that it did not have. Nothing is given
        of a forward that failed, of rows with holes or positions that are not those of a text, and of other weights."""
        if self._running or self._columns == self._kept or lengths(self.layers) - {self._columns}:
            return 0
        if self._weights != self.owner._follow_weights():
            return 0
        ids, real, places = (x.cpu() for x in self._all())
        new = 0
        for row, flags in enumerate(real.tolist()):
            start = _start(flags)
            text = ids[row, start:].tolist()
            counted = not self.owner.counts or places[row, start:].tolist() == [*range(len(text))]
            if text and counted and all(flags[start:]):
                new += self.owner._keep_row(self.layers, row, start, text, self.namespace)
        self._kept = self._columns
        return new


class Attached:
    """A memory beside `model`, made by `kvcellar.attach`. Not to be used by two threads at once."""

    def __init__(
        self, model: PreTrainedModel, kept: Kept, memory: Memory, open_store: Callable[..., Store | None] | None
    ) -> None:
        """`open_store` is an `OpenStore` that is given a `post`, for the weights as they are when it is called."""
        self.model, self.kept, self.memory = model, kept, memory
        self._posted = SimpleQueue[Callable[[], None]]()  # what the threads of the store have for this one
        self._open_store = partial(open_store, post=self._posted.put) if open_store is not None else None
        self._detached, self._epoch = False, 0  # how often it has begun
        self._tensors: list[weakref.ref[Tensor]] = []
        self._begin()
        accepts = inspect.signature(model.forward).parameters
        self._accepts, self._names = frozenset(accepts), tuple(accepts)
        self.counts = "position_ids" in accepts  # else its positions follow from the mask, or it has none
        self._context = context_of(model)
        self._place = model.device, model.dtype
        _strip(model)
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)
        vars(model)["generate"] = MethodType(generate, model)
        vars(model)[ATTACHED] = id(model)

    def cache(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *, namespace: str = ""
    ) -> MemoryCache:
        """A cache for `model.generate`, or for a loop of your own.

        `generate` reads memory itself. With `input_ids` [B,L] (and the mask of padding) it is read now, and the cache
        has the first `get_seq_length()` columns. Namespaces share nothing: name one for each adapter, say.
        """
        cache = MemoryCache(self, namespace_name(namespace))
        if input_ids is not None:
            cache._begin(input_ids, attention_mask, compute=False)
        return cache

    def clear(self) -> None:
        """Forget everything: after a change of weights by `.data`, which torch does not count. What a store has is read
        if the weights are those it was computed with."""
        self._close()
        self._begin()

    def detach(self) -> None:
        """Make the model what it was, and write to the store what is not written yet, in two seconds at most. Caches of
        this memory are of no use then."""
        if not self._detached:  # else another memory may be attached by now
            _strip(self.model)
            self._detached, self._open_store = True, None
            self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def check(self) -> None:
        """Assert what is always true between two calls."""
        self.prefixes.check(())
        assert not self.memory.sequences, "a sequence is left"

    # -- the store ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """With an empty tree, and then with a store, whose opening may be interrupted: the next call tries again."""
        self._weights, self._epoch = None, self._epoch + 1
        self.memory.claims.clear()
        self.prefixes = PrefixCache(self.memory, in_parts=False)
        if self._open_store is not None:
            self.prefixes = PrefixCache(self.memory, in_parts=False, open_store=self._open_store)
        self._weights = self._versions()

    def _close(self) -> None:
        if (store := self.prefixes.store) is not None:
            while (pause := store.flush()) is not None:
                time.sleep(pause)
            if left := store.unread:
                log.warning("%d tokens are not stored: writing them takes longer than two seconds", left)
            store.stop()
            store.close()

    def _read_back(self, namespace: str, keys: Sequence[bytes]) -> list[ReadBack]:
        """Wait until memory has what the store has of these texts, or cannot be had."""
        rows = {(row, 0): key for row, key in enumerate(keys)}
        try:
            for row, key in rows.items():
                self.prefixes.prefetch(row, namespace, partial(bytes, key))
            for row, key in rows.items():
                while self.prefixes.reads_back(row, partial(bytes, key), enters=True):
                    assert self.prefixes.store is not None
                    with suppress(Empty):
                        self._posted.get(timeout=min(LOOK, self.prefixes.store.restores.look_again() or LOOK))()
                    self.prefixes.store.restores.go_on()
            return [self.prefixes.was_read(row) for row in rows]
        finally:
            for row in rows:
                self.prefixes.cancel(row)

    def _write(self) -> None:
        """Read out of memory what the store is to have, as far as there is staging memory: its threads write it."""
        if (store := self.prefixes.store) is not None:
            with suppress(Empty):
                while True:
                    self._posted.get_nowait()()
            try:
                while store.pump():
                    pass
            except OSError as error:
                log.warning("what generate has computed is not stored: %s", error)

    # -- for caches ---------------------------------------------------------------------------------------------

    def _named(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward by name. Raises `BadRequest` for one whose columns are not tokens alone."""
        given = self._names_of(args) | kwargs
        self._check_given(model, given)
        if given.get("input_ids") is None:
            raise BadRequest(
                "a cache of an attached memory needs input_ids: use transformers' DynamicCache for embeddings"
            )
        return given

    def _check_given(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Raise `BadRequest` where keys and values would depend on more than tokens, or memory cannot take them."""
        if model is not self.model:
            raise BadRequest("this cache is of a memory that is attached to another model; attach() one to this model")
        _check_mode(model)
        if (model.device, model.dtype) != self._place:
            now, then = (" ".join(map(str, one)) for one in ((model.device, model.dtype), self._place))
            raise BadRequest(f"the model is {now} now, and was {then} when the memory was attached: attach() another")
        others = [
            name
            for name, value in given.items()
            if name not in _GIVEN
            and (isinstance(value, Tensor) or (isinstance(value, Collection) and value and not isinstance(value, str)))
        ]
        if others:
            raise BadRequest(
                f"what is computed with {' and '.join(others)} depends on more than tokens, so it is not shared: leave "
                f"it out, or use transformers' DynamicCache"
            )

    def _names_of(self, args: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._names, args, strict=False))

    def _compute(self, cache: MemoryCache, ids: Tensor, real: Tensor) -> None:
        """Forwards over the columns `ids` [B,T], the last of `real` [B,S]."""
        if cache.get_seq_length() and not self.kept.at_once and ids.shape[1] > 1:
            for at in range(ids.shape[1]):
                end = at + 1 - ids.shape[1]
                self._compute(cache, ids[:, at : at + 1], real[:, : end or None])
            return
        given: dict[str, Any] = {"input_ids": ids, "use_cache": True, cache_argument(self._accepts): cache}
        given["attention_mask"] = None if bool(real.all()) else real.long()
        if self.counts:
            given["position_ids"] = _places(real)[:, -ids.shape[1] :]
        if "logits_to_keep" in self._accepts:
            given["logits_to_keep"] = 1
        self.model(**given)

    def _read(
        self, layers: Sequence[Any], texts: Sequence[Sequence[int]], starts: Sequence[int], namespace: str
    ) -> tuple[int, tuple[Recall, ...], set[int]]:
        """Fill layers with the longest beginning that memory has of all rows of a batch. Returns the columns; why they
        are not more, for each row; and the columns where prompts part from what is known, or others like them have."""
        keys = [key_of(text) for text in texts]
        end, before = len(texts[0]) + starts[0] - 1, -1
        end = end if end < self._context else 0
        reads = self._read_back(namespace, keys)
        while max(starts) < end != before:  # until all rows can be resumed in the same column
            before, found = (
                end,
                (
                    start + self.prefixes.prefixes.reuse(namespace, key, end - start).resume
                    for key, start in zip(keys, starts, strict=True)
                ),
            )
            end = min(found)
        half = 0 if self.kept.at_once else (len(texts[0]) + starts[0]) // 2  # with less, reading takes longer
        enough = max(half, *starts)
        end = end if end > enough else 0
        places: list[Prefix] = []
        try:
            for key, start in zip(keys, starts, strict=True):
                places.append(self.prefixes.restore(namespace, key, most=max(0, end - start)))
                self.prefixes.prefixes.use(places[-1])
            if end:
                fill(layers, self.memory, [place.seq for place in places], starts, end)
            recalls = tuple(
                self.prefixes.prefixes.explain(one, read=read, owner="")
                for one, read in zip(places, reads, strict=True)
            )
        finally:
            for place in places:
                self.prefixes.end(place, (), keep=False)
        parts = {pos + start for one, start in zip(places, starts, strict=True) for pos in one.wanted if pos % EVERY}
        return end, recalls, parts

    def _keep_row(self, layers: Sequence[Any], row: int, start: int, text: Sequence[int], namespace: str) -> int:
        """Write a row that begins in column `start` to memory; returns the tokens that were not there. A text that does
        not fit, or exceeds the context, is not kept."""
        n = len(text)
        if n > self._context:
            return 0
        place, complete = self.prefixes.restore(namespace, key_of([*text, BEHIND]), most=n), False
        try:
            with suppress(CacheFull):
                for at in range(place.restored, n, STEP):
                    new = Span(at, min(n, at + STEP))
                    self._make_room(len(new))
                    with self.memory.stepping(Batch((Feed(place.seq, new),))) as plan:
                        store(layers, self.memory, plan, row, start, start + n)
                        self.memory.commit()
                complete = True
        finally:
            self.prefixes.end(place, text, keep=complete)
        self._write()
        return n - place.restored if complete else 0

    def _make_room(self, tokens: int) -> None:
        for name in self.memory.free():
            while (free := self.memory.free()[name]) < tokens:
                if not self.prefixes.evict(name, tokens - free):
                    raise CacheFull(name, tokens, free)
        if self.memory.rows.capacity is not None:
            if not self.prefixes.free_rows(1, lambda: self.prefixes.evict(None, 1)):
                raise CacheFull(ROWS, 1, 0, unit="rows")

    def _versions(self) -> int:
        """Changes with each update of a weight that torch counts, with `clear`, and where autocast computes in another
        type, or attention is another."""
        tensors = [*self.model.parameters(), *_state_buffers(self.model)]
        known = [ref() for ref in self._tensors]
        if len(known) != len(tensors) or any(one is not two for one, two in zip(known, tensors, strict=True)):
            self._tensors, self._epoch = [weakref.ref(one) for one in tensors], self._epoch + 1
        weights = tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in tensors)
        attention = self.model.config._attn_implementation
        return hash((weights, self._epoch, attention, autocast_of(self.model.device)))

    def _follow_weights(self) -> int:
        """The present weights; what was computed by others is forgotten."""
        if self._versions() != self._weights:
            self.clear()
        assert self._weights is not None
        return self._weights


def _state_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Buffers that are saved with the weights. Others follow from the config, and some change in each forward."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def autocast_of(device: torch.device) -> torch.dtype | None:
    """What autocast computes in there, if it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def check_attachable(model: Any) -> None:
    """Raise `ModelRefused` or `BadRequest`, with what to do."""
    if not isinstance(model, PreTrainedModel):
        raise BadRequest(f"attach() takes a PreTrainedModel, not {shown(model)}; of a PeftModel its get_base_model()")
    if model.config.is_encoder_decoder:
        raise ModelRefused(f"{type(model).__name__} has an encoder: `cross_attention_cache` is for it")
    network: Any = model  # whose mixin is not typed
    if not network._supports_default_dynamic_cache():
        raise ModelRefused(f"{type(model).__name__} keeps its state outside of transformers' caches")
    if "generate" in vars(model) and not _is_ours(vars(model)["generate"]):
        raise BadRequest("the model has a generate() of its own, which would not read a memory; take that off it")
    if vars(model).get(ATTACHED) == id(model):  # a copy has that of the other
        raise BadRequest("a memory is attached to this model already: detach() it, or use its cache()")
    if len(devices := sorted({str(p.device) for p in model.parameters()})) > 1:
        raise ModelRefused(f"its weights are on {' and '.join(devices)}; a memory is on one device")
    _check_mode(model)


def _places(real: Tensor) -> Tensor:
    """Positions, as `generate` counts them."""
    return (real.long().cumsum(-1) - 1).clamp(min=0)


def _start(real: Sequence[bool]) -> int:
    """The first column that is no padding."""
    return next((at for at, one in enumerate(real) if one), len(real))


def _check_mode(model: nn.Module) -> None:
    if model.training:
        raise BadRequest("the model is in training mode, where it computes other keys and values: call model.eval()")


# -- what a model gets: no state, so that it can be copied and pickled as before ---------------------------------------


def _strip(model: PreTrainedModel) -> None:
    """Take off what a memory has put on a model, or on the one that it is a copy of."""
    for hooks, own in ((model._forward_pre_hooks, _before), (model._forward_hooks, _after)):
        for key in [key for key, hook in hooks.items() if hook is own]:
            del hooks[key]
    if _is_ours(vars(model).get("generate")):
        del vars(model)["generate"]
    vars(model).pop(ATTACHED, None)


def _is_ours(method: Any) -> bool:
    return isinstance(method, MethodType) and method.__func__ is generate


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryCache | None:
    given = (*args, *map(kwargs.get, CACHES))
    return next((one for one in given if isinstance(one, MemoryCache)), None)


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = _cache_of(args, kwargs)
    return None if cache is None else cache._before_forward(model, args, kwargs)


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _cache_of(args, kwargs)) is not None:
        cache._after_forward(args, kwargs)


@functools.wraps(GenerationMixin.generate)  # pyright: ignore[reportAttributeAccessIssue]  # a mixin of models
def generate(self: Any, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
    plain: Any = type(self).generate
    cache = _cache_of((), kwargs)
    if cache is None:
        return plain(self, inputs, generation_config, *args, **kwargs)
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    forwarded = {name: one for name, one in kwargs.items() if name in cache.owner._accepts or isinstance(one, Tensor)}
    cache.owner._check_given(self, forwarded)
    if ids is not None:
        counts = (
            _setting(self, name, generation_config, kwargs) or 1 for name in ("num_beams", "num_return_sequences")
        )
        mask = kwargs.get("attention_mask")
        mask = _mask_of(self, ids, generation_config, kwargs) if mask is None else mask
        cache._begin(ids, mask, copies=max(counts))
    try:
        return plain(self, inputs, generation_config, *args, **{"use_cache": True, **kwargs})
    finally:
        cache._end()


def _setting(model: Any, name: str, config: Any, kwargs: dict[str, Any]) -> Any:
    """Of a call of `generate`: fields that a config leaves out are those of the model's."""
    found = (one for one in (kwargs.get(name), getattr(config, name, None)) if one is not None)
    return next(found, getattr(model.generation_config, name))


def _mask_of(model: Any, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The mask that transformers makes where none is given."""
    pad, ends = (_setting(model, name, config, kwargs) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or pad in (ends if isinstance(ends, list) else [ends]) or not bool((ids == pad).any()):
        return None
    return ids != pad
