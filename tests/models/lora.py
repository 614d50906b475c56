"""Adapters of tiny networks, written as peft writes them, and what they do, computed in the obvious way."""

import json
import math
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

DEFAULTS: Mapping[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere/base", "r": 4,
    "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "peft_version": "0.21.2",
    "use_dora": False, "use_rslora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "layers_to_transform": None, "layers_pattern": None, "exclude_modules": None, "megatron_core": "megatron.core",
    "loftq_config": {}, "lora_bias": False, "target_parameters": None, "qalora_group_size": 16,
}  # fmt: skip
Ranks = Mapping[str, int]


def ends_with(*names: str) -> Callable[[str], bool]:
    return lambda module: module.split(".")[-1] in names


def layers_of(model: PreTrainedModel, selects: Callable[[str], bool]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of linear layers, by name."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and selects(name):
            shape = module.weight.shape
            found[name] = (shape[0], shape[1]) if isinstance(module, Conv1D) else (shape[1], shape[0])
    return found


def saved(
    path: Path,
    layers: Mapping[str, tuple[int, int]],
    *,
    seed: int = 0,
    rank: int | None = None,
    ranks: Ranks | None = None,
    strength: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """An adapter of these layers, random, with `fields` in its config in place of the defaults.
    `rank`, or `ranks` by layer: of the matrices, if not as the config says."""
    config = {**DEFAULTS, **fields}
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (inputs, outputs) in layers.items():
        own = (ranks or {}).get(name, rank or config["r"])
        a = torch.randn(own, inputs, generator=draw) / math.sqrt(inputs)
        b = strength * torch.randn(outputs, own, generator=draw)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def merged(model: PreTrainedModel, *adapters: Path, scales: Mapping[str, float] | None = None) -> PreTrainedModel:
    """A copy of a network with the products of adapters added to its weights."""
    network = deepcopy(model)
    for adapter in adapters:
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in tensors:
            if (found := re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name)) is not None:
                layer: Any = network.get_submodule(found[1])
                a, b = tensors[name].float(), tensors[name.replace("lora_A", "lora_B")].float()
                root = math.sqrt(len(a)) if config["use_rslora"] else len(a)
                scale = (scales or {}).get(found[1], config["lora_alpha"] / root)
                product = scale * (b @ a)
                with torch.no_grad():
                    layer.weight += (product.T if isinstance(layer, Conv1D) else product).to(layer.weight.dtype)
    return network
