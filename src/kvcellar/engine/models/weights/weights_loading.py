"""weights_loading: copy the stored tensors into a network, with transformers' own renaming and joining.

Always true: every stored tensor is copied into the network, or named in a note, or the model is refused.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from kvcellar.engine.models.described import AsStored
from kvcellar.engine.models.hf_globals import building
from kvcellar.engine.models.quantize.formats.part import Decoded
from kvcellar.engine.models.weights.weights_files import FLOATS, Stored, WeightsFiles, is_finite
from kvcellar.errors import ModelRefused, first_few

_READ_AS_NEEDED = "HF_DEACTIVATE_ASYNC_LOAD"  # an environment variable that transformers reads for each load
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class Source:
    """A stored tensor that is read into newly allocated memory when transformers indexes it; `was_read` records that.

    `slices` is emptied when the files are closed. `dtype` is that of the network.
    """

    def __init__(self, slices: Mapping[str, Any], name: str, dtype: torch.dtype) -> None:
        self._slices, self._name, self._dtype = slices, name, dtype
        self.was_read = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.was_read = True
        stored = self._slices[self._name]
        return (stored.rounded(self._dtype) if isinstance(stored, Decoded) else stored)[index]


class StandIn:
    """Takes the place of a stored tensor that is read later: one zero, expanded to its shape."""

    was_read = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._zeros = torch.zeros((), dtype=dtype).expand(shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._zeros[index]


class _Joined(TorchFunctionMode):
    """Within it, what is joined of stand-ins is a stand-in, too, and takes no memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.stack, torch.cat) and all(_is_stand_in(one) for one in args[0]):
            with torch.device("meta"):
                shape = func([torch.empty(one.shape) for one in args[0]], *args[1:], **(kwargs or {})).shape
            return args[0][0].new_zeros(()).expand(shape)
        return func(*args, **(kwargs or {}))


