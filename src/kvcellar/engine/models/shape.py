"""shape: the groups of a model and which module reads which layer, found by running a few tokens through it.

Doors record what the model stores, what it reads, and by which masks. The layout (causal, sliding, chunked) that a mask
rule of transformers implements is found by evaluating it at positions where a wrong candidate would differ, never as a
whole mask. No model name is used. A model whose calls fit no such description is refused, with the reason.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor, nn

from kvcellar.engine.models.input_limits import embedding_rows, first_position
from kvcellar.engine.models.seam import (
    Binding,
    Door,
    Extras,
    OwnLayer,
    OwnLayers,
    cache_argument,
    scoring_of,
)
from kvcellar.engine.models.weights.scan import Call
from kvcellar.errors import ModelRefused
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Group
from kvcellar.memory.shapes import AttentionSpec, Kind, Plane, Recurrent, Scoring, StatePlane, StoredAs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcellar.engine.models.registered import GuestCache

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # transformers' mask_function(batch, head, query, key)
KEYS_BEHIND = 2  # behind a query, at which its rule is evaluated


def recognise(rule: Rule, local_size: int | None, context: int, device: torch.device) -> Layout:
    """The layout that equals `rule` at every tested position. Raises `ModelRefused` if there is none."""
    candidates: list[Layout] = [Causal()]
    if local_size:
        candidates += [Sliding(local_size), Chunked(local_size)]
    left = candidates
    zero = torch.zeros((), dtype=torch.long, device=device)
    for pos in _positions(local_size, context):
        keys = _keys(pos, candidates)
        visible = rule(zero, zero, torch.tensor(pos, device=device), torch.tensor(keys, device=device))
        seen = torch.as_tensor(visible, device=device).expand(len(keys)).tolist()
        left = [layout for layout in left if seen == [layout.lowest(pos) <= key <= pos for key in keys]]
        if not left:
            shown = [key for key, yes in zip(keys, seen, strict=True) if yes]
            raise ModelRefused(
                "one of its attention masks is neither causal, nor sliding, nor chunked: "
                f"with a local size of {local_size}, position {pos} sees {shown[:8]}{' ...' if len(shown) > 8 else ''}"
            )
    return left[0]


def _positions(local_size: int | None, context: int) -> list[int]:
    """Where candidates differ: the first positions, around multiples of the local size, powers of two, the last."""
    tested = set(range(16)) | {2**i for i in range(4, 24)} | {context - 1}
    if local_size:
        tested |= {m * local_size + d for m in (1, 2, 3) for d in (-2, -1, 0, 1)}
    return sorted(pos for pos in tested if 0 <= pos < context)


def _keys(pos: int, candidates: list[Layout]) -> list[int]:
    """Every key if there are few; else the first, the last, those around each candidate's limit, and some between."""
    if pos < 1024:
        return list(range(pos + 1 + KEYS_BEHIND))
    tested = {*range(64), *range(pos - 256, pos + 1 + KEYS_BEHIND), *(pos * i // 64 for i in range(64))}
    for layout in candidates:
        tested |= {layout.lowest(pos) + d for d in (-2, -1, 0, 1)}
    return sorted(key for key in tested if key >= 0)


PROBE_TOKENS = 5
_SAME = 1e-3  # of the largest element: tolerance for the same row in two probes


@dataclass(slots=True)
class Read:
    """One attention call: q [1,H,T,D], and what is known about it."""

    q: Tensor
    binding: Binding
    layout: Layout
    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scoring: Scoring


class StoreProbe(Door):
    """Records what a forward of one fresh sequence stores; the model uses its own attention. Logits are not used."""

    def __init__(self, past: int | Tensor = 0, fresh: Callable[[int], Any] | None = None) -> None:
        """`past`: the number of earlier tokens, as reported to the model. `fresh` makes cache layers of the model's own
        class; None refuses them."""
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, k [1,G,T,D] and v [1,G,T,Dv]
        self.planes: dict[int, dict[str, Tensor]] = {}  # by layer and name, [1,T,D] beside k and v
        self.states: dict[tuple[int, str], StatePlane] = {}  # by layer and name
        self.mixers: dict[nn.Module, None] = {}  # the modules that read or stored a state
        self.running: list[nn.Module] = []  # modules whose forward has begun, the innermost last
        self._past, self.before = past, torch.zeros(0, dtype=torch.long)
        self._own = OwnLayers(fresh, self) if fresh is not None else None

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        if layer in self.stored:
            raise ModelRefused(f"layer {layer} stores keys and values twice in one forward")
        if k.dim() != 4 or k.shape[0] != 1 or k.shape[2] != PROBE_TOKENS or v.shape[:3] != (1, v.shape[1], k.shape[2]):
            raise ModelRefused(f"layer {layer} stores keys of shape {tuple(k.shape)}, values {tuple(v.shape)}")
        self.stored[layer] = k, v
        return k, v

    def update_plane(self, name: str, new: Tensor, layer: int) -> Tensor:
        if self._own is None:
            return super().update_plane(name, new, layer)
        planes = self.planes.setdefault(layer, {})
        if name in planes:
            raise ModelRefused(f"layer {layer} stores {name} twice in one forward")
        if new.dim() != 3 or new.shape[:2] != (1, PROBE_TOKENS):
            raise ModelRefused(f"layer {layer} stores {name} of shape {tuple(new.shape)}")
        planes[name] = new
        return new

    def keys(self, layer: int) -> Tensor:
        return self.stored[layer][0]

    def own_layer(self, layer: int) -> OwnLayer:
        return super().own_layer(layer) if self._own is None else self._own.of(layer)

    def past_length(self, layer: int) -> int | Tensor:
        return self._past

    def state(self, layer: int, name: str) -> Tensor | None:
        self.mixers[self.running[-1]] = None
        return None

    def shift_in(self, new: Tensor, layer: int, name: str, kernel: int | None) -> Tensor:
        kernel = new.shape[-1] if kernel is None else kernel
        self._record_state(layer, name, (new.shape[1], kernel), new.dtype)
        return torch.cat([new.new_zeros(*new.shape[:-1], kernel), new], -1)

    def update_state(self, value: Tensor, layer: int, name: str) -> Tensor:
        # Recurrent sums are stored in at least 32 bits: in fewer, small terms added to a large sum are lost.
        self._record_state(layer, name, tuple(value.shape[1:]), torch.promote_types(value.dtype, torch.float32))
        return value

    def scan(self, layer: int, call: Call) -> Any:
        return call.run()

    def _record_state(self, layer: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if (layer, name) in self.states:
            raise ModelRefused(f"layer {layer} stores its state {name} twice in one forward")
        self.mixers[self.running[-1]] = None
        kind = str(dtype).removeprefix("torch.")
        if kind not in get_args(Kind):
            raise ModelRefused(f"layer {layer} keeps a state {name} of {dtype}, which is no float")
        self.states[layer, name] = StatePlane(name, shape, cast(Kind, kind))

    @property
    def recurrent(self) -> Recurrent | None:
        """All states that were stored."""
        layers: dict[int, tuple[StatePlane, ...]] = {}
        for (layer, _), plane in sorted(self.states.items()):
            layers[layer] = (*layers.get(layer, ()), plane)
        return Recurrent(layers) if layers else None


class ProbeDoor(StoreProbe):
    """Records also which layer each attention call reads, and with which layout."""

    def __init__(self, context: int, past: int | Tensor = 0) -> None:
        super().__init__(past)
        self.reads: dict[nn.Module, Read] = {}
        self.crossing: set[nn.Module] = set()  # attend to an image that no token sees (`with_no_image`)
        self._context = context
        self._masks: list[tuple[Tensor, Rule, int | None]] = []
        self._layouts: dict[int, Layout] = {}  # by index of their mask

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        if module in self.reads:
            raise ModelRefused(f"{type(module).__name__} attends twice in one forward")
        if k.shape[2] == 1 < q.shape[2]:
            self.crossing.add(module)
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        binding, layout = self._binding(module, k, v), self._layout(module, mask)
        self.reads[module] = Read(
            q, binding, layout, q.shape[1], k.shape[1], q.shape[3], v.shape[3], scoring_of(q, extras)
        )
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def mask_sizes(self, q_length: int, layer: int) -> tuple[int, int]:
        return self._context + KEYS_BEHIND, 0  # some rules are tables of so many positions

    def mask(self, rule: Rule, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        mask = torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device)
        self._masks.append((mask, rule, local_size))
        return mask

    def _binding(self, module: nn.Module, k: Tensor, v: Tensor) -> Binding:
        for layer, (stored_k, stored_v) in self.stored.items():
            if stored_k is k and stored_v is v:
                return Binding(layer, direct=True)
        if not self.stored:
            raise ModelRefused(f"{type(module).__name__} attends to keys that were never stored")
        return Binding(next(reversed(self.stored)), direct=False)

    def _layout(self, module: nn.Module, mask: Any) -> Layout:
        """That of the rule behind this mask: the tensor that `mask` returned, or a slice of it, still all True."""
        place = mask.untyped_storage().data_ptr() if isinstance(mask, Tensor) else None
        found = [i for i, (own, *_) in enumerate(self._masks) if own.untyped_storage().data_ptr() == place]
        if not found or not bool(mask.all()):
            raise ModelRefused(f"{type(module).__name__} attends with a mask that the model made or changed by itself")
        index = found[0]
        if index not in self._layouts:  # only for masks that are read: some models make one that no layer uses
            _, rule, local_size = self._masks[index]
            self._layouts[index] = recognise(rule, local_size, self._context, mask.device)
        return self._layouts[index]


@torch.inference_mode()
def probe(model: "PreTrainedModel", door: StoreProbe, positions: Sequence[int]) -> None:
    """A forward over `PROBE_TOKENS` tokens at these positions, recorded by `door`."""
    ids = (torch.arange(PROBE_TOKENS, device=model.device)[None] + first_position(model)) % embedding_rows(model)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    accepts = frozenset(inspect.signature(model.forward).parameters)
    if "position_ids" in accepts:
        inputs["position_ids"] = torch.tensor(positions, device=model.device)[None] + first_position(model)
    with recording(model, door) as cache:
        model(**inputs, **{cache_argument(accepts): cache})


@contextmanager
def recording(network: nn.Module, door: StoreProbe) -> Iterator["GuestCache"]:
    """Within the block, `door` records what modules of `network` do; yields the cache to pass to them."""
    hooks = [
        hook
        for module in network.modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, _: door.running.append(module)),
            module.register_forward_hook(lambda *_: [door.running.pop()] and None, always_call=True),
        )
    ]
    try:
        from kvcellar.engine.models.registered import opened_cache  # imports transformers

        with opened_cache(door) as cache:
            yield cache
    finally:
        for hook in hooks:
            hook.remove()


def differing(near: ProbeDoor, far: ProbeDoor, rows: int) -> str | None:
    """What the first `rows` rows, equal in two probes, stored or queried differently; None if there is nothing."""
    for layer, stored in near.stored.items():
        for what, a, b in zip(("keys", "values"), stored, far.stored[layer], strict=True):
            if not _same(a[:, :, :rows], b[:, :, :rows]):
                return f"the {what} that layer {layer} stores for a token depend on how far other tokens are"
    for module, read in near.reads.items():
        if not _same(read.q[:, :, :rows], far.reads[module].q[:, :, :rows]):
            return f"the query of {type(module).__name__} for a token depends on how far other tokens are"
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _SAME * a.abs().max().clamp(min=1))


