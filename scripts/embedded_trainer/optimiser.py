"""Muon for matrices, AdamW for the rest, on float32 masters of the weights that are used.

Always true:
  * the masters are the truth; the working weights are their rounding;
  * the state is plain tensors under the weights' names, so a checkpoint is a safetensors file.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from .network import Weights
from .tokens import Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a run learns. The defaults are the shipped model's."""

    steps: int
    seed: int = 0
    rate: float = 1.8e-2
    last_rate: float = 0.02  # share of `rate` at the last step
    warm_up: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    step_tokens: int = 4096
    window: int = 512
    long_window: int = 1024
    long_share: float = 0.1  # of the steps, at the end
    test_share: float = 0.45  # of the windows, from the library's own tests
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95

    def rate_at(self, step: int) -> float:
        """Up over the first steps, then down in a straight line."""
        line = 1 - (1 - self.last_rate) * step / max(1, self.steps - 1)
        return self.rate * line * min(1.0, (step + 1) / self.warm_up)

    def window_at(self, step: int) -> int:
        return self.long_window if step >= self.steps * (1 - self.long_share) else self.window

    def batch(self, mixture: Mixture, step: int, length: int) -> Tensor:
        """The windows of a step, cut to `length` tokens; the recipe and the step's number decide them. -> [B,length]"""
        return mixture.batch(self.step_tokens // self.window_at(step), length, (self.seed << 32) + step)


def orthogonal(matrices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[N,A,B] -> the same with all singular values near one (five quintic Newton-Schulz steps in `dtype`)."""
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class Optimiser:
    """Owns the masters and the moments; `step` takes the gradients of the working weights, which are of `dtype`."""

    def __init__(self, masters: Weights, recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> None:
        self.masters, self.recipe, self.dtype, self.taken = masters, recipe, dtype, 0
        self.by_size: dict[torch.Size, list[str]] = defaultdict(list)
        for name, weight in masters.items():
            if weight.dim() == 2 and "embed_tokens" not in name:
                self.by_size[weight.shape].append(name)
        matrices = {name for names in self.by_size.values() for name in names}
        self.others = [name for name in masters if name not in matrices]
        self.first = {name: torch.zeros_like(weight) for name, weight in masters.items()}
        self.second = {name: torch.zeros_like(masters[name]) for name in self.others}

    def working(self) -> Weights:
        """Leaves to differentiate by."""
        return {name: w.to(self.dtype, copy=True).requires_grad_() for name, w in self.masters.items()}

    @torch.no_grad()
    def step(self, working: Weights) -> float:
        """One update from `working`'s gradients, which are cleared; returns their norm before clipping."""
        grads = {}
        for name, weight in working.items():
            assert weight.grad is not None, f"no gradient reached {name}"
            grads[name], weight.grad = weight.grad.float(), None
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        shrink = min(1.0, self.recipe.clip / (norm + 1e-6))
        rate = self.recipe.rate_at(self.taken)
        self.taken += 1
        for size, names in self.by_size.items():
            self._muon(size, names, grads, rate)
        for name in self.others:
            self._adam(name, grads[name] * shrink, rate)
        for name, weight in working.items():
            weight.copy_(self.masters[name])
        return norm

    def _muon(self, size: torch.Size, names: list[str], grads: Weights, rate: float) -> None:
        beta = self.recipe.momentum
        pushes = []
        for name in names:
            moment = self.first[name].lerp_(grads[name], 1 - beta)
            pushes.append(grads[name].lerp(moment, beta))
        scale = max(1.0, size[0] / size[1]) ** 0.5
        for name, update in zip(names, orthogonal(torch.stack(pushes), self.dtype), strict=True):
            master = self.masters[name]
            master.mul_(1 - rate * self.recipe.weight_decay).add_(update.float(), alpha=-rate * scale)

    def _adam(self, name: str, grad: Tensor, rate: float) -> None:
        beta1, beta2 = self.recipe.beta1, self.recipe.beta2
        master = self.masters[name]
        first = self.first[name].lerp_(grad, 1 - beta1)
        second = self.second[name].lerp_(grad.square(), 1 - beta2)
        update = (first / (1 - beta1**self.taken)) / ((second / (1 - beta2**self.taken)).sqrt() + 1e-8)
        if master.dim() > 1:
            master.mul_(1 - rate * self.recipe.weight_decay)
        master.add_(update, alpha=-rate)

    def tensors(self) -> Weights:
        """Everything a checkpoint must hold, by name; the tensors are ours, to be read only."""
        parts = {"master": self.masters, "first": self.first, "second": self.second}
        return {f"{part}:{name}": tensor for part, group in parts.items() for name, tensor in group.items()}

    def restore(self, tensors: Weights, taken: int) -> None:
        """The inverse of `tensors`; the checkpoint must hold exactly our names and sizes."""
        ours = self.tensors()
        if ours.keys() != tensors.keys() or any(ours[name].shape != tensors[name].shape for name in ours):
            raise ValueError("the checkpoint is of another network; use another --work or delete it")
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])
        self.taken = taken