def _is_stand_in(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.untyped_storage().nbytes() == tensor.itemsize < tensor.nbytes


def fill(
    skeleton: PreTrainedModel, dtype: torch.dtype, weights: WeightsFiles, *, later: Collection[str] = ()
) -> tuple[PreTrainedModel, list[str]]:
    """A network like `skeleton` with copies of the weights as `dtype`, and notes on what is not used as stored.

    Reads tensor by tensor, so its peak is the network's bytes and the tensors that transformers is joining. Weights
    whose stored names are in `later` are a `StandIn`, which the caller replaces. Raises
    `ModelRefused` if tensors are missing, have another shape or no place in the network, or hold values that are not
    finite; and what transformers raises.
    """
    targets = targets_of(skeleton, weights)
    check_types(skeleton, weights, targets)
    sources = {
        name: StandIn(weights.tensors[name].shape, dtype) if name in later else Source(weights.slices, name, dtype)
        for name in weights.tensors
    }
    with sequential_reads(), _Joined():
        built: Any = type(skeleton).from_pretrained(
            None,
            config=skeleton.config,
            dtype=dtype,
            state_dict=sources,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, report = built
    weights.check_unchanged()
    _check_report(report, weights, targets, type(model).__name__, stored_layers(skeleton.config))
    _check_finite(model, weights)
    return model, _notes(skeleton, model, weights, [name for name, source in sources.items() if not source.was_read])


@contextmanager
def sequential_reads() -> Iterator[None]:
    """Within the block, transformers reads a tensor when it needs it. Its threads would read ahead without a bound: all
    experts before the first are joined, which is a second copy of the model. Nothing else is built meanwhile, as in
    `building`: the switch is an environment variable of the process."""
    with building():
        before = os.environ.get(_READ_AS_NEEDED)
        os.environ[_READ_AS_NEEDED] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_READ_AS_NEEDED]
            else:
                os.environ[_READ_AS_NEEDED] = before


def targets_of(skeleton: PreTrainedModel, weights: WeightsFiles) -> dict[str, str]:
    """The name under which transformers loads each stored tensor, by its own rules; the network may not have that name.

    Raises `ModelRefused` if two are loaded under one name and are not joined there.
    """
    own = skeleton.state_dict()
    targets: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, target, joined in _renamed(skeleton, weights):
        targets[name] = target
        if not joined and target in own and (other := first.setdefault(target, name)) != name:
            raise ModelRefused(
                f"{other} ({weights.tensors[other].file}) and {name} ({weights.tensors[name].file}) are both the "
                f"network's {target}, and only one of them would be used. Remove the other one from its file."
            )
    return targets


def plain_targets(skeleton: PreTrainedModel, weights: WeightsFiles) -> dict[str, str]:
    """`targets_of`, of those tensors that are loaded as they are stored, neither joined nor split nor turned."""
    return {name: target for name, target, converted in _renamed(skeleton, weights) if not converted}


def sources_of(network: PreTrainedModel, weights: WeightsFiles) -> dict[str, AsStored | None]:
    """How parameters are stored, by each name that they have; None: otherwise than as they are."""
    stored = {target: name for name, target in plain_targets(network, weights).items()}
    named = list(network.named_parameters(remove_duplicate=False))
    turned = {id(module.weight) for module in network.modules() if type(module) is Conv1D}  # packed as [out,in]
    found = {
        id(one): AsStored(stored[name], str(one.dtype).removeprefix("torch."))
        for name, one in named
        if name in stored and stored[name] not in weights.forms and id(one) not in turned
    }
    parameters = dict(named)
    for name, names in stacked_targets(network, weights).items():
        one = parameters.get(name)  # None: of a layer behind the last one
        if one is not None and not any(part in weights.forms for expert in names for part in expert):
            found[id(one)] = AsStored("", str(one.dtype).removeprefix("torch."), None, tuple(map(tuple, names)))
    return {name: found.get(id(one)) for name, one in named}


def stacked_targets(skeleton: PreTrainedModel, weights: WeightsFiles) -> dict[str, list[list[str]]]:
    """Of each stack of matrices [E,o,i] that is joined when it is loaded: the stored names by expert, in the order in
    which those of an expert are joined along outputs. Stacks that are joined in other ways are left out."""
    orders: dict[str, tuple[int, int]] = {}  # of a source pattern: its place among those of its stack, and their number
    for one in get_model_conversion_mapping(skeleton):
        if isinstance(one, WeightConverter) and [*map(_joining, one.operations)] in (["stack"], ["stack", "outputs"]):
            orders |= {pattern: (at, len(one.source_patterns)) for at, pattern in enumerate(one.source_patterns)}
    found: dict[str, dict[tuple[int, int], str]] = {}
    parts: dict[str, int] = {}
    for name, target, pattern in _renamed(skeleton, weights):
        if pattern in orders and (number := _EXPERT.search(name)) is not None:
            at, parts[target] = orders[pattern]
            found.setdefault(target, {})[int(number[1]), at] = name
    stacks: dict[str, list[list[str]]] = {}
    for target, names in found.items():
        experts = len(names) // parts[target]
        places = [[(expert, at) for at in range(parts[target])] for expert in range(experts)]
        if names.keys() == {place for expert in places for place in expert}:
            stacks[target] = [[names[place] for place in expert] for expert in places]
    return stacks


def _joining(operation: object) -> str:
    match operation:
        case MergeModulelist(dim=0):
            return "stack"
        case Concatenate(dim=1):
            return "outputs"
        case _:
            return "other"


def _renamed(skeleton: PreTrainedModel, weights: WeightsFiles) -> Iterator[tuple[str, str, str | None]]:
    return renamed(skeleton, get_model_conversion_mapping(skeleton), weights.tensors)


def renamed(
    network: PreTrainedModel, conversions: Sequence[Any], names: Iterable[str]
) -> Iterator[tuple[str, str, str | None]]:
    """Of each stored tensor its name, the name it is loaded under, and the pattern of the converter that converts it
    there; None: it is loaded as it is."""
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    prefix, own = network.base_model_prefix, network.state_dict()
    for name in names:
        target, converter = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, converter = rename_source_key(name, [], [], prefix, own)
        yield name, target, converter


def check_types(skeleton: PreTrainedModel, weights: WeightsFiles, targets: Mapping[str, str]) -> None:
    """Refuse integers and eight-bit floats for float parameters: a cast would ignore their scales; and quantised
    weights of layers that have them transposed. `targets` is what `targets_of` returns."""
    own, modules = skeleton.state_dict(), dict(skeleton.named_modules())
    for name, form in weights.forms.items():
        if isinstance(modules.get(targets[name].rpartition(".")[0]), Conv1D):
            raise ModelRefused(
                f"{weights.tensors[name].file} holds {name} quantised ({form}), and in {type(skeleton).__name__} it "
                f"belongs to a Conv1D, whose weights are transposed. Such files are not read: load unquantised weights"
            )
    for name, target in targets.items():
        if target in own:
            check_type(name, weights.tensors[name], own[target])


def check_type(name: str, stored: Stored, place: torch.Tensor) -> None:
    """Refuse a tensor for a float parameter that is not stored as floats of 16 bits or more."""
    if place.is_floating_point() and stored.dtype not in FLOATS:
        raise _unserved(name, stored)


def check_floats(weights: WeightsFiles) -> None:
    """Refuse floats of eight bits and fewer, wherever they belong: they have scales."""
    for name, stored in weights.tensors.items():
        if stored.dtype.startswith("F") and stored.dtype not in FLOATS:
            raise _unserved(name, stored)


def _unserved(name: str, stored: Stored) -> ModelRefused:
    return ModelRefused(
        f"{stored.file} holds {name} as {stored.dtype}; float32, bfloat16 and float16 weights are served"
    )


def _check_report(
    report: Mapping[str, Any], weights: WeightsFiles, targets: Mapping[str, str], network: str, mtp: re.Pattern[str]
) -> None:
    """Raise `ModelRefused` for the faults in transformers' report, which leaves out names in its ignore lists. Tensors
    of MTP layers that the config describes belong to the model's head (`mtp_head.py`)."""
    faults: list[str] = []
    unexpected = set(map(str, report["unexpected_keys"]))
    names = [name for name, target in targets.items() if target in unexpected] or sorted(unexpected)
    if names := [name for name in names if not mtp.search(name) and not _is_zero_bias(name, weights)]:
        faults.append(f"{len(names)} tensors that have no place in it ({first_few(names)})")
    for what, kind in (("missing_keys", "nothing for"), ("mismatched_keys", "another shape for")):
        if found := sorted(map(str, report[what])):
            faults.append(f"{kind} {len(found)} of its parameters ({first_few(found)})")
    if faults:
        raise ModelRefused(
            f"the weights do not fit the config: it describes a {network}, and {weights.files} of {weights.path.name} "
            f"holds {' and '.join(faults)}. It would be another model: correct config.json, or the weights."
        )


def _is_zero_bias(name: str, weights: WeightsFiles) -> bool:
    """Whether it is a bias of zeros, as GPTQ files have them beside quantised weights of layers without a bias."""
    stored = weights.tensors.get(name)
    if stored is None or not name.endswith(".bias") or f"{name.removesuffix('.bias')}.weight" not in weights.forms:
        return False
    return len(stored.shape) == 1 and not bool(weights.slices[name][...].any())


def _check_finite(model: PreTrainedModel, weights: WeightsFiles) -> None:
    """A NaN in one row of a weight would affect only some texts, long after the load, so all values are checked now."""
    bad = [name for name, one in model.named_parameters() if one.numel() and not is_finite(one)]
    if bad:
        raise ModelRefused(
            f"{weights.files} of {weights.path.name}: {len(bad)} tensors hold NaN or infinity as {model.dtype}: "
            f"{first_few(bad)}. The weights are damaged; if not, load them with dtype float32."
        )


def stored_layers(config: Any) -> re.Pattern[str]:
    """Matches the names of tensors of MTP layers that are stored as layers behind the last one."""
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_mtp_layers", None) or 0
    numbers = "|".join(str(getattr(text, "num_hidden_layers", 0) + i) for i in range(count))
    return re.compile(rf"(^|\.)layers\.({numbers})\." if count else "(?!)")


def _notes(skeleton: PreTrainedModel, model: PreTrainedModel, weights: WeightsFiles, unread: list[str]) -> list[str]:
    """What of the files is not used as it is stored."""
    notes: list[str] = []
    network = type(model).__name__
    if unread:
        notes.append(f"{len(unread)} stored tensors are not used: {network} ignores {first_few(unread)}")
    if weights.unused:
        notes.append(
            f"{len(weights.unused)} stored tensors are not used, since activations are not quantised: "
            f"{first_few(weights.unused)}"
        )
    if weights.unlisted:
        notes.append(f"{first_few(weights.unlisted)}: not read, since {weights.files} hold the model's weights")
    if untied := sorted(set(skeleton.all_tied_weights_keys or ()) - set(model.all_tied_weights_keys or ())):
        notes.append(f"config.json ties {first_few(untied)}, but other values are stored for it, and these are used")
    filled = [one for one in model._keys_to_ignore_on_load_missing or () if _is_initialised(one, model, weights)]
    if filled:
        notes.append(f"no stored tensor is named like {first_few(filled)}: {network} uses its own initial values")
    return notes


def _is_initialised(pattern: str, model: PreTrainedModel, weights: WeightsFiles) -> bool:
    """Whether the network has parameters of this name pattern, and the files have none."""
    return any(re.search(pattern, name) for name in model.state_dict()) and not any(
        re.search(pattern, name) for name in weights.tensors
    )
