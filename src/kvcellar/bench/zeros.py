"""zeros: what is stored where only cells, tables and plans matter, not the keys and values in them."""

import torch

from kvcellar.cache.memory import Memory
from kvcellar.plan import Plan


def put_zeros(memory: Memory, plan: Plan) -> None:
    """Store zeros [T,heads,size] in every plane of every layer for the T tokens that the open step of `plan` stores.

    On the memory's own device, the meta device too. `commit` accepts the step then.
    """
    for group in memory.storage.groups:
        planes = () if group.of_input else group.planes
        for plane in planes:
            zeros = torch.zeros(plan.stored, plane.heads, plane.size, dtype=memory.dtype, device=memory.device)
            for layer in group.layers:
                memory.put(layer, **{plane.name: zeros})