_NOTHING_STORED = "its forward stores nothing through the cache, so there is nothing to remember"


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups of a model, what each needs of a backend, and which module reads which layer's cells."""

    groups: tuple[Group, ...]
    specs: Mapping[str, AttentionSpec]  # by group name
    bindings: Mapping[nn.Module, Binding]
    recurrent: Recurrent | None = None
    mixers: tuple[nn.Module, ...] = ()  # the modules that keep a state
    crossing: frozenset[nn.Module] = frozenset()  # the modules that attend to images in every forward

    def storing(self, stored: StoredAs) -> "Shape":
        """The same shape, with its planes stored as `stored`."""
        groups = tuple(
            replace(group, planes=tuple(replace(plane, storage=stored.of(plane.name)) for plane in group.planes))
            for group in self.groups
        )
        return replace(self, groups=groups, specs={n: replace(spec, stored=stored) for n, spec in self.specs.items()})

    def ahead_in_windows(self) -> "Shape":
        """The same shape; only layers with windows or chunks look ahead."""
        return replace(self, groups=tuple(replace(group, looks_ahead=group.bounded) for group in self.groups))

    def bytes_per_cell(self, itemsize: int) -> dict[str, int]:
        return {group.name: group.bytes_per_cell(itemsize) for group in self.groups}


