"""packing: weights of a CPU model, reordered once at load: those of experts, of routers and of linear layers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvcellar.kernels.packed import Packing, pack
from kvcellar.models.experts import pack_experts
from kvcellar.models.routers import wrap_routers


@dataclass(frozen=True, slots=True)
class Packed:
    """What was packed: linear layers; the bytes of experts, or why they stay as they are; the number of routers, or why
    there are none."""

    linears: Packing
    experts: int | str
    routers: int | str

    @property
    def bytes(self) -> int:
        """Bytes of all packed weights, but for those of routers."""
        return self.linears.bytes + (self.experts if isinstance(self.experts, int) else 0)


def pack_model(model: PreTrainedModel, *, environment: Mapping[str, str] = os.environ) -> Packed:
    """Replace layers of a CPU model in place, one after the other. `environment` is for the compiler."""
    _turn(model)
    experts = pack_experts(model, environment)
    return Packed(pack(model, environment=environment), experts, wrap_routers(model, environment))


def _turn(model: PreTrainedModel) -> None:
    """Replace each `Conv1D` (GPT-2), whose weight is [in,out], by a linear layer that shares its memory."""
    for name, module in [*model.named_modules()]:
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if type(module) is not Conv1D or hooked:
            continue
        parent, _, leaf = name.rpartition(".")
        linear = nn.Linear(module.nx, module.nf, device="meta")
        linear.weight = nn.Parameter(module.weight.detach().T, requires_grad=False)
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
        setattr(model.get_submodule(parent), leaf, linear)
