"""separate: experts that a file has in one tensor, as the tensors of single experts that other readers expect.

transformers joins the experts of a layer when it loads them one by one; some files have them joined already. Where its
table of conversions has the names of single experts, they are shown under these names, so that they are quantised as
matrices; other joined experts stay as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from kvcellar.models.weights_files import Stored, WeightsFiles
from kvcellar.models.weights_loading import targets_of


@dataclass(frozen=True, slots=True)
class _Slice:
    """Rows of one expert of a joined tensor, read when it is indexed."""

    slices: Mapping[str, Any]
    name: str
    expert: int
    rows: slice

    def __getitem__(self, index: Any) -> Tensor:
        return self.slices[self.name][self.expert, self.rows][index]


@dataclass(frozen=True, slots=True)
class _Slices(Mapping[str, Any]):
    """Lazy slices by name: of stored tensors, and of single experts."""

    plain: Mapping[str, Any]
    names: tuple[str, ...]  # of those in `plain` that are shown
    parts: Mapping[str, tuple[str, int, slice]]  # of joined tensors

    def __getitem__(self, name: str) -> Any:
        return _Slice(self.plain, *self.parts[name]) if name in self.parts else self.plain[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.names
        yield from self.parts

    def __len__(self) -> int:
        return len(self.names) + len(self.parts)


def separated(weights: WeightsFiles, skeleton: PreTrainedModel) -> WeightsFiles:
    """The same files with single experts in place of those that are joined, as far as they have names."""
    own, targets = skeleton.state_dict(), targets_of(skeleton, weights)
    converters = [one for one in get_model_conversion_mapping(skeleton) if isinstance(one, WeightConverter)]
    parts: dict[str, tuple[str, int, slice]] = {}
    tensors = dict(weights.tensors)
    for name, stored in weights.tensors.items():
        place = own.get(targets[name])
        if place is None or len(stored.shape) != 3 or tuple(place.shape) != stored.shape:
            continue
        found = _parts(name, stored, converters)
        if found and not set(found) & set(tensors) and _are_joined(found, targets[name], skeleton, weights, stored):
            del tensors[name]
            parts |= found
            tensors |= {new: _stored(stored, rows) for new, (_, _, rows) in found.items()}
    if not parts:
        return weights
    plain = tuple(name for name in weights.tensors if name in tensors)
    return replace(weights, tensors=tensors, slices=_Slices(weights.slices, plain, MappingProxyType(parts)))


def _stored(joined: Stored, rows: slice) -> Stored:
    return Stored(joined.file, (rows.stop - rows.start, joined.shape[2]), joined.dtype)


def _parts(name: str, stored: Stored, converters: list[WeightConverter]) -> dict[str, tuple[str, int, slice]]:
    """Names of single experts, each with its place in the joined tensor [E,o,i]; none if no conversion joins them."""
    for one in converters:
        sources, (target, *others) = list(one.source_patterns), list(one.target_patterns)
        joins = [(type(step), getattr(step, "dim", None)) for step in one.operations]
        whole = [(MergeModulelist, 0)] if len(sources) == 1 else [(MergeModulelist, 0), (Concatenate, 1)]
        plain = all(source.count("*") == 1 and source.endswith(".weight") for source in sources)
        if joins != whole or others or not plain or not name.endswith(target) or stored.shape[1] % len(sources):
            continue
        start, size = name.removesuffix(target), stored.shape[1] // len(sources)
        return {
            start + source.replace("*", str(expert)): (name, expert, slice(at * size, (at + 1) * size))
            for expert in range(stored.shape[0])
            for at, source in enumerate(sources)
        }
    return {}


def _are_joined(
    parts: Mapping[str, tuple[str, int, slice]],
    target: str,
    skeleton: PreTrainedModel,
    weights: WeightsFiles,
    stored: Stored,
) -> bool:
    """Whether transformers would load these names into the tensor that they are taken from."""
    tensors = {new: _stored(stored, rows) for new, (_, _, rows) in parts.items()}
    found = targets_of(skeleton, replace(weights, tensors=tensors))
    return all(place == target for place in found.values())
