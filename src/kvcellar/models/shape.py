"""shape: what a model stores and who reads it, learned by watching one small forward. No model name is looked at.

The probe runs a few tokens through the network with doors that record: every call that stores K/V, every attention
call, and the rule of every mask. A rule is asked about positions until it is known to be causal, sliding or chunked; a
model that we cannot describe so is refused, with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from kvcellar.cache.layouts import Causal, Chunked, Sliding
from kvcellar.cache.memory import Group
from kvcellar.errors import ModelRefused
from kvcellar.layout import Layout
from kvcellar.models.own_layers import OwnLayer, OwnLayers
from kvcellar.models.scan import Call
from kvcellar.models.seam import Binding, Door
from kvcellar.shapes import AttentionSpec, Kind, Plane, Recurrent, Scoring, StatePlane, StoredAs

PROBE_TOKENS = 5

SAME = 1e-3  # of the largest element: what the same row may differ by from one probe to the next

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # transformers' mask_function(batch, head, query, key)


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups of a model, what each asks of a backend, and which module reads which layer's cells."""

    groups: tuple[Group, ...]
    asks: Mapping[str, AttentionSpec]  # by group name
    bindings: Mapping[nn.Module, Binding]
    recurrent: Recurrent | None = None
    mixers: tuple[nn.Module, ...] = ()  # the modules that keep a state

    def storing(self, stored: StoredAs) -> "Shape":
        """The same shape, its planes stored otherwise."""
        groups = tuple(
            replace(group, planes=tuple(replace(plane, storage=stored.of(plane.name)) for plane in group.planes))
            for group in self.groups
        )
        return replace(self, groups=groups, asks={n: replace(ask, stored=stored) for n, ask in self.asks.items()})

    def bytes_per_cell(self, itemsize: int) -> dict[str, int]:
        return {group.name: group.bytes_per_cell(itemsize) for group in self.groups}


@dataclass(slots=True)
class _Read:
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
    """Records what a forward of one fresh sequence stores; the model attends by itself. The output means nothing."""

    def __init__(self, past: int | Tensor = 0, fresh: Callable[[int], Any] | None = None) -> None:
        """`past`: how many tokens came before, as far as the model knows. `fresh` makes cache layers of the model's own
        class; None refuses them."""
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, k [1,G,T,D] and v [1,G,T,Dv]
        self.planes: dict[int, dict[str, Tensor]] = {}  # by layer and name, [1,T,D] beside k and v
        self.states: dict[tuple[int, str], StatePlane] = {}  # by layer and name
        self.mixers: dict[nn.Module, None] = {}  # the modules that asked for a state
        self.running: list[nn.Module] = []  # modules whose forward has begun, the innermost last
        self._past = past
        self._own = OwnLayers(fresh, self.update_plane) if fresh is not None else None

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
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

    def own_layer(self, layer: int) -> OwnLayer:
        return super().own_layer(layer) if self._own is None else self._own.of(layer)

    def seen(self, layer: int) -> int | Tensor:
        return self._past

    def state(self, layer: int, name: str) -> Tensor | None:
        self.mixers[self.running[-1]] = None
        return None

    def shift_in(self, new: Tensor, layer: int, name: str, kernel: int | None) -> Tensor:
        kernel = new.shape[-1] if kernel is None else kernel
        self._remembers(layer, name, (new.shape[1], kernel), new.dtype)
        return torch.cat([new.new_zeros(*new.shape[:-1], kernel), new], -1)

    def update_state(self, value: Tensor, layer: int, name: str) -> Tensor:
        # Sums are kept in at least 32 bits: what is added to them becomes ever smaller beside them.
        self._remembers(layer, name, tuple(value.shape[1:]), torch.promote_types(value.dtype, torch.float32))
        return value

    def scan(self, layer: int, call: Call) -> Any:
        return call.made()

    def _remembers(self, layer: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
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
    """Records also which layer each attention call reads, by which rule."""

    def __init__(self, context: int, past: int | Tensor = 0) -> None:
        super().__init__(past)
        self.reads: dict[nn.Module, _Read] = {}
        self._context = context
        self._masks: list[tuple[Tensor, Rule, int | None]] = []
        self._layouts: dict[int, Layout] = {}  # by index of their mask

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scoring: Scoring) -> Tensor:
        if module in self.reads:
            raise ModelRefused(f"{type(module).__name__} attends twice in one forward")
        self.reads[module] = _Read(
            q,
            self._binding(module, k, v),
            self._layout(module, mask),
            q.shape[1],
            k.shape[1],
            q.shape[3],
            v.shape[3],
            scoring,
        )
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def mask(self, rule: Rule, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        made = torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device)
        self._masks.append((made, rule, local_size))
        return made

    def _binding(self, module: nn.Module, k: Tensor, v: Tensor) -> Binding:
        for layer, (stored_k, stored_v) in self.stored.items():
            if stored_k is k and stored_v is v:
                return Binding(layer, direct=True)
        if not self.stored:
            raise ModelRefused(f"{type(module).__name__} attends to keys that were never stored")
        return Binding(next(reversed(self.stored)), direct=False)

    def _layout(self, module: nn.Module, mask: Any) -> Layout:
        """Of the rule whose mask this is: the very tensor that `mask` returned, or a slice of it, still all True."""
        found = [i for i, (made, *_) in enumerate(self._masks) if isinstance(mask, Tensor) and _of_one(made, mask)]
        if not found or not bool(mask.all()):
            raise ModelRefused(f"{type(module).__name__} attends with a mask that the model made or changed by itself")
        index = found[0]
        if index not in self._layouts:  # asked only for masks that are read: some models make one that no layer uses
            _, rule, local_size = self._masks[index]
            self._layouts[index] = recognise(rule, local_size, self._context, mask.device)
        return self._layouts[index]


