"""Weights that matter: with a model's own initialisation a tiny network hardly notices what it was told.

Initialisers aim at standard deviations such as 0.02, made for thousands of channels; on 64 of them attention is
nearly uniform, sinks are nearly zero, gates are shut and the logits nearly constant, so a test that forgets a
window or a position would pass. Here every matrix keeps the variance of its input instead.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# What an initialiser chose with care: skips and mixtures of recurrent layers.
OWN = ("D", "recurrent_param", "time_decay", "time_first", "time_mix_key", "time_mix_value")
LOOKS = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn", "Wqkv", "q_b_proj", "kv_b_proj", "k_b_proj")


def enliven(model: nn.Module, seed: int) -> None:
    """Overwrite the weights in place; the same seed and the same shapes give the same weights."""
    draw = torch.Generator().manual_seed(seed)
    fan_in = {f"{path}.weight": inputs for path, module in model.named_modules() if (inputs := _inputs(module))}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            weight.copy_(_lively(path, weight, noise, fan_in.get(path, weight.shape[-1] if weight.ndim else 1)))


def _inputs(module: nn.Module) -> int | None:
    """How many inputs one output is made of, where that is not the last axis of the weight."""
    if isinstance(module, Conv1D):
        return module.nx
    if isinstance(module, nn.Conv1d):
        return module.in_channels // module.groups * module.kernel_size[0]
    return None


def _lively(path: str, weight: Tensor, noise: Tensor, inputs: int) -> Tensor:
    module, name = ("." + path).rsplit(".", 1)
    if name in OWN or (module.endswith("embed_positions") and not weight.requires_grad):
        return weight  # a table of sines that nobody trains stays one
    if name == "A_log":
        return weight - weight.max()  # the fastest decay is e per unit of time: a test sequence is short
    if name == "dt_bias":
        # Steps so short that transformers clamps them when it reads a prompt, but not when it decodes, do not occur.
        return weight.clamp(min=-2)
    if weight.squeeze().ndim <= 1 or module.endswith("norm"):
        return _vector(name, weight, noise)
    gain = 1.5 if any(look in path for look in LOOKS) else 1.0
    return gain * noise / inputs**0.5


def _vector(name: str, weight: Tensor, noise: Tensor) -> Tensor:
    """Biases, norms and scales: near where they start, and no two alike. Spread out ones are left as they are."""
    if name == "sinks":
        return 1 + noise
    if weight.numel() > 1 and weight.std() > 0.1:
        return weight
    start = 1.0 if "scale" in name or name == "temp" else weight.mean()
    return start + 0.1 * noise
