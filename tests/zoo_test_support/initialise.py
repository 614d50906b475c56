"""Initial weights for tiny models, for which logits depend on every input.

Usual initialisers have standard deviations such as 0.02, made for thousands of channels. With 64 channels attention is
then nearly uniform, sinks and gates are nearly zero and the logits nearly constant, so an implementation without a
window or a position would pass. Here every matrix keeps the variance of its input instead.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Kept from the model's initialiser: skips and mixtures of recurrent layers.
OWN = ("D", "recurrent_param", "time_decay", "time_first", "time_mix_key", "time_mix_value")
LOOKS = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn", "Wqkv", "q_b_proj", "kv_b_proj", "k_b_proj")


def initialise(model: nn.Module, seed: int) -> None:
    """Overwrite the weights in place; the same seed and the same shapes give the same weights."""
    draw = torch.Generator().manual_seed(seed)
    fan_in = {f"{path}.weight": inputs for path, module in model.named_modules() if (inputs := _inputs(module))}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            weight.copy_(_initial(path, weight, noise, fan_in.get(path, weight.shape[-1] if weight.ndim else 1)))


def _inputs(module: nn.Module) -> int | None:
    """The number of inputs of one output, if it is not the last axis of the weight."""
    if isinstance(module, Conv1D):
        return module.nx
    if isinstance(module, nn.Conv1d):
        return module.in_channels // module.groups * module.kernel_size[0]
    return None


def _initial(path: str, weight: Tensor, noise: Tensor, inputs: int) -> Tensor:
    module, name = ("." + path).rsplit(".", 1)
    if name in OWN or (module.endswith("embed_positions") and not weight.requires_grad):
        return weight  # a fixed sinusoidal table
    if name == "A_log":
        return weight - weight.max()  # the fastest decay is e per unit of time: a test sequence is short
    if name == "dt_bias":
        # No steps so short that transformers clamps them in prefill, but not in decode.
        return weight.clamp(min=-2)
    if weight.squeeze().ndim <= 1 or module.endswith("norm"):
        return _vector(name, weight, noise)
    gain = 1.5 if any(look in path for look in LOOKS) else 1.0
    return gain * noise / inputs**0.5


def _vector(name: str, weight: Tensor, noise: Tensor) -> Tensor:
    """Biases, norms and scales: near their initial values, all different. Vectors with some variance are kept."""
    if name == "sinks":
        return 1 + noise
    if weight.numel() > 1 and weight.std() > 0.1:
        return weight
    start = 1.0 if "scale" in name or "cross_attn" in name or name == "temp" else weight.mean()  # gates, too
    return start + 0.1 * noise
