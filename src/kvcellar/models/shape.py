"""shape: the groups of a model and which module reads which layer, from what a probe recorded. No model name is used.

A model whose recorded calls fit no such description is refused, with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.cache.layouts import Causal
from kvcellar.cache.memory import Group
from kvcellar.errors import ModelRefused
from kvcellar.models.latent import Binding
from kvcellar.models.probe import PROBE_TOKENS, ProbeDoor, Read, StoreProbe, probe
from kvcellar.shapes import AttentionSpec, Plane, Recurrent, StoredAs

_NOTHING_STORED = "its forward stores nothing through the cache, so there is nothing to remember"


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups of a model, what each needs of a backend, and which module reads which layer's cells."""

    groups: tuple[Group, ...]
    specs: Mapping[str, AttentionSpec]  # by group name
    bindings: Mapping[nn.Module, Binding]
    recurrent: Recurrent | None = None
    mixers: tuple[nn.Module, ...] = ()  # the modules that keep a state

    def storing(self, stored: StoredAs) -> "Shape":
        """The same shape, with its planes stored as `stored`."""
        groups = tuple(
            replace(group, planes=tuple(replace(plane, storage=stored.of(plane.name)) for plane in group.planes))
            for group in self.groups
        )
        return replace(self, groups=groups, specs={n: replace(spec, stored=stored) for n, spec in self.specs.items()})

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
    return Shape(tuple(groups), specs, bindings, door.recurrent, tuple(door.mixers))


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


def stored_shape(model: PreTrainedModel, *, fresh: Callable[[int], Any] | None = None) -> Shape:
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
