"""seam: run an unmodified transformers model on our memory, through a cache-shaped door and an attention function.

A forward takes all sequences of a step as one row `[1,T]` with explicit positions (*flat*). Each attention layer passes
its new keys and values to `FlatDoor.update`, which writes them, and then calls `FlatDoor.attend`, which reads:

    history.put({"k": k, "v": v})                # written here
    history.backend.attend(q, history, scoring)  # read here, from the cells, with no mask

A model whose attention cannot be flattened (its code depends on the order of keys, say) is run *solo*: one sequence per
forward, its cells gathered in order, with the model's own attention and masks.

Some models have their own class of cache layers, whose methods they call. DeepSeek-V4 keeps compressed entries there,
MiniMax-M3 the keys of its indexer. The content of such a layer is computed from one value per token, in order of
position. So these values are stored in cells, as planes beside keys and values, and in each forward an empty layer of
the model's own class gets those of all tokens and computes its content again. A sequence can be forked, cut and resumed
at any token, and no state is kept beside the cells. The cost is one more pass over the stored values per step.

What layers store of a token may be a latent, and a part of the key behind it (MLA). Where keys and values of heads are
linear in them, and the same matrices for all tokens, products with these can be moved, and nothing is expanded:

    key of head h    = A_h c, t          # c the latent, t the part that all heads share
    value of head h  = B_h c
    score            = q . key = (A_h^T q) . c + q' . t      # a query is multiplied once, however many tokens it sees
    result           = sum of w B_h c = B_h (sum of w c)     # so is its result

`latent_attention.py` finds the matrices, and proves that they are all there is.

The door of the running forward is in a context variable, since transformers calls registered functions only with the
module and its tensors. One forward at a time per thread.

Always true: between two forwards nothing is stored here; layers of a model's own class are used for one forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from kvcellar.engine.models.adapters.adapter_rows import AdapterRows
from kvcellar.engine.models.crossing import Seen, attend_images
from kvcellar.engine.models.mixers import Forward, Mixing, StateView
from kvcellar.engine.models.weights.scan import Call
from kvcellar.errors import ModelRefused
from kvcellar.kernels.layers import OwnHeads
from kvcellar.kernels.scans import ScanKernel
from kvcellar.memory.kv.history import LayerHistory
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan
from kvcellar.memory.shapes import Scoring


class Latent(nn.Module):
    """How one attention module attends to latents. It is a child of the module, so that recorded steps can name it."""

    def __init__(self, queries: OwnHeads, values: OwnHeads) -> None:
        """`queries` have a layer A_h^T for each head, and the part of a query for t as their tail; `values` B_h."""
        super().__init__()
        self.queries, self.values = queries, values

    def forward(self, q: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """q [1,T,H,D] -> [1,T,H,Dv]. `attend` is a backend's `attend_latent`."""
        return self.values(attend(self.queries(q)))


@dataclass(frozen=True, slots=True)
class Binding:
    """The layer whose cells an attention module reads. `direct`: it attends to the stored keys themselves.

    A module that is not direct (MLA) computes its keys from stored planes, so it gets all cells that its rows may see;
    unless it has `latent`, with which it attends to these planes.
    """

    layer: int
    direct: bool
    latent: Latent | None = None

    @property
    def expands(self) -> bool:
        """Whether keys are computed from stored planes in each step."""
        return not self.direct and self.latent is None


INDEX = "index"  # the plane of an indexer's keys
OWN = "its layers use a cache layer of their own class, which needs one sequence in order"


class Kept(Protocol):
    """What is kept of the tokens of one sequence: a door."""

    @property
    def before(self) -> Tensor:
        """Positions of the earlier tokens [past], or of several axes [axes,past]."""
        ...

    def keys(self, layer: int) -> Tensor:
        """Of all tokens [1,G,N,D], after those of the new ones were stored."""
        ...

    def update_plane(self, name: str, new: Tensor, layer: int) -> Tensor:
        """Store another plane [1,T,D] of the new tokens; returns that of all tokens [1,N,D]."""
        ...


