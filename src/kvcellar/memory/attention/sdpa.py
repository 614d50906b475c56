"""sdpa: attention in plain torch, on any device. On a CPU in products (`products.py`), where what counts is how much is
computed and copied; elsewhere in few calls (`memory/attention/buckets.py`).
"""

from typing import get_args

import torch
from torch import Tensor

from kvcellar.memory.attention import products
from kvcellar.memory.attention.buckets import Bucket, Buckets, attend_dense, buckets
from kvcellar.memory.attention.products import Products, part
from kvcellar.memory.kv.history import GroupStep, LayerHistory, StepTables
from kvcellar.memory.plan import GroupPlan
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Kind, Scoring


class Sdpa:
    """Any device, any float type, any head sizes, any storage: what is quantised is read into floats, once a step."""

    name = "sdpa"
    arrangement: Arrangement = "head"
    kinds: frozenset[Kind] = frozenset(get_args(Kind))

    def __init__(self, *, fused: bool | None = None) -> None:
        """`fused`: in few calls. None: off the CPU."""
        self._fused = fused

    def refuse(self, spec: AttentionSpec) -> str | None:
        if spec.query_heads % spec.kv_heads:
            return f"{spec.query_heads} query heads cannot share {spec.kv_heads} KV heads evenly"
        return spec.unreadable(self.kinds)

    def fuses(self, device: torch.device) -> bool:
        """Whether it attends in few calls there (`memory/attention/buckets.py`)."""
        return device.type != "cpu" if self._fused is None else self._fused

    def prepare(self, plan: GroupPlan, tables: StepTables) -> Bucket | Buckets | Products:
        if self.fuses(tables.device):
            return buckets(plan, tables)
        return Products([part(plan.layout, segment, tables.device) for segment in plan.segments])

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        return history.step.prepared.attend(q, history, scoring)

    def attend_latent(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        latents, tails, _ = history.dense()
        keys, values = torch.cat([latents, tails], -1).to(q.dtype), latents.to(q.dtype)
        return self.attend_dense(q[0], keys, values, history.step, scoring)[None]

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, step: GroupStep, scoring: Scoring) -> Tensor:
        visible = step.columns.visible
        dense = attend_dense if self.fuses(q.device) else products.attend_dense
        return dense(q, k, v, visible, scoring).masked_fill_(~visible.any(-1)[:, None, None], 0)
