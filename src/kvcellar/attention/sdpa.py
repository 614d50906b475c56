"""sdpa: portable attention in plain torch, sequence by sequence, on the cells where they are.

On a CPU it is two matrix products around a softmax, for a block of rows at a time: scores in float32, weights in the
type of the values. That is as exact there as torch's scaled_dot_product_attention, and up to three times as fast
(`docs/log.md`). Elsewhere it is scaled_dot_product_attention, except with softcap or sinks, which that does not know.

The query heads that share a KV head are folded into rows that read it once.
"""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcellar.attention.parts import BLOCK, Block, Bundle, Cells, Part, Veil, parts
from kvcellar.contracts import Arrangement, Ask, History, Kind, Scoring, Stored, unread
from kvcellar.plan import GroupPlan


class Sdpa:
    """Any device, any float type, any head sizes, any storage: what is quantised is read into floats, once a step."""

    name = "sdpa"
    arrangement: Arrangement | Mapping[str, Arrangement] = "head"
    padding = 1
    kinds: frozenset[Kind] = frozenset(get_args(Kind))

    def __init__(self, *, fused: bool | None = None) -> None:
        """`fused`: use torch's scaled_dot_product_attention. None: off the CPU."""
        self._fused = fused

    def refuse(self, ask: Ask) -> str | None:
        if ask.query_heads % ask.kv_heads:
            return f"{ask.query_heads} query heads cannot share {ask.kv_heads} KV heads evenly"
        return unread(self, ask)

    def _fuses(self, device: torch.device) -> bool:
        return device.type != "cpu" if self._fused is None else self._fused

    def prepare(self, plan: GroupPlan, device: torch.device) -> list[Part | Bundle]:
        return parts(plan, device, bundles=not self._fuses(device))

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        keys, values = history.stored("k"), history.stored("v")
        out = q.new_empty(q.shape[0], q.shape[1], values.plane.size)  # [T,H,Dv]
        rows = _Rows(keys.meet(q), keys.plane.heads, scoring, fused=self._fuses(q.device))
        part: Part | Bundle
        for part in history.prepared:
            if isinstance(part, Part) and not part.blocks:
                out[part.start : part.end] = 0
                continue
            k, v = _read(keys, part.cells, rows.key_dtype), _read(values, part.cells, rows.value_dtype)
            if isinstance(part, Part):
                rows.attend(part.start, part.blocks, k, v, out)
            elif part.shared is None:
                out.index_copy_(0, part.rows, rows.bundle(part, k, v))
            else:
                first = _read(keys, part.shared, rows.key_dtype), _read(values, part.shared, rows.value_dtype)
                out.index_copy_(0, part.rows, rows.bundle(part, k, v, first))
        return out

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
        every = slice(0, k.shape[0])
        starts = range(0, q.shape[0], BLOCK)
        blocks = [Block(a, min(a + BLOCK, q.shape[0]), every, (Veil(every, ~visible[a : a + BLOCK]),)) for a in starts]
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])  # [T,H,Dv]
        rows = _Rows(q, k.shape[1], scoring, fused=self._fuses(q.device))
        rows.attend(0, blocks, k.transpose(0, 1).to(rows.key_dtype), v.transpose(0, 1).to(rows.value_dtype), out)
        return out.masked_fill_(~visible.any(-1)[:, None, None], 0)


def _read(stored: Stored, cells: Cells, dtype: torch.dtype) -> Tensor:
    """[heads,n,size] in `dtype`, of keys as they were rotated: a view where it is one run, stored so."""
    if not isinstance(cells, tuple):
        return stored.read(cells, dtype, rotated=True)
    n = sum(run.stop - run.start for run in cells)
    out = torch.empty(stored.plane.heads, n, stored.plane.size, dtype=dtype, device=stored.codes.device)
    plain = dtype if stored.storage.quantised else stored.codes.dtype  # a view, converted as it is copied
    at = 0
    for run in cells:
        end = at + run.stop - run.start
        out[:, at:end] = stored.read(run, plain, rotated=True)
        at = end
    return out


