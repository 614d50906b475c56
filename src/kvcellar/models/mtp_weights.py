"""mtp_weights: build the MTP layers of a model from the weights in its directory.

Their tensors are in the model's own files, under the names that transformers knows for its family or as layers behind
the last one, or in a file `mtp.safetensors` beside them. What the MTP layers share with the model (the embedding, the
output head, rotary frequencies) is the model's, and copies of it in the files are not read.

Always true: every tensor that belongs to the layers is copied into them, or the head is refused; the model's own
weights are not written to.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from kvcellar.errors import ModelRefused
from kvcellar.models.building import building
from kvcellar.models.hf_logging import silence_transformers
from kvcellar.models.load import BUILD_ERRORS, check_memory
from kvcellar.models.quantize.reading import decoded
from kvcellar.models.weights_files import MTP_FILE, WeightsFiles, first_few, opened, opened_file
from kvcellar.models.weights_loading import FLOATS, Source, is_finite, sequential_reads, stored_layers

_SHARED = re.compile(r"(^|\.)(embed_tokens|shared_head\.head|lm_head)\.weight$")  # copies of the model's own
_HEAD_NAMES = re.compile(r"(^|[._])(mtp|nextn|eagle|medusa)([._]|\d|$)|\.(eh_proj|enorm|hnorm)\.")


def load_mtp(model: PreTrainedModel, path: Path) -> MtpModel:
    """The MTP layers of `model`, which was loaded from `path`, on its device and in its dtype. Raises `ModelRefused`.

    They call the embedding and the output head of `model`.
    """
    with silence_transformers(), _weights(path) as weights:
        names = _names(model, weights)
        _check_described(model, weights, names)
        try:
            with described(model):
                return _filled(model, weights, names)
        except BUILD_ERRORS as error:
            weights.check_unchanged()
            raise ModelRefused(f"the MTP layers of {path.name} cannot be built: {error}") from error


@contextmanager
def described(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, the config of `model` has the types of all MTP layers: those that it lacks are as in its last
    layer, of which transformers takes the class, too."""
    config: Any = model.config.get_text_config(decoder=True)
    with ExitStack() as restored:
        for name in ("layer_types", "mlp_layer_types"):
            types = getattr(config, name, None)
            if types and not getattr(config, f"mtp_{name}", None):
                setattr(config, f"mtp_{name}", [types[-1]] * config.num_mtp_layers)
                restored.callback(delattr, config, f"mtp_{name}")
        yield


@contextmanager
def _weights(path: Path) -> Iterator[WeightsFiles]:
    with opened_file(path, MTP_FILE) if (path / MTP_FILE).is_file() else opened(path) as weights:
        yield decoded(weights)


def _names(model: PreTrainedModel, weights: WeightsFiles) -> list[str]:
    """The stored tensors that belong to MTP layers."""
    if MTP_FILE in weights.stats:
        return list(weights.tensors)
    config = model.config.get_text_config(decoder=True)
    behind = stored_layers(config)
    known = [
        pattern
        for pattern in model._keys_to_ignore_on_load_unexpected or ()
        if (layer := re.search(r"\.(\d+)", pattern)) is None or int(layer[1]) >= config.num_hidden_layers
    ]
    return [
        name
        for name in weights.tensors
        if behind.search(name) or (_HEAD_NAMES.search(name) and any(re.search(pattern, name) for pattern in known))
    ]


def _check_described(model: PreTrainedModel, weights: WeightsFiles, names: Sequence[str]) -> None:
    """Raise `ModelRefused` if the config describes no MTP layers, or the files hold none."""
    config = model.config.get_text_config(decoder=True)
    count, kind = getattr(config, "num_mtp_layers", None), type(config).__name__
    found = sorted({*names, *filter(_HEAD_NAMES.search, weights.tensors), *_behind(config, weights)})
    if not count:
        held = f"{weights.files} holds {len(found)} tensors of a head ({first_few(found)}), " if found else ""
        raise ModelRefused(
            f"{weights.path.name} has no MTP head that can be used: {held or 'no weights of one were found, '}and "
            f"{kind} has num_mtp_layers {count}: transformers builds no MTP layers for it"
        )
    if not names:
        raise ModelRefused(
            f"{weights.path.name} has no MTP head: config.json names {count} MTP layers, and neither {weights.files} "
            f"nor a file {MTP_FILE} holds their weights"
        )


