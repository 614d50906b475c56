"""stacks: experts of a network that compute with codes: where the weights of each are, and the layers made of them.

The experts of a module are replaced together, or stay dense. A weight of an expert is a stored matrix, or several that
transformers joins along outputs (gate and up), or a part of a stored stack [E,o,i].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.kernels.arena import Arena
from kvcellar.kernels.codes import Coded, Codes, side_by_side
from kvcellar.kernels.experts import Kernel, OwnExperts
from kvcellar.kernels.quantised import Kernel as QuantisedKernel
from kvcellar.kernels.quantised import QuantisedLinear, most_bytes, unfit
from kvcellar.models.experts import expert_modules, weights_of
from kvcellar.models.weights_files import WeightsFiles
from kvcellar.models.weights_loading import stacked_targets

Read = Callable[[str], Codes | str]  # the codes of a stored matrix by its name


@dataclass(frozen=True, slots=True)
class Stack:
    """The weights that experts of a module have under one name: the stored matrices of each expert, whose outputs are
    side by side; or a stored stack."""

    module: str
    name: str
    matrices: tuple[tuple[str, ...], ...] = ()  # [E][parts]
    stack: str = ""

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of all that it is read from."""
        return tuple(name for expert in self.matrices for name in expert) or (self.stack,)


def stacks_of(
    skeleton: PreTrainedModel, weights: WeightsFiles, plain: Mapping[str, str], wanted: Callable[[str], bool]
) -> list[Stack]:
    """Of modules all of whose weights have codes, or are `wanted` to get some. `plain` are the stored tensors that are
    loaded as they are."""
    joined, own = stacked_targets(skeleton, weights), {target: name for name, target in plain.items()}
    found: list[Stack] = []
    for place, module in expert_modules(skeleton):
        stacks: list[Stack] = []
        for name in weights_of(module):
            target = f"{place}.{name}"
            stack = Stack(place, name, tuple(map(tuple, joined.get(target, ()))))
            if stack.matrices and not module.is_transposed and all(map(wanted, stack.stored)):
                stacks.append(stack)
            elif isinstance(weights.slices.get(own.get(target, "")), Coded) and _fits(weights, own[target], module):
                stacks.append(Stack(place, name, stack=own[target]))
        if len(stacks) == len(weights_of(module)):
            found += stacks
    return found


def _fits(weights: WeightsFiles, name: str, module: Any) -> bool:
    """Whether a stored stack has its inputs where the codes of its experts have them: `transposed` in `Part`."""
    return weights.slices[name].part.transposed == module.is_transposed


@dataclass(frozen=True, slots=True)
class Made:
    """The layers of experts under one name."""

    experts: OwnExperts
    bits: int
    nbytes: int


def layers_of(
    stack: Stack, module: Any, slices: Mapping[str, Any], read: Read, kernels: tuple[Kernel, QuantisedKernel]
) -> Made | str:
    """The layers of a stack, or why it is dense."""
    of = slices[stack.stack].experts() if stack.stack else partial(_expert, stack.matrices, read)
    shape, dtype = module._parameters[stack.name].shape, module._parameters[stack.name].dtype
    outputs, inputs = shape[:0:-1] if module.is_transposed else shape[1:]
    biases = getattr(module, f"{stack.name}_bias").detach() if module.has_bias else None
    arena = Arena(shape[0] * most_bytes(outputs, inputs))
    layers: list[QuantisedLinear] = []
    for expert in range(shape[0]):
        codes = of(expert)
        why = codes if isinstance(codes, str) else unfit(codes)
        if isinstance(codes, str) or why is not None:
            return str(why)
        assert codes.values.shape == (outputs, inputs)
        bias = None if biases is None else biases[expert].clone()
        layers.append(QuantisedLinear(kernels[1], codes, bias, dtype, arena))
    return Made(OwnExperts(kernels[0], layers), min(one.bits for one in layers), sum(one.nbytes for one in layers))


def _expert(matrices: Sequence[Sequence[str]], read: Read, expert: int) -> Codes | str:
    parts: list[Codes] = []
    for name in matrices[expert]:
        part = read(name)
        if isinstance(part, str):
            return part
        parts.append(part)
    return side_by_side(parts)


def dense_stack(stack: Stack, slices: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The same weights as the network has them without codes."""
    if stack.stack:
        return slices[stack.stack].rounded(dtype)[...]
    return torch.stack([torch.cat([slices[name][...].to(dtype) for name in names]) for names in stack.matrices])


def by_module(stacks: Sequence[Stack], network: nn.Module) -> Iterator[tuple[Any, list[Stack]]]:
    """Each module and its stacks."""
    for place in dict.fromkeys(stack.module for stack in stacks):
        yield network.get_submodule(place), [stack for stack in stacks if stack.module == place]
