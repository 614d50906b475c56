"""latent_attention: find out how modules compute keys and values from what is stored, by running their own code.

In one forward each module gets latents of our choice instead of stored ones: the rows of an identity matrix, whose keys
and values are the matrices that it multiplies with; a zero; and random latents, whose keys and values must be those of
the matrices, as exactly as their type allows, or layers of ours that round their inputs to 8 bits. Code that does
anything else is not linear, and keeps expanding.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.seam import Binding, Extras, Latent
from kvcellar.engine.models.shape import PROBE_TOKENS, StoreProbe, probe
from kvcellar.errors import KvcellarError
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import FOREIGN, PACKED, HeadsKernel, OwnLinear, panel_heads

RANDOM = 16  # latents
CHILD = "kvcellar_latent"  # name of what is added to an attention module
ERROR = 1e-5  # of a float32 sum, relative to the sum of its products' sizes
ROUNDED = 1 / 127  # of an input that a layer rounds, relative to the largest one, its scale's rounding included


class NotLinear(KvcellarError):
    """Keys or values are computed in another way than by matrices. The message has the reason."""


class _Probe(StoreProbe):
    """Gives modules that compute keys our latents, and keeps the matrices with which they do."""

    def __init__(self, bindings: Mapping[nn.Module, Binding], kernel: HeadsKernel) -> None:
        super().__init__()
        self.found: dict[nn.Module, Latent] = {}
        self._bindings, self._kernel = bindings, kernel
        self._expanded = {binding.layer for binding in bindings.values() if not binding.direct}
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, latents [n,rank] and tails [n,size]

    def update(self, k: Tensor, v: Tensor, layer: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        super().update(k, v, layer)
        if layer not in self._expanded:
            return k, v
        if k.shape[1] != 1 or v.shape[1] != 1:
            raise NotLinear(f"layer {layer} stores latents of {k.shape[1]} and {v.shape[1]} heads")
        latents, tails = self._given[layer] = _chosen(k, v)
        return latents[None, None], tails[None, None]

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extras: Extras) -> Tensor:
        binding = self._bindings[module]
        if not binding.direct:
            try:
                if q.shape[1] != k.shape[1]:
                    raise NotLinear(f"has {q.shape[1]} heads of queries, and computes {k.shape[1]} of keys")
                found = _matrices(*self._given[binding.layer], k, v, ROUNDED if _rounds(module) else 0.0)
                self.found[module] = found.packed(self._kernel)
            except NotLinear as error:
                raise NotLinear(f"{type(module).__name__} {error}") from error
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        return torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device)


def _chosen(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Latents and tails [n,size] in the type of those that a layer stores: each row of two identity matrices, beside
    zeros; a zero; random ones, whose elements differ in size as those of real latents do."""
    rank, size = k.shape[3], v.shape[3]
    draw = torch.Generator("cpu").manual_seed(0)
    one, other = (torch.randn(RANDOM, rank + size, generator=draw, device="cpu") for _ in range(2))
    known = torch.eye(rank + size + 1, rank + size, device="cpu")  # the last row is zero
    rows = torch.cat([known, one * other.exp()])
    return rows[:, :rank].to(k), rows[:, rank:].to(v)


class _Matrices(NamedTuple):
    """Of the heads: keys [H,rank,n] of which n elements are computed, values [H,rank,Dv]."""

    keys: Tensor
    values: Tensor
    tail: int

    def packed(self, kernel: HeadsKernel) -> Latent:
        queries = panel_heads(kernel, self.keys, self.tail)
        return Latent(queries, panel_heads(kernel, self.values.transpose(1, 2).contiguous()))


def _rounds(module: nn.Module) -> bool:
    """Whether layers of ours in a module round their inputs."""
    return any(isinstance(one, OwnLinear) and one.rounds for one in module.modules())