class OwnLayer:
    """Wraps an empty cache layer of the model's own class (`fresh`): its methods get the values of all tokens."""

    def __init__(self, fresh: Any, layer: int, kept: Kept) -> None:
        self._fresh, self._layer, self._kept = fresh, layer, kept

    def _keep(self, name: str, new: Tensor) -> Tensor:
        return self._kept.update_plane(name, new, self._layer)

    @property
    def keys(self) -> Tensor:
        """GLM 5: the keys of all tokens [1,G,N,D]."""
        return self._kept.keys(self._layer)

    def get_seq_length(self) -> int:
        """GLM 5: the number of tokens, with the new ones."""
        return self.keys.shape[2]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Qwen 4: the positions of earlier tokens [3,1,past]; None: there are none."""
        before = self._kept.before
        return before.expand(3, -1)[:, None] if before.shape[-1] else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, _: Tensor | None) -> None:
        """Those of all tokens, which the next forward has from its door."""

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """DeepSeek-V4: kv and gate [1,T,D] of new tokens -> those of all complete windows, and the start of these."""
        kv, gate = (self._keep(f"{name} {what}", new) for what, new in (("kv", kv), ("gate", gate)))
        return self._fresh.store_compression_weights(name, kv, gate)

    def update_overlap_state(self, *args: Any) -> tuple[Tensor | None, Tensor | None]:
        """DeepSeek-V4: the overlap with the window before the first one, which is empty at position 0."""
        return self._fresh.update_overlap_state(*args)

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """DeepSeek-V4: the entries [1,n,D] of all complete windows."""
        return self._fresh.update_compressor_states(name, compressed)

    def update_index(self, keys: Tensor) -> Tensor:
        """MiniMax-M3: keys [1,1,T,D] of its indexer -> those of all tokens [1,1,N,D]."""
        return self._fresh.update_index(self._keep(INDEX, keys[:, 0])[:, None])

    def __getattr__(self, name: str) -> NoReturn:
        raise ModelRefused(f"layer {self._layer} uses {name} of a cache layer of its own class, which is not supported")


class OwnLayers:
    """The own layers of one forward, made on first use. `fresh(layer)` makes an empty one."""

    def __init__(self, fresh: Callable[[int], Any], kept: Kept) -> None:
        self._fresh, self._kept = fresh, kept
        self._made: dict[int, OwnLayer] = {}

    def of(self, layer: int) -> OwnLayer:
        if layer not in self._made:
            self._made[layer] = OwnLayer(self._fresh(layer), layer, self._kept)
        return self._made[layer]


STATELESS = "it keeps a recurrent state, and kept none when it was probed"
INDEXED = "it selects keys with an indexer of its own, which needs the keys of one sequence in order"

# Accepted arguments of an attention call besides q, k, v and the mask.
_READ = frozenset({"scaling", "softcap", "s_aux"})  # part of the scores
_HARMLESS = frozenset({  # without effect in inference, or contained in the plan
    "dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "past_key_values", "cache_position", "attention_mask",
    "head_mask", "cache",
})  # fmt: skip
_KNOWN = _READ | _HARMLESS

CACHES = ("cache", "past_key_values", "cache_params")  # names of the argument that is the cache
Extras = Mapping[str, Any]


class Door(ABC):
    """Handles the model's calls during one forward. A call that a door does not override is refused."""

    adapted: AdapterRows | None = None  # which rows have an adapter; None: none
    seen: Sequence[Seen] | None = None  # the images that rows see by cross-attention; None: no module does that

    @abstractmethod
    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        """Store new k [1,G,T,D] and v [1,G,T,Dv] of a layer; returns the k and v that its attention gets."""

    def update_plane(self, name: str, new: Tensor, layer: int) -> Tensor:
        """Store another plane [1,T,D] of the new tokens; returns that of all tokens [1,N,D]."""
        raise ModelRefused(INDEXED if name == INDEX else OWN)

    def own_layer(self, layer: int) -> OwnLayer:
        """The cache layer of the model's own class."""
        raise ModelRefused(OWN)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        """q [1,H,T,D] -> [1,T,H,Dv]. `extras` are the other arguments of the call (`scoring_of`)."""
        raise ModelRefused("a model that runs solo must use its own attention")

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        """The attention mask for the model."""
        raise ModelRefused("a model that runs solo must use its own masks")

    @abstractmethod
    def past_length(self, layer: int) -> int | Tensor:
        """The number of earlier tokens. The model adds a range over its rows to it."""

    def mask_sizes(self, q_length: int, layer: int) -> tuple[int, int]:
        """(length, offset) of the keys that a mask must cover."""
        return q_length, 0

    def state(self, layer: int, name: str) -> Tensor | None:
        """The state of a recurrent layer [B,*shape], which may be overwritten; None if there is none yet."""
        raise ModelRefused(STATELESS)

    def shift_in(self, new: Tensor, layer: int, name: str, kernel: int | None) -> Tensor:
        """Append inputs of a convolution, `new` [B,C,L], to those of its state [B,C,kernel]; returns both."""
        raise ModelRefused(STATELESS)

    def update_state(self, value: Tensor, layer: int, name: str) -> Tensor:
        """Store the new state of a recurrent layer [B,*shape]; returns it."""
        raise ModelRefused(STATELESS)

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Call a module that keeps a state."""
        return forward(*args, **kwargs)

    def scan(self, layer: int, call: Call) -> Any:
        """Run a scan of the mixer of `layer`."""
        raise ModelRefused(STATELESS)

    def convolve(self, kernel: ScanKernel, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """A causal convolution of x [B,C,L], by the kernel."""
        return kernel.convolve(x, weight, bias, silu=silu)


_door: ContextVar[Door | None] = ContextVar("kvcellar_door", default=None)
# The door of the forward that is running; None outside of one. No function of ours: every layer calls it.
current_door = _door.get


@contextmanager
def opened(door: Door) -> Iterator[None]:
    """Within the block, `door` handles the model's calls."""
    token = _door.set(door)
    try:
        yield
    finally:
        _door.reset(token)