def shape_of(door: ProbeDoor, *, dtype: str, device: str) -> Shape:
    """For a model that runs flat: layers with the same layout and planes, read alike, are one group.

    Raises `ModelRefused` if a layer is read in two ways or not at all.
    """
    if (not door.stored or not door.reads) and not door.states:
        raise ModelRefused(_NOTHING_STORED)
    buckets: dict[tuple[Any, ...], list[int]] = {}
    for layer, read in _read_by_layer(door).items():
        k, v = door.stored[layer]
        planes = (Plane("k", k.shape[1], k.shape[3]), Plane("v", v.shape[1], v.shape[3]))
        heads = (read.query_heads, read.kv_heads, read.key_size, read.value_size)
        extras = (read.scoring.softcap is not None, read.scoring.sinks is not None)
        buckets.setdefault((read.layout, planes, heads, extras), []).append(layer)
    groups: list[Group] = []
    specs: dict[str, AttentionSpec] = {}
    for (layout, planes, heads, (softcap, sinks)), layers in buckets.items():
        name = str(layout) if str(layout) not in specs else f"{layout} #{len(groups)}"
        groups.append(Group(name, layout, planes, tuple(sorted(layers))))
        specs[name] = AttentionSpec(*heads, dtype=dtype, device=device, softcap=softcap, sinks=sinks)
    bindings = {module: read.binding for module, read in door.reads.items()}
    return Shape(tuple(groups), specs, bindings, door.recurrent, tuple(door.mixers), frozenset(door.crossing))


