"""served: linear layers and experts of a network that compute with codes, of the files or made at load.

Weights of these layers are read one by one, after all others, and never in another form than their codes. Until then
the network has a stand-in for each: a zero that is expanded to its shape.

Made at load are the same layers that `kvcellar create --quantize` writes, by the same rules without data. With codes
from either, the output head has 8 bits, too; an embedding that is the same weight stays as it is for lookups.

The experts of a module are replaced together, or stay dense. A weight of an expert is a stored matrix, or several that
transformers joins along outputs (gate and up), or a part of a stored stack [E,o,i].
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.engine.models.described import AsStored, Served
from kvcellar.engine.models.quantize.formats.part import DecodedCodes
from kvcellar.engine.models.quantize.kinds import AUTO, DENSE, INT8, QUANTISED, CodesKind
from kvcellar.engine.models.quantize.rounding import check_finite, codes_of, eight_bits
from kvcellar.engine.models.quantize.selection import FEWEST, choose
from kvcellar.engine.models.weights.packing import expert_modules, serve_experts, weights_of
from kvcellar.engine.models.weights.weights_files import Stored, WeightsFiles
from kvcellar.engine.models.weights.weights_loading import plain_targets, stacked_targets
from kvcellar.errors import BadRequest, first_few
from kvcellar.kernels.arena import Arena
from kvcellar.kernels.codes import Coded, Codes, side_by_side
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import ExpertsKernel, OwnExperts
from kvcellar.kernels.quantised import ARITHMETIC, QuantisedKernel, QuantisedLinear, coded_layers, most_bytes

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
                continue
            whole = weights.slices.get(own.get(target, ""))
            if isinstance(whole, DecodedCodes) and whole.part.transposed == module.is_transposed:
                stacks.append(Stack(place, name, stack=own[target]))
        if len(stacks) == len(weights_of(module)):
            found += stacks
    return found


def layers_of(
    stack: Stack, module: Any, slices: Mapping[str, Any], read: Read, kernels: tuple[ExpertsKernel, QuantisedKernel]
) -> list[QuantisedLinear] | str:
    """The layers of a stack, or why it is dense."""

    def joined(expert: int) -> Codes | str:
        return side_by_side(map(read, stack.matrices[expert]))

    weight = module._parameters[stack.name]
    biases = getattr(module, f"{stack.name}_bias").detach() if module.has_bias else None
    of = slices[stack.stack].experts() if stack.stack else joined
    return coded_layers(kernels[1], len(weight), of, biases, weight.dtype)


def dense_stack(stack: Stack, slices: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The same weights as the network has them without codes."""
    if stack.stack:
        return slices[stack.stack].rounded(dtype)[...]
    return torch.stack([torch.cat([slices[name][...].to(dtype) for name in names]) for names in stack.matrices])


_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LEFT = "it is not the weight of a linear layer, nor of experts all of which have codes"


@dataclass(frozen=True, slots=True)
class Coding:
    """Layers that are going to be replaced: modules by the stored name of their weight, and stacks of experts."""

    kernels: tuple[ExpertsKernel, QuantisedKernel]
    kinds: Mapping[str, str]  # what the weights of each are rounded to; `AUTO`: the file has codes
    modules: Mapping[str, str]
    stacks: Sequence[Stack]
    slices: Mapping[str, Any]
    setting: str

    def codes(self, name: str) -> Codes | str:
        """The codes of one weight, or why it is dense."""
        return codes_of(name, self.slices[name], self.kinds[name])

    @property
    def left(self) -> list[str]:
        """Stored names of weights with codes that are dense, since they are in none of these."""
        later = self.later
        return [name for name in self.kinds if isinstance(self.slices[name], Coded) and name not in later]

    @property
    def later(self) -> set[str]:
        """Stored names of all that is read after the other weights."""
        return {*self.modules, *(name for stack in self.stacks for name in stack.stored)}


def kernels_for(device: torch.device, environment: Mapping[str, str]) -> tuple[ExpertsKernel, QuantisedKernel] | str:
    """The kernels, or the reason why quantised weights cannot be multiplied."""
    if device.type != "cpu":
        return f"products of quantised weights are computed on CPUs, not on {device.type}"
    try:
        return ExpertsKernel(environment), QuantisedKernel(environment)
    except NotCompiled as error:
        return f"the kernel for quantised weights is not compiled: {error}"


def coding_of(
    skeleton: PreTrainedModel, weights: WeightsFiles, setting: str, device: torch.device, environment: Mapping[str, str]
) -> Coding | str | None:
    """What to replace; None: nothing; a text: why codes of the files are served dense. Raises `BadRequest` if the
    setting cannot be followed."""
    coded = [name for name in weights.tensors if isinstance(weights.slices[name], Coded)]
    if setting == DENSE or (setting == AUTO and not coded):
        return None
    if setting in QUANTISED and coded:
        raise BadRequest(
            f"weights is {setting}, but {weights.path.name} has quantised weights, such as {first_few(sorted(coded))}. "
            f"Use {AUTO} or {DENSE}, or a model that is not quantised",
            "weights",
        )
    kernels = kernels_for(device, environment)
    if isinstance(kernels, str):
        if setting == AUTO:
            return kernels
        raise BadRequest(f"weights cannot be {setting}: {kernels}. Use {AUTO} or {DENSE}", "weights")
    plain = plain_targets(skeleton, weights)
    if setting == AUTO:
        kinds = dict.fromkeys(coded, AUTO)
    else:
        kinds = choose(skeleton, weights, setting).kinds
    linear = _linear_layers(skeleton)
    places = {name: plain[name].removesuffix(".weight") for name in kinds if plain.get(name, "").endswith(".weight")}
    parts = Counter(places.values())
    modules = {
        name: place
        for name, place in places.items()
        if parts[place] == 1 and place in linear and linear[place].weight.shape == weights.tensors[name].shape
    }
    stacks = stacks_of(skeleton, weights, plain, kinds.__contains__)
    if setting in QUANTISED and not (modules or stacks):
        raise BadRequest(
            f"weights cannot be {setting}: {type(skeleton).__name__} has no linear layers or experts that are "
            f"quantised (layers with transposed weights, as GPT-2 has, are not, nor are small ones). Use {AUTO} or "
            f"{DENSE}",
            "weights",
        )
    return Coding(kernels, kinds, modules, stacks, weights.slices, setting)


