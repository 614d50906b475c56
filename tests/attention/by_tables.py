"""The kernel for GPUs in plain torch: reads nothing but the tables and planes that a launch gets."""

import torch

from kvcellar.memory.attention.blocks import SPLIT, Call
from kvcellar.memory.attention.reference import attend_dense


def attend(call: Call) -> None:
    """By operators with fixed shapes, that a graph can record: `call.out` [T,H,Dv]."""
    bounds, device = call.prepared.bounds, call.q.device
    spare = torch.cat([call.out, call.out[:1]])  # [T+1,H,Dv]: the last row is written for rows that there are not
    for one in call.prepared.launches:
        row, count, base = one.blocks.unbind(1)
        rows = row[:, None] + torch.arange(one.rows, device=device)
        alive = torch.arange(one.rows, device=device) < count[:, None]  # [B,R]
        low, end = bounds[torch.where(alive, rows, 0)].unbind(-1)
        first = bounds[row, :1] // SPLIT * SPLIT
        pos = first + torch.arange(one.splits * SPLIT, device=device)  # [B,N]
        seen = (pos[:, None] >= low[..., None]) & (pos[:, None] < end[..., None]) & alive[..., None]  # [B,R,N]
        cells = call.prepared.cells[torch.where(seen.any(1), base[:, None] + pos, 0)]
        for number in range(len(row)):
            k, v = (stored.read(cells[number], torch.float64).transpose(0, 1) for stored in (call.keys, call.values))
            q = spare.new_zeros(()).double() + call.q[torch.where(alive[number], rows[number], 0)]
            q = q if not call.keys.storage.hadamard else call.keys.meet(q)
            got = attend_dense(q, k, v.nan_to_num(), seen[number], call.scoring)
            places = torch.where(alive[number], rows[number], len(call.out))
            spare.index_copy_(0, places, got.to(spare.dtype))
    call.out.copy_(spare[:-1])
