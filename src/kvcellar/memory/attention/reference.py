"""reference: attention in float64 over a dense mask. Slow and obvious; it judges the other backends."""

from typing import get_args

import torch
from torch import Tensor

from kvcellar.memory.kv.history import GroupStep, LayerHistory, StepTables
from kvcellar.memory.plan import GroupPlan
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Kind, Scoring


class Reference:
    """Serves everything there is; costs T x N for every head."""

    name = "reference"
    arrangement: Arrangement = "token"
    kinds: frozenset[Kind] = frozenset(get_args(Kind))

    def refuse(self, spec: AttentionSpec) -> str | None:
        return spec.unreadable(self.kinds)

    def prepare(self, plan: GroupPlan, tables: StepTables) -> None:
        return None

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        k, v, visible = history.dense()  # [N,G,D], [N,G,Dv], [T,N]
        return attend_dense(q[0], k, v, visible, scoring).contiguous()[None]

    def attend_latent(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        latents, tails, visible = history.dense()
        return attend_dense(q[0], torch.cat([latents, tails], -1), latents, visible, scoring).contiguous()[None]

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, step: GroupStep, scoring: Scoring) -> Tensor:
        return attend_dense(q, k, v, step.columns.visible, scoring)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """q [T,H,D], k [N,G,D], v [N,G,Dv], visible [T,N] -> [T,H,Dv]; query head h reads KV head h // (H/G)."""
    heads = q.shape[1]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if scoring.sinks is not None:
        sink = scoring.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]].masked_fill(~visible, 0)  # a row that sees nothing is all NaN
    return torch.einsum("htn,nhe->the", weights, v).to(q.dtype)
