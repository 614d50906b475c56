"""selection: which stored tensors are quantised, and how; the others are left, each with the reason.

Quantised are the weights of linear layers and of experts. The network, built without memory for its weights, tells
them from embeddings, convolutions and tables of the same shape; names tell routers and the like from other layers.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvcellar.engine.models.quantize.kinds import INT4, INT8, MIXED
from kvcellar.engine.models.quantize.rounding import GROUP
from kvcellar.engine.models.weights.weights_files import FLOATS, Stored, WeightsFiles
from kvcellar.engine.models.weights.weights_loading import targets_of

FEWEST = 1024  # elements: smaller ones are left, as by Ollama
FEW_LAYERS = 8  # with at most so many, `mixed` has all mixers in 8 bits instead of the first and the last layer
_LEFT_NAMES = {
    "a router": r"gate|router|\w*_gate|gate_inp|wg|classifier",
    "of a small network that others leave, too": r"indexer|altup\w*|laurel\w*|per_layer\w*",
    "of a vision or audio tower": r"(vision|visual|audio|image|speech)(_\w+)?|\w*_(vision|audio)|multi_modal_projector",
    "of an MTP head": r"mtp|nextn",
}
_MIXER = re.compile(r"\w*(attn|attention|conv|mamba|mixer|ssm|recurrent|temporal)\w*")


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to the weights of a source: names of stored tensors by kind, and reasons for those that are left.

    `promoted` is a target that matches the modules in 8 bits of a mixed file, and `others` names quantised modules that
    are not linear layers. `modules` are the names of linear layers in the network, by their stored weights.
    """

    kinds: Mapping[str, str]  # `INT8` or `INT4`
    left: Mapping[str, str]
    ignore: tuple[str, ...]  # full names of modules that are left
    promoted: str | None = None
    others: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict[str, str])


def choose(skeleton: PreTrainedModel, weights: WeightsFiles, kind: str, *, draft: bool = False) -> Choice:
    """Weights to quantise to `kind`. With `draft`, the output head is among them, and the embedding if it is not the
    same."""
    own, modules = skeleton.state_dict(), dict(skeleton.named_modules())
    head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    tied = getattr(skeleton.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    allowed = [head, embedding] if draft and not tied else []
    targets = targets_of(skeleton, weights)
    quantised: list[str] = []
    left: dict[str, str] = {}
    for name, stored in weights.tensors.items():
        module = modules.get(targets[name].rpartition(".")[0])
        place = own.get(targets[name])
        why = _unfit(name, stored)
        if why is None and not any(module is not None and module is one for one in allowed):
            why = _misplaced(targets[name], module, None if place is None else place.dim(), head)
        if why is None:
            quantised.append(name)
        else:
            left[name] = why
    kinds, promoted = _kinds(quantised, kind, skeleton)
    places = {name: targets[name].removesuffix(".weight") for name in kinds}
    others = tuple(name.removesuffix(".weight") for name in kinds if modules.get(places[name]) is embedding)
    linear = {name: place for name, place in places.items() if isinstance(modules.get(place), nn.Linear)}
    parts = Counter(linear.values())
    once = {name: place for name, place in linear.items() if parts[place] == 1}
    return Choice(kinds, left, _ignored(skeleton, weights, kinds), promoted, others, once)


def _unfit(name: str, stored: Stored) -> str | None:
    """Why a tensor is left by its name, type or shape."""
    if len(stored.shape) == 3 and "experts" in name.split("."):
        return "experts of a layer in one tensor"
    if len(stored.shape) != 2 or not name.endswith(".weight") or stored.dtype not in FLOATS:
        return "not a matrix of weights"
    for why, pattern in _LEFT_NAMES.items():
        if any(re.fullmatch(pattern, part) for part in name.split(".")):
            return why
    if any(size % GROUP for size in stored.shape):
        return f"a shape that is no multiple of {GROUP}"
    if stored.shape[0] * stored.shape[1] < FEWEST:
        return f"fewer than {FEWEST} weights"
    return None


def _misplaced(target: str, module: Any, dimensions: int | None, head: Any) -> str | None:
    """Why a tensor is left by its place in the network. Experts are stored one by one, and joined when loaded."""
    if dimensions is None:
        return "not a part of the network"
    if module is not None and module is head:
        return "the output head"
    linear = isinstance(module, nn.Linear) and target.endswith(".weight")
    expert = dimensions == 3 and "experts" in target.split(".")
    return None if linear or expert else "not a linear layer"


def _ignored(skeleton: PreTrainedModel, weights: WeightsFiles, kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Modules of at least two dimensions that are left, under their names in the files and in the network."""
    stored = {
        name.removesuffix(".weight")
        for name, one in weights.tensors.items()
        if name.endswith(".weight") and name not in kinds and len(one.shape) > 1
    }
    quantised = {name.removesuffix(".weight") for name in kinds}
    targets = targets_of(skeleton, weights)
    inside = {targets[name].removesuffix(".weight") for name in kinds}
    linear = {name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    return tuple(sorted((stored | linear - inside) - quantised))


# -- mixtures ----------------------------------------------------------------------------------------------------------


def _kinds(names: list[str], kind: str, skeleton: PreTrainedModel) -> tuple[dict[str, str], str | None]:
    """The kind of each, and the pattern of modules in 8 bits of a mixture. Whole layers or whole mixers are raised, so
    that parts which other engines join (q, k and v; gate and up; all experts of a layer) stay of one kind."""
    if kind != MIXED:
        return dict.fromkeys(names, kind), None
    found = _layers(skeleton)
    if found is None:
        return dict.fromkeys(names, INT4), None
    layers, count = found
    if count > FEW_LAYERS:
        pattern = rf"(.*\.)?{layers}\.(0|{count - 1})\."
    else:
        parts = {match[1] for name in names if (match := re.search(rf"(?:^|\.){layers}\.\d+\.(\w+)\.", name))}
        mixers = "|".join(sorted(part for part in parts if _MIXER.fullmatch(part)))
        pattern = rf"(.*\.)?{layers}\.\d+\.({mixers})\." if mixers else "(?!)"
    raised = re.compile(pattern)
    kinds = {name: INT8 if raised.match(name) else INT4 for name in names}
    return kinds, f"re:{pattern}" if INT8 in kinds.values() else None


def _layers(skeleton: PreTrainedModel) -> tuple[str, int] | None:
    """The last part of the name of the list of layers, and their number."""
    count = getattr(skeleton.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [name for name, one in skeleton.named_modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    return (min(lists, key=len).rpartition(".")[2], int(count or 0)) if lists else None