def _read_by_layer(door: ProbeDoor) -> dict[int, Read]:
    """The first read of each stored layer, in the order in which they were stored; all of them have one layout."""
    first: dict[int, Read] = {}
    for module, read in door.reads.items():
        layer = read.binding.layer
        if first.setdefault(layer, read).layout != read.layout:
            raise ModelRefused(
                f"layer {layer} is read as {first[layer].layout} and, by {type(module).__name__}, as {read.layout}"
            )
    if unread := sorted(set(door.stored) - set(first)):
        raise ModelRefused(f"layers {unread} store keys that no attention call was seen to read")
    return {layer: first[layer] for layer in door.stored}


def stored_shape(model: "PreTrainedModel", *, fresh: Callable[[int], Any] | None) -> Shape:
    """For a model that runs solo: what it stores in a small forward with its own attention. Raises `ModelRefused`.

    Layers that store more of a token than keys and values (an indexer's keys, say) are refused, unless `fresh` makes
    cache layers of the model's own class.
    """
    door = StoreProbe(fresh=fresh)
    probe(model, door, range(PROBE_TOKENS))
    if not door.stored and not door.states:
        raise ModelRefused(_NOTHING_STORED)
    dtype = str(model.dtype).removeprefix("torch.")
    return causal_shape(door.stored, door.recurrent, beside=door.planes, dtype=dtype, device=model.device.type)


def causal_shape(
    stored: Mapping[int, tuple[Tensor, Tensor]],
    recurrent: Recurrent | None,
    *,
    beside: Mapping[int, Mapping[str, Tensor]] | None = None,
    dtype: str,
    device: str,
) -> Shape:
    """Every layer keeps everything, and the model's own masks hide what they must.

    `beside` has what layers store of each token [1,T,D] beside k and v: the keys of an indexer, say. Each is a plane.
    """
    beside = beside or {}
    if strays := sorted(beside.keys() - stored.keys()):
        names = sorted({name for layer in strays for name in beside[layer]})
        raise ModelRefused(f"layers {strays} store {names}, and no keys and values beside them")
    buckets: dict[tuple[Plane, ...], list[int]] = {}
    for layer, (k, v) in stored.items():
        planes = [Plane("k", k.shape[1], k.shape[3]), Plane("v", v.shape[1], v.shape[3])]
        planes += [Plane(name, 1, values.shape[2]) for name, values in beside.get(layer, {}).items()]
        buckets.setdefault(tuple(planes), []).append(layer)
    groups = tuple(
        Group(f"solo #{i}" if i else "solo", Causal(), planes, tuple(sorted(layers)))
        for i, (planes, layers) in enumerate(buckets.items())
    )
    specs = {
        g.name: AttentionSpec(g.planes[0].heads, g.planes[0].heads, g.planes[0].size, g.planes[1].size, dtype, device)
        for g in groups
    }
    return Shape(groups, specs, {}, recurrent)