class _Rows:
    """The queries of a step, as the products want them: q [T,H,D] of which H/G heads share a KV head."""

    def __init__(self, q: Tensor, groups: int, scoring: Scoring, *, fused: bool) -> None:
        self._scoring, self._groups, self._dtype = scoring, groups, q.dtype
        self._fused = fused and scoring.softcap is None and scoring.sinks is None
        wide = torch.promote_types(q.dtype, torch.float32)
        # Products of float16 are a hundred times as slow as those of float32 on CPUs that do not know it.
        self.key_dtype = q.dtype if self._fused else wide
        self.value_dtype = wide if q.dtype is torch.float16 and not self._fused else q.dtype
        if not self._fused:
            q = q.to(wide) * scoring.scale
        self._q = q.view(q.shape[0], groups, -1, q.shape[-1])  # [T,G,H/G,D]

    def attend(self, start: int, blocks: Sequence[Block], k: Tensor, v: Tensor, out: Tensor) -> None:
        """The rows of a part that begins at `start`, over its k [G,N,D] and v [G,N,Dv], into out [T,H,Dv]."""
        for block in blocks:
            a, b = start + block.start, start + block.end
            if self._fused:
                out[a:b] = self._in_one_call(a, b, k, v, block)
            elif b - a == 1 and len(blocks) == 1 and not block.veils:  # a row behind other blocks may see less
                out[a] = self._one_row(a, k, v).view(out.shape[1:])
            else:
                out[a:b] = self._by_products(a, b, k[:, block.keys], v[:, block.keys], block.veils)

    def _one_row(self, row: int, k: Tensor, v: Tensor) -> Tensor:
        """[G,H/G,Dv], of a row that sees everything."""
        scores = torch.bmm(self._q[row], k.transpose(1, 2))  # [G,H/G,n]
        return torch.bmm(self._weights(scores[:, :, None])[:, :, 0].to(v.dtype), v)

    def _by_products(self, a: int, b: int, k: Tensor, v: Tensor, veils: Sequence[Veil]) -> Tensor:
        """[b-a,H,Dv], of rows a to b over k [G,n,D] and v [G,n,Dv]."""
        groups, length = self._groups, b - a
        rows = self._q[a:b].permute(1, 2, 0, 3).reshape(groups, -1, k.shape[-1])  # [G,H/G*L,D]
        scores = torch.bmm(rows, k.transpose(1, 2)).view(groups, -1, length, k.shape[1])  # [G,H/G,L,n]
        weights = self._weights(scores, veils).to(v.dtype).reshape(groups, -1, k.shape[1])
        seen = torch.bmm(weights, v)  # [G,H/G*L,Dv]
        return seen.view(-1, length, v.shape[-1]).transpose(0, 1)

    def bundle(self, bundle: Bundle, k: Tensor, v: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[B,H,Dv]: a row of each of B sequences, over what all share and its own of k [G,B*n,D] and v [G,B*n,Dv]."""
        q = self._q.index_select(0, bundle.rows).transpose(0, 1).contiguous()  # [G,B,H/G,D]
        groups, count, heads, size = q.shape
        k, v = (x.reshape(groups * count, x.shape[1] // count, x.shape[-1]) for x in (k, v))
        scores = torch.bmm(q.view(groups * count, heads, size), k.transpose(1, 2)).view(groups, count, heads, -1)
        before = 0 if shared is None else shared[0].shape[1]
        if shared is not None:
            first = torch.bmm(q.view(groups, count * heads, size), shared[0].transpose(1, 2))
            scores = torch.cat([first.view(groups, count, heads, before), scores], -1)
        weights = self._weights(scores, (bundle.veil,), sharing=2).to(v.dtype)  # [G,B,H/G,before+n]
        seen = torch.bmm(weights[..., before:].reshape(groups * count, heads, -1), v)
        if shared is not None:
            first = torch.bmm(weights[..., :before].reshape(groups, count * heads, before), shared[1])
            seen = first.view(seen.shape).add_(seen)
        return seen.view(groups, count, heads, -1).transpose(0, 1).reshape(count, groups * heads, -1).to(self._dtype)

    def _weights(self, scores: Tensor, veils: Sequence[Veil] = (), *, sharing: int = 1) -> Tensor:
        """Scores [G,·,·,n] made into weights; overwrites them. `sharing`: which axis is of heads with one KV head."""
        softcap, sinks = self._scoring.softcap, self._scoring.sinks
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        for veil in veils:
            scores[..., veil.keys].masked_fill_(veil.hidden, -torch.inf)
        if sinks is None:
            return torch.softmax(scores, -1, out=scores)
        sink = sinks.to(scores.dtype).view(self._groups, -1, 1).unsqueeze(3 - sharing)  # [G,·,·,1]
        return torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1).softmax(-1)[..., :-1]

    def _in_one_call(self, a: int, b: int, k: Tensor, v: Tensor, block: Block) -> Tensor:
        """[b-a,H,Dv]. One row has its query heads as the rows of the call; for more a view repeats the keys."""
        q, k, v, scale = self._q[a:b], k[:, block.keys], v[:, block.keys], self._scoring.scale
        if b - a == 1 and not block.veils:
            return F.scaled_dot_product_attention(q, k[None], v[None], scale=scale).reshape(1, -1, v.shape[-1])
        visible = torch.ones(b - a, k.shape[1], dtype=torch.bool, device=q.device)
        for veil in block.veils:
            visible[:, veil.keys] &= ~veil.hidden
        keys, values = (x[:, None].expand(-1, q.shape[2], -1, -1) for x in (k, v))
        seen = F.scaled_dot_product_attention(q.permute(1, 2, 0, 3), keys, values, attn_mask=visible, scale=scale)
        return seen.permute(2, 0, 1, 3).reshape(b - a, -1, v.shape[-1])  # of [G,H/G,L,Dv]