def cache_argument(accepts: frozenset[str]) -> str:
    """The name of the cache among the arguments of a model's forward: transformers 5.24 has one for all."""
    return next((name for name in CACHES if name in accepts), "past_key_values")


def scoring_of(q: Tensor, extras: Extras) -> Scoring:
    """From the keyword arguments of an attention call. Raises `ModelRefused` for unknown ones."""
    unknown = {
        name for name, value in extras.items() if name not in _KNOWN and value is not None and value is not False
    }
    if unknown:
        raise ModelRefused(f"its attention is called with {sorted(unknown)}, which is not supported")
    scale = extras.get("scaling")
    softcap = extras.get("softcap")
    return Scoring(
        scale=float(scale) if scale is not None else q.shape[-1] ** -0.5,
        softcap=float(softcap) if softcap is not None else None,
        sinks=extras.get("s_aux"),
    )


class KnownScoring(NamedTuple):
    """Arguments of an attention module's call, and the scoring made from them."""

    scaling: Any
    softcap: Any
    sinks: Any
    scoring: Scoring


Scorings = dict[nn.Module, KnownScoring]  # by module, of its last call


class StepDoor(Door):
    """A forward of the open step: recurrent states are read and written in a `StateView`."""

    @abstractmethod
    def _view(self, layer: int) -> StateView:
        """The view of the running mixer, which `layer` belongs to."""

    def state(self, layer: int, name: str) -> Tensor | None:
        return self._view(layer).state(layer, name)

    def shift_in(self, new: Tensor, layer: int, name: str, kernel: int | None) -> Tensor:
        return self._view(layer).shift_in(new, layer, name)

    def update_state(self, value: Tensor, layer: int, name: str) -> Tensor:
        return self._view(layer).update(value, layer, name)

    def scan(self, layer: int, call: Call) -> Any:
        return self._view(layer).scan(layer, call)


