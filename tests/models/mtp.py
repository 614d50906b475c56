"""Tiny models with MTP layers, in memory and in directories."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.mtp_head import MtpHead, build_mtp_head
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import sharing_weights
from kvcellar.memory.attention.choose import backends
from tests.zoo import ARCHS
from tests.zoo_test_support.initialise import initialise
from tests.zoo_test_support.tiny import tiny

FULL, SLIDING = "full_attention", "sliding_attention"
# Config fields of models whose MTP layers are run: latents, experts, one layer and several, full and sliding.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"num_mtp_layers": 2},
    "glm4-moe": {"num_mtp_layers": 1},
    "bailing-hybrid": {"num_mtp_layers": 1, "mtp_layer_types": [FULL], "mtp_mlp_layer_types": ["sparse"]},
    "mellum": {"num_mtp_layers": 1},
    "lfm3": {"num_mtp_layers": 1, "mtp_layer_types": [FULL]},
    "llama": {"num_mtp_layers": 3},
    "gemma3": {"num_mtp_layers": 2, "mtp_layer_types": [SLIDING, FULL]},
}


def model_with_layers(name: str, **fields: Any) -> PreTrainedModel:
    """A new model whose config describes MTP layers."""
    if name in ARCHS:
        return ARCHS[name].build(**FAMILIES[name] | fields)
    config = tiny(name, layer_types=[SLIDING, FULL] * 2, **FAMILIES[name] | fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    initialise(model, 1)
    model.generation_config.do_sample = False
    return model.eval()


def new_layers(model: PreTrainedModel, seed: int = 2) -> MtpModel:
    """MTP layers for `model`, which they share its embedding and output head with."""
    layers = MtpModel(model, model.config.get_mtp_config().num_hidden_layers)
    initialise(layers.layers, seed)
    return layers.eval()


@cache
def head_and_reference(name: str) -> tuple[MtpHead, Guest, MtpModel]:
    """A head, its target, and the same layers with transformers' own attention. Shared between tests."""
    guest = build_guest(model_with_layers(name), backends())
    layers = new_layers(guest.model)
    reference = sharing_weights(layers)
    reference.set_attn_implementation("eager")
    return build_mtp_head(layers, guest, backends()), guest, reference


@torch.inference_mode()
def own_forward(layers: MtpModel, ids: list[int], hidden: Tensor, first: int = 0) -> list[Tensor]:
    """The logits [T,V] of every layer: layer i gets ids[1 + i:] and `hidden` [T,H] of the target at `first` and on."""
    found, out, cache = list[Tensor](), hidden[None], MtpCache(config=layers.config)
    for layer in range(len(layers.layers)):
        tokens = torch.tensor([ids[1 + layer :][: len(hidden)]])
        places = torch.arange(first, first + len(hidden))[None] + 1 + layer
        out = layers.forward_layer(layer, out, places, cache, input_ids=tokens)
        found.append(layers._project_to_logits(out)[0])
    return found


NORMS = {"enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128)}


def saved_with_layer(path: Path, name: str, **fields: Any) -> Path:
    """A directory of a model of 4 layers with one MTP layer stored as the fifth, as released ones are."""
    with silence_transformers():
        ARCHS[name].build(num_hidden_layers=5, **fields).save_pretrained(path)
    stored, draw = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    for norm, shape in NORMS.items():
        stored[f"model.layers.4.{norm}.weight"] = torch.randn(*shape, generator=draw) * 0.2
    stored["model.layers.4.shared_head.head.weight"] = torch.zeros_like(stored["lm_head.weight"])
    stored["model.layers.4.embed_tokens.weight"] = torch.zeros_like(stored["lm_head.weight"])
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    for types in ("layer_types", "mlp_layer_types"):
        if config.get(types):
            config[types] = config[types][:4]
    config |= {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def saved_beside(path: Path, name: str, **fields: Any) -> Path:
    """A directory of a model whose MTP layers are in mtp.safetensors, by the names of transformers' MTP model."""
    model = model_with_layers(name, **fields)
    with silence_transformers():
        model.save_pretrained(path)
    layers = new_layers(model).layers.state_dict()
    save_file({f"mtp.layers.{name}": value for name, value in layers.items()}, path / "mtp.safetensors")
    return path
