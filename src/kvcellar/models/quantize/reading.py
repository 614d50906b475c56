"""reading: the quantised tensors of weights files, as the dense tensors that they stand for.

`decoded` shows the stored tensors of each quantised weight as one dense tensor under the name that the file would have
for it, so that whatever reads dense files reads these, too.

Always true: types, shapes and scales were checked before a tensor is shown. Shapes follow from what is stored, and are
compared with those of the network like any other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kvcellar.errors import ModelRefused
from kvcellar.models.quantize.formats.part import Format, Part, shown_part
from kvcellar.models.quantize.formats.table import format_of
from kvcellar.models.weights_files import WeightsFiles

_ACTIVATIONS = (  # of activations and of K/V, which are not quantised
    *(f".{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point", "global_scale")),
    *("activation_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
)


def decoded(weights: WeightsFiles) -> WeightsFiles:
    """The same files if their config does not describe quantised weights; else with dense tensors in place of those
    that are stored quantised. Raises `ModelRefused`.

    Decoding reads the files, so it works until they are closed.
    """
    form = format_of(weights.path)
    if form is None:
        return weights
    parts: dict[str, Part] = {}
    for name in weights.tensors:
        part = _part(form, name, weights)
        if part is None:
            continue
        if part.name in parts or (part.name in weights.tensors and part.name not in part.uses):
            raise ModelRefused(f"{weights.tensors[name].file} holds {part.name} twice: {name} describes it, too")
        parts[part.name] = part
    used = {name for part in parts.values() for name in part.uses}
    unused = tuple(name for name in weights.tensors if name.endswith(_ACTIVATIONS) and name not in used)
    hidden = used.union(unused)
    plain = {name: stored for name, stored in weights.tensors.items() if name not in hidden}
    tensors = {name: part.stored for name, part in parts.items()}
    slices = _Slices(weights.slices, tuple(plain), MappingProxyType(parts))
    forms = MappingProxyType({name: part.form for name, part in parts.items()})
    return replace(weights, tensors=plain | tensors, slices=slices, unused=unused, forms=forms)


def _part(form: Format, name: str, weights: WeightsFiles) -> Part | None:
    """Raises `ModelRefused` for a weight that is not stored as the format requires, or with values that none has."""
    try:
        part = form.part(name, weights)
    except ModelRefused as error:
        raise ModelRefused(
            f"{weights.tensors[name].file} holds {name}, but its weight is not stored as config.json describes it: "
            f"{error}"
        ) from error
    if part is not None:
        part.check(lambda stored: weights.slices[stored][...])
    return part


@dataclass(frozen=True, slots=True)
class _Slices(Mapping[str, Any]):
    """Lazy slices by name: of stored tensors, and of those that are decoded."""

    plain: Mapping[str, Any]
    names: tuple[str, ...]  # of those in `plain` that are shown
    parts: Mapping[str, Part]

    def __getitem__(self, name: str) -> Any:
        return shown_part(self.parts[name], self.plain) if name in self.parts else self.plain[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.names
        yield from self.parts

    def __len__(self) -> int:
        return len(self.names) + len(self.parts)