class FlatDoor(StepDoor):
    """All sequences of the open step in one row. K/V are written and read here."""

    def __init__(
        self,
        memory: Memory,
        plan: Plan,
        past: int | Tensor,
        bindings: Mapping[nn.Module, Binding],
        scorings: Scorings | None = None,
    ) -> None:
        """`scorings` are those of earlier forwards."""
        self._layers, self._past, self._bindings = memory.layers, past, bindings
        self._scorings: Scorings = {} if scorings is None else scorings
        self._expanded = frozenset(b.layer for b in bindings.values() if not b.direct and b.latent is None)
        self._latent = frozenset(b.layer for b in bindings.values() if b.latent is not None)
        self._storing = None if plan.stored == plan.tokens else memory.tables.fill("storing rows", plan.storing)
        revertible = frozenset(feed.seq for feed in plan.feeds if feed.revertible)
        self.mixing = Mixing(memory, plan.states, plan.tokens, revertible)

    def history(self, layer: int) -> LayerHistory:
        """What a layer stores."""
        if layer not in self._layers:
            raise ModelRefused(f"layer {layer} stores keys and values, and did not when the model was probed")
        return self._layers[layer]

    def put(self, k: Tensor, v: Tensor, layer: int) -> None:
        if self._storing is not None:
            k, v = k.index_select(2, self._storing), v.index_select(2, self._storing)
        (self._layers.get(layer) or self.history(layer)).put({"k": k, "v": v})

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        if self.seen is not None and layer not in self._layers:
            return k, v  # of a state that is not read
        self.put(k, v, layer)
        if layer not in self._expanded:
            return (
                (k[:, :, :1], v[:, :, :1]) if layer in self._latent else (k, v)
            )  # nothing reads what is computed of it
        stored_k, stored_v, _ = self._layers[layer].dense()
        return stored_k.transpose(0, 1)[None].to(k.dtype), stored_v.transpose(0, 1)[None].to(v.dtype)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        binding, known = self._bindings.get(module), self._scorings.get(module)
        if binding is None and self.seen is not None:
            return attend_images(self.seen, module, q, v.shape[3], scoring_of(q, extras))
        if binding is None:
            raise ModelRefused(f"{type(module).__name__} attends, and did not when the model was probed")
        if (
            known is None
            or extras.get("s_aux") is not known.sinks
            or extras.get("scaling") != known.scaling
            or extras.get("softcap") != known.softcap
            or not extras.keys() <= _KNOWN
        ):
            scaling, softcap, sinks = extras.get("scaling"), extras.get("softcap"), extras.get("s_aux")
            known = self._scorings[module] = KnownScoring(scaling, softcap, sinks, scoring_of(q, extras))
        history, rows = self._layers[binding.layer], q.transpose(1, 2)  # [1,T,H,D]
        if binding.direct:
            return history.backend.attend(rows, history, known.scoring)
        if binding.latent is not None:
            return binding.latent(rows, lambda rows: history.backend.attend_latent(rows, history, known.scoring))
        k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)  # [N,G,D], [N,G,Dv]
        return history.backend.attend_dense(rows[0], k, v, history.step, known.scoring)[None]

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, 1, dtype=torch.bool, device=device)  # not read: the plan decides

    def past_length(self, layer: int) -> int | Tensor:
        return self._past

    def _view(self, layer: int) -> StateView:
        if self.mixing.view is None:
            raise ModelRefused(f"layer {layer} reads its state outside of its mixer, unlike when the model was probed")
        return self.mixing.view

    def mix(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        return self.mixing.mix(forward, args, kwargs, lambda: opened(self))


class SoloDoor(StepDoor):
    """One sequence in the open step, with the model's own attention, which gets all keys in order."""

    def __init__(
        self,
        memory: Memory,
        plan: Plan,
        fresh: Callable[[int], Any],
        before: Tensor | None = None,
        *,
        looks_ahead: bool = False,
    ) -> None:
        """`fresh` returns an empty cache layer of the model's own class, by index of the layer. `before` are the
        positions of the earlier tokens, if they are not those in the text. `looks_ahead`: what it has of masks is
        changed (`Vision.seeing`)."""
        if len(plan.feeds) != 1:
            raise ModelRefused(f"a model that runs solo was given {len(plan.feeds)} sequences in one forward")
        if plan.look_ahead and not looks_ahead:
            raise ModelRefused("a model that runs solo has its own masks, so none of its tokens can look ahead")
        if plan.stored < plan.tokens:
            raise ModelRefused("a model that runs solo attends to its new tokens, so none of them can be query-only")
        self._memory, self._past = memory, plan.feeds[0].pos.start
        self._states = StateView(memory.states, plan.states, plan.tokens, revertible=plan.feeds[0].revertible)
        self.before = torch.arange(self._past, device=memory.device) if before is None else before
        self._own_layers = OwnLayers(fresh, self)

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        self._memory.put(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
        keys, values = self._in_order(layer)
        return keys.to(k.dtype), values.to(v.dtype)

    def keys(self, layer: int) -> Tensor:
        return self._in_order(layer)[0]

    def _in_order(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._memory.get(layer).in_order()
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def update_plane(self, name: str, new: Tensor, layer: int) -> Tensor:
        self._memory.put(layer, **{name: new.transpose(0, 1)})
        (held,) = self._memory.get(layer).plane_in_order(name)
        return held.transpose(0, 1).to(new.dtype)

    def own_layer(self, layer: int) -> OwnLayer:
        return self._own_layers.of(layer)

    def past_length(self, layer: int) -> int:
        return self._past

    def mask_sizes(self, q_length: int, layer: int) -> tuple[int, int]:
        return self._past + q_length, 0

    def _view(self, layer: int) -> StateView:
        return self._states

    def state(self, layer: int, name: str) -> Tensor | None:
        return super().state(layer, name) if self._past else None

    def put(self) -> None:
        """Store the states after the forward."""
        self._states.put("a part of the tokens cannot be kept: this model runs solo, and has recurrent sums")