def _behind(config: Any, weights: WeightsFiles) -> Iterator[str]:
    """Names of tensors of any layers behind the model's last one."""
    for name in weights.tensors:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= config.num_hidden_layers:
            yield name


def _filled(model: PreTrainedModel, weights: WeightsFiles, names: Sequence[str]) -> MtpModel:
    count = model.config.get_text_config(decoder=True).num_mtp_layers
    if count > len(names):
        raise ModelRefused(
            f"config.json: num_mtp_layers is {count}; {weights.files} holds {len(names)} of their tensors"
        )
    with building(), ExitStack() as contexts:
        for context in MtpModel.get_init_context(model.dtype, False, False, None):
            contexts.enter_context(context)
        network = MtpModel(model, count)
    own = _own(network)
    elements = sum(value.numel() for value in own.values())
    if elements > weights.elements:
        raise ModelRefused(
            f"its config describes {elements} values of MTP layers; {weights.files} holds {weights.elements}"
        )
    check_memory(elements * model.dtype.itemsize)
    sources = {name: Source(weights.slices, name, model.dtype) for name in _chosen(network, model, weights, names)}
    mapping: list[Any] = network.get_weight_conversions(model)
    with sequential_reads():
        found, _ = convert_and_load_state_dict_in_model(
            model=network,
            state_dict=sources,
            load_config=LoadStateDictConfig(
                weight_mapping=mapping, device_map={"": model.device}, dtype=model.dtype, use_safetensors=True
            ),
        )
    weights.check_unchanged()
    _check_complete(network, weights, found)
    return network


def _own(network: MtpModel) -> dict[str, torch.Tensor]:
    """What the MTP layers do not share with the model, before it is loaded."""
    return {name: value for name, value in network.state_dict().items() if value.device.type == "meta"}


def _chosen(network: MtpModel, model: PreTrainedModel, weights: WeightsFiles, names: Sequence[str]) -> list[str]:
    """The tensors to read: all, except copies of what the model has itself. Raises `ModelRefused` for others that the
    layers have no place for, and for integers."""
    own, mapping, state = _own(network), network.get_weight_conversions(model), network.state_dict()
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    chosen: list[str] = []
    astray: list[str] = []
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, network.base_model_prefix, state)
        if target not in state and name in state:
            target = name
        if target in own:
            chosen.append(name)
            if own[target].is_floating_point() and weights.tensors[name].dtype not in FLOATS:
                raise ModelRefused(
                    f"{weights.tensors[name].file} holds {name} as {weights.tensors[name].dtype}; float32, bfloat16 "
                    f"and float16 weights are served"
                )
        elif not _SHARED.search(name):
            astray.append(name)
    if astray:
        raise ModelRefused(
            f"{weights.files} holds {len(astray)} tensors of MTP layers that transformers' MTP model has no place for "
            f"({first_few(astray)})"
        )
    return chosen


def _check_complete(network: MtpModel, weights: WeightsFiles, found: Any) -> None:
    """Raise `ModelRefused` unless every tensor of the layers was read, in its shape, with finite values."""
    absent = sorted(name for name, value in network.state_dict().items() if value.device.type == "meta")
    faults = [f"nothing for {len(absent)} of its parameters ({first_few(absent)})"] if absent else []
    if mismatched := sorted(map(str, found.mismatched_keys)):
        faults.append(f"another shape for {len(mismatched)} of its parameters ({first_few(mismatched)})")
    bad = [] if absent else [name for name, value in network.layers.named_parameters() if not is_finite(value)]
    if bad:
        faults.append(f"NaN or infinity in {len(bad)} tensors ({first_few(bad)})")
    if faults:
        raise ModelRefused(f"{weights.files} holds {' and '.join(faults)}, so its MTP head cannot be used")
