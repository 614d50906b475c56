"""packing: weights of a CPU model, reordered once at load: those of experts, of routers and of linear layers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

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
    experts = pack_experts(model, environment)
    return Packed(pack(model, environment=environment), experts, wrap_routers(model, environment))