def _matrices(latents: Tensor, tails: Tensor, k: Tensor, v: Tensor, rounded: float) -> _Matrices:
    """From keys k [1,H,n,D] and values v [1,H,n,Dv] of chosen latents. `rounded`: the error that latents may have where
    they are expanded, relative to their largest element. Raises `NotLinear`."""
    (n, rank), size = latents.shape, tails.shape[1]
    if k.shape[::2] != (1, n) or v.shape[:3] != k.shape[:3] or not k.dtype is v.dtype is latents.dtype:
        raise NotLinear(f"attends to keys {tuple(k.shape)} and values {tuple(v.shape)}, computed from {n} latents")
    keys, values, computed = k[0], v[0], k.shape[3] - size
    if computed < 1:
        raise NotLinear(f"attends to keys of {k.shape[3]} elements, {size} of them stored as they are")
    zero = rank + size
    if keys[:, zero].any() or values[:, zero].any():
        raise NotLinear("adds something to keys or values that does not depend on what is stored")
    if values[:, rank:zero].any() or keys[:, rank:zero, :computed].any():
        raise NotLinear("computes keys or values from both parts of what is stored")
    if keys[:, :rank, computed:].any() or not torch.equal(
        keys[:, rank:zero, computed:], tails[rank:zero].expand_as(keys[:, rank:zero, computed:])
    ):
        raise NotLinear("does not have the stored part of a key behind the computed one, as it is")
    found = _Matrices(keys[:, :rank, :computed].contiguous(), values[:, :rank].contiguous(), size)
    exact = torch.equal(keys[:, zero:, computed:], tails[zero:].expand_as(keys[:, zero:, computed:]))
    if not exact or not all(
        _is_product(latents[zero:], matrix, made[:, zero:], rounded)
        for matrix, made in ((found.keys, keys[..., :computed]), (found.values, values))
    ):
        raise NotLinear("computes keys or values that are not linear in what is stored, or rounds them on the way")
    return found


def _is_product(latents: Tensor, matrix: Tensor, made: Tensor, rounded: float) -> bool:
    """Whether `made` [H,m,n] are latents [m,rank] times a matrix [H,rank,n], rounded once to their type."""
    latents, wide = latents.double(), matrix.double()
    sizes = ERROR * latents.abs() + rounded * latents.abs().amax(1, keepdim=True)
    bound = torch.finfo(made.dtype).eps * (latents @ wide).abs() + sizes @ wide.abs()
    return bool(((latents @ wide - made).abs() <= bound).all())


def with_latents(guest: Guest, environment: Mapping[str, str] = os.environ) -> Mapping[nn.Module, Binding]:
    """The bindings of a guest whose modules that compute keys attend to latents. Each gets a child, which
    `without_latents` takes away. Raises `NotLinear` with the reason why they expand; what code of the model raises."""
    bindings = guest.shape.bindings
    if guest.device.type != "cpu" or guest.dtype not in PACKED:
        raise NotLinear(
            f"heads are multiplied by our own kernel, on CPUs in float32 or bfloat16 only, not {guest.dtype}"
        )
    try:
        kernel = HeadsKernel(environment)
    except NotCompiled as error:
        raise NotLinear(str(error)) from error
    if guest.dtype is torch.bfloat16 and kernel.linear.multiplies == FOREIGN:
        raise NotLinear("this CPU has instructions for bfloat16 that torch uses, and our kernel does not")
    door = _Probe(bindings, kernel)
    probe(guest.model, door, range(PROBE_TOKENS))
    if missing := {module for module, binding in bindings.items() if not binding.direct} - door.found.keys():
        raise NotLinear(f"{type(next(iter(missing))).__name__} did not attend in a second forward")
    for module, latent in door.found.items():
        module.add_module(CHILD, latent)
    return {module: replace(binding, latent=door.found.get(module)) for module, binding in bindings.items()}


def without_latents(guest: Guest) -> None:
    """Take away the children that modules got."""
    for module in guest.shape.bindings:
        module._modules.pop(CHILD, None)
