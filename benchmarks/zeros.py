"""zeros: writes zeros as K/V, for workloads that measure cells, tables and plans only."""

import torch

from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan


def put_zeros(memory: Memory, plan: Plan) -> None:
    """Write zeros [T,heads,size] to every plane of every layer for the T tokens of the open step, so that it can be
    committed. Works on every device, including meta."""
    for group in memory.storage.groups:
        planes = () if group.of_input else group.planes
        for plane in planes:
            zeros = torch.zeros(plan.stored, plane.heads, plane.size, dtype=memory.dtype, device=memory.device)
            for layer in group.layers:
                memory.put(layer, **{plane.name: zeros})