def _of_one(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def differing(near: ProbeDoor, far: ProbeDoor, rows: int) -> str | None:
    """Why the first `rows` rows, the same in two probes, did not store or ask the same in both; None if they did."""
    for layer, stored in near.stored.items():
        for what, a, b in zip(("keys", "values"), stored, far.stored[layer], strict=True):
            if not _same(a[:, :, :rows], b[:, :, :rows]):
                return f"the {what} that layer {layer} stores for a token depend on how far other tokens are"
    for module, read in near.reads.items():
        if not _same(read.q[:, :, :rows], far.reads[module].q[:, :, :rows]):
            return f"what {type(module).__name__} asks for a token depends on how far other tokens are"
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= SAME * a.abs().max().clamp(min=1))


def recognise(rule: Rule, local_size: int | None, context: int, device: torch.device) -> Layout:
    """The layout that shows and hides what `rule` does, wherever we ask. Raises `ModelRefused` if none does."""
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
    """Where a wrong guess would show: the first positions, around multiples of the local size, powers of two."""
    asked = set(range(16)) | {2**i for i in range(4, 24)} | {context - 1}
    if local_size:
        asked |= {m * local_size + d for m in (1, 2, 3) for d in (-2, -1, 0, 1)}
    return sorted(pos for pos in asked if 0 <= pos < context)


def _keys(pos: int, candidates: list[Layout]) -> list[int]:
    """Every key if there are few; else the first, the last, those around what a candidate sees, and some between."""
    if pos < 1024:
        return list(range(pos + 3))
    asked = {*range(64), *range(pos - 256, pos + 3), *(pos * i // 64 for i in range(64))}
    for layout in candidates:
        asked |= {layout.lowest(pos) + d for d in (-2, -1, 0, 1)}
    return sorted(key for key in asked if key >= 0)


def describe(door: ProbeDoor, *, dtype: str, device: str) -> Shape:
    """Put layers that share a layout and a shape into groups. Raises `ModelRefused` if a layer is read in two ways."""
    if (not door.stored or not door.reads) and not door.states:
        raise ModelRefused("its forward stores nothing through the cache, so there is nothing to remember")
    layouts: dict[int, Layout] = {}
    by_layer: dict[int, _Read] = {}
    for module, read in door.reads.items():
        layer = read.binding.layer
        if layouts.setdefault(layer, read.layout) != read.layout:
            raise ModelRefused(
                f"layer {layer} is read as {layouts[layer]} and, by {type(module).__name__}, as {read.layout}"
            )
        by_layer.setdefault(layer, read)
    unread = sorted(set(door.stored) - set(layouts))
    if unread:
        raise ModelRefused(f"layers {unread} store keys that no attention call was seen to read")
    buckets: dict[tuple[Any, ...], list[int]] = {}
    for layer, (k, v) in door.stored.items():
        read = by_layer[layer]
        heads = (read.query_heads, read.kv_heads, read.key_size, read.value_size)
        extras = (read.scoring.softcap is not None, read.scoring.sinks is not None)
        key = (layouts[layer], k.shape[1], k.shape[3], v.shape[1], v.shape[3], heads, extras)
        buckets.setdefault(key, []).append(layer)
    groups: list[Group] = []
    asks: dict[str, AttentionSpec] = {}
    for (layout, *kv, heads, extras), layers in buckets.items():
        name = str(layout) if str(layout) not in asks else f"{layout} #{len(groups)}"
        planes = (Plane("k", kv[0], kv[1]), Plane("v", kv[2], kv[3]))
        groups.append(Group(name, layout, planes, tuple(sorted(layers))))
        asks[name] = AttentionSpec(*heads, dtype=dtype, device=device, softcap=extras[0], sinks=extras[1])
    bindings = {module: read.binding for module, read in door.reads.items()}
    return Shape(tuple(groups), asks, bindings, door.recurrent, tuple(door.mixers))


def causal_shape(
    stored: Mapping[int, tuple[Tensor, Tensor]],
    recurrent: Recurrent | None,
    *,
    beside: Mapping[int, Mapping[str, Tensor]] | None = None,
    dtype: str,
    device: str,
) -> Shape:
    """For a model that runs solo: every layer keeps everything, and the model's own masks hide what they must.

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
    asks = {
        g.name: AttentionSpec(g.planes[0].heads, g.planes[0].heads, g.planes[0].size, g.planes[1].size, dtype, device)
        for g in groups
    }
    return Shape(groups, asks, {}, recurrent)
