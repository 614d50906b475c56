"""Weights that matter: with a model's own initialisation a tiny network hardly notices what it was told.

Initialisers aim at standard deviations such as 0.02, made for thousands of channels; on 64 of them attention is
nearly uniform, sinks are nearly zero, gates are shut and the logits nearly constant, so a test that forgets a
window or a position would pass. Here every matrix keeps the variance of its input instead.
"""

import torch
from torch import Tensor, nn

# What an initialiser chose with care: decay rates and step sizes of recurrent layers.
OWN = ("A_log", "dt_bias", "D", "recurrent_param", "time_decay", "time_first", "time_mix_key", "time_mix_value")
LOOKS = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn", "Wqkv", "q_b_proj", "kv_b_proj", "k_b_proj")


def enliven(model: nn.Module, seed: int) -> None:
    """Overwrite the weights in place; the same seed and the same shapes give the same weights."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if not name.endswith(OWN):
                weight.copy_(_lively(name, weight, noise))


def _lively(name: str, weight: Tensor, noise: Tensor) -> Tensor:
    if "sink" in name:
        return 1 + noise
    if weight.squeeze().ndim <= 1:
        return _vector(name, weight, noise)
    if "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        return 0.3 * noise
    gain = 1.5 if any(look in name for look in LOOKS) else 1.0
    return gain * noise / weight.shape[-1] ** 0.5


def _vector(name: str, weight: Tensor, noise: Tensor) -> Tensor:
    """Biases, norms and scales: near where they start, and no two alike. Spread out ones are left as they are."""
    if weight.numel() > 1 and weight.std() > 0.1:
        return weight
    start = 1.0 if "scale" in name else weight.mean()
    return start + 0.2 * noise