def given(network: PreTrainedModel, setting: str, environment: Mapping[str, str]) -> Served | None:
    """Replace layers of a network that was given. Raises `BadRequest`."""
    tensors = {name: one for name, one in network.state_dict().items() if one.dtype in _STORED}
    stored = {name: Stored("", tuple(one.shape), _STORED[one.dtype]) for name, one in tensors.items()}
    weights = WeightsFiles(Path(type(network).__name__), stored, tensors, {}, ())
    coding = coding_of(network, weights, setting, network.device, environment)
    return replaced(network, coding) if isinstance(coding, Coding) else None


@torch.no_grad()
def replaced(network: PreTrainedModel, coding: Coding) -> Served:
    """Replace the layers and the output head, one by one. Raises `ModelRefused` for weights that are not finite."""
    linear, dense = _linear_layers(network), dict.fromkeys(coding.left, _LEFT)
    made: dict[str, QuantisedLinear] = {}
    head = [
        place
        for place, one in linear.items()
        if one is network.get_output_embeddings()
        and one.weight.numel() >= FEWEST
        and place not in coding.modules.values()
    ]
    arena = Arena(sum(most_bytes(*linear[place].weight.shape) for place in (*coding.modules.values(), *head)))

    def put(place: str, codes: Codes) -> None:
        layer, (parent, _, leaf) = linear[place], place.rpartition(".")
        made[place] = QuantisedLinear(coding.kernels[1], codes, layer.bias, layer.weight.dtype, arena)
        setattr(network.get_submodule(parent), leaf, made[place])

    for name, place in coding.modules.items():
        codes = coding.codes(name)
        if isinstance(codes, str):
            weight: Tensor = coding.slices[name][...].to(network.dtype)
            check_finite(name, weight)
            linear[place].weight = nn.Parameter(weight, requires_grad=False)
            dense[name] = codes
        else:
            put(place, codes)
    stacks = list(_replaced_stacks(network, coding, dense))
    for place in head if made or stacks else ():
        put(place, eight_bits(linear[place].weight))
    if stacks:
        serve_experts(network)
    everything = [*([one] for one in made.values()), *stacks]
    bits = Counter(min(one.bits for one in layers) for layers in everything)
    identity = f"{coding.setting}, arithmetic {ARITHMETIC}" if everything else ""
    return Served(bits, sum(one.nbytes for layers in everything for one in layers), dense, identity)


def _replaced_stacks(
    network: PreTrainedModel, coding: Coding, dense: dict[str, str]
) -> Iterator[list[QuantisedLinear]]:
    """Replace the weights of experts; where those of a module have no codes, their dense weights are read, and the
    reason is added to `dense`."""
    for place in dict.fromkeys(stack.module for stack in coding.stacks):
        module: Any = network.get_submodule(place)
        stacks = [stack for stack in coding.stacks if stack.module == place]
        found = [layers_of(one, module, coding.slices, coding.codes, coding.kernels) for one in stacks]
        why = next((one for one in found if isinstance(one, str)), None)
        for stack, layers in zip(stacks, found, strict=True):
            if why is None and not isinstance(layers, str):
                del module._parameters[stack.name]
                setattr(module, stack.name, OwnExperts(coding.kernels[0], layers))
                yield layers
            else:
                weight = dense_stack(stack, coding.slices, network.dtype)
                check_finite(stack.stored[0], weight)
                setattr(module, stack.name, nn.Parameter(weight, requires_grad=False))
                dense |= dict.fromkeys(stack.stored, why or "")


def sources_with_codes(
    sources: Mapping[str, AsStored | None], network: PreTrainedModel, weights: WeightsFiles, coding: Coding
) -> dict[str, AsStored | None]:
    """How parameters are stored, `sources`, once layers were replaced."""
    found, names = dict(sources), {place: name for name, place in coding.modules.items()}
    for place, module in network.named_modules():
        if not isinstance(module, QuantisedLinear):
            continue
        plain, dtype, kind = found.get(f"{place}.weight"), str(module.dtype).removeprefix("torch."), INT8
        if (name := names.get(place)) is not None:
            kind = coding.kinds[name]
        elif plain is not None and weights.tensors[plain.name].dtype == _STORED[module.dtype]:
            name = plain.name  # of the output head, which is rounded in the type of the network
        found[f"{place}.weight"] = None if name is None else AsStored(name, dtype, cast(CodesKind, kind))
    for stack in coding.stacks:
        place, kinds = f"{stack.module}.{stack.name}", {coding.kinds.get(name) for name in stack.stored}
        experts = getattr(network.get_submodule(stack.module), stack.name)
        if isinstance(experts, OwnExperts):
            dtype, (kind, *others) = str(experts.dtype).removeprefix("torch."), kinds
            one_kind = stack.matrices and not others
            found[place] = AsStored("", dtype, cast(CodesKind, kind), stack.matrices) if one_kind else None
    return found


def _linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Those whose `forward` is that of `nn.Linear` and nothing else."""
    return {
        name: module
        for name, module in network.named_modules()
        if type(module) is nn.Linear
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
    }
