"""sdpa: portable attention in plain torch, sequence by sequence, on the cells where they are.

On a CPU it is two matrix products around a softmax, for a block of rows at a time: scores in float32, weights in the type
of the values. That is faster there than torch's scaled_dot_product_attention wherever that has no kernel of the CPU's own
(`docs/log.md`). Elsewhere it is scaled_dot_product_attention, except with softcap or sinks, which that does not know.

The query heads that share a KV head are folded into rows that read it once.
"""

from collections.abc import Mapping
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcellar.contracts import Arrangement, Ask, History, Kind, Layout, Scoring, unread
from kvcellar.plan import GroupPlan, Segment

BLOCK = 128  # rows scored at once: bounds the scores, and skips the keys that no row of a block sees


class Veil(NamedTuple):
    """A stretch of a block's keys that some of its rows must not see."""

    keys: slice
    hidden: Tensor  # [L,m], True where the row must not see the key


class Block(NamedTuple):
    """Rows [start,end) of a part, and the stretch of its keys that they see."""

    start: int
    end: int
    keys: slice
    veils: tuple[Veil, ...]


class Part(NamedTuple):
    """One sequence: its rows of the step, and the cells of its keys in order of position."""

    rows: slice
    cells: slice | Tensor  # a slice if they are one run
    blocks: tuple[Block, ...]  # none if there is nothing to see


class Sdpa:
    """Any device, any float type, any head sizes, any storage: what is quantised is read into floats, once a step."""

    name = "sdpa"
    arrangement: Arrangement | Mapping[str, Arrangement] = "head"
    padding = 1
    kinds: frozenset[Kind] = frozenset(get_args(Kind))

    def refuse(self, ask: Ask) -> str | None:
        if ask.query_heads % ask.kv_heads:
            return f"{ask.query_heads} query heads cannot share {ask.kv_heads} KV heads evenly"
        return unread(self, ask)

    def prepare(self, plan: GroupPlan, device: torch.device) -> list[Part]:
        return [_part(plan.layout, segment, device) for segment in plan.segments]

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        keys, values = history.stored("k"), history.stored("v")
        out = q.new_empty(q.shape[0], q.shape[1], values.plane.size)  # [T,H,Dv]
        q = keys.meet(q)
        wide = torch.float32 if keys.storage.quantised else q.dtype
        part: Part
        for part in history.prepared:
            if not part.blocks:
                out[part.rows] = 0
                continue
            k, v = keys.read(part.cells, wide, rotated=True), values.read(part.cells, q.dtype)  # [G,n,D], [G,n,Dv]
            _attend(q[part.rows], k, v, part.blocks, scoring, out[part.rows])
        return out

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
        every = slice(0, k.shape[0])
        rows = range(0, q.shape[0], BLOCK)
        blocks = [Block(a, min(a + BLOCK, q.shape[0]), every, (Veil(every, ~visible[a : a + BLOCK]),)) for a in rows]
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])  # [T,H,Dv]
        _attend(q, k.transpose(0, 1), v.transpose(0, 1), blocks, scoring, out)
        return out.masked_fill_(~visible.any(-1)[:, None, None], 0)


def _part(layout: Layout, segment: Segment, device: torch.device) -> Part:
    start, end = segment.pos.start, segment.pos.end
    triangles: dict[int, Tensor] = {}
    blocks: list[Block] = []
    for a in range(start, end, BLOCK) if segment.runs else ():
        b = min(a + BLOCK, end)
        low = [layout.lowest(pos) for pos in range(a, b)]
        last = [segment.last(pos) for pos in range(a, b)]
        veils: list[Veil] = []
        if segment.ahead or last[-1] < b - 1:
            if last[-1] > last[0]:
                keys = torch.arange(last[0] + 1, last[-1] + 1, device=device)
                hidden = keys > torch.tensor(last, device=device)[:, None]
                veils.append(Veil(slice(last[0] + 1 - low[0], last[-1] + 1 - low[0]), hidden))
        elif b - a > 1:
            ahead = triangles.get(b - a)
            if ahead is None:
                ahead = triangles[b - a] = torch.ones(b - a, b - a, dtype=torch.bool, device=device).triu(1)
            veils.append(Veil(slice(a - low[0], b - low[0]), ahead))
        if low[-1] > low[0]:
            keys = torch.arange(low[0], low[-1], device=device)
            veils.append(Veil(slice(0, low[-1] - low[0]), keys < torch.tensor(low, device=device)[:, None]))
        seen = slice(low[0] - segment.first, last[-1] + 1 - segment.first)
        blocks.append(Block(a - start, b - start, seen, tuple(veils)))
    return Part(slice(segment.row, segment.row + end - start), _cells(segment, device), tuple(blocks))


def _cells(segment: Segment, device: torch.device) -> slice | Tensor:
    """All that the segment sees."""
    if not segment.runs:
        return slice(0, 0)
    if len(segment.runs) == 1:
        return slice(segment.runs[0].cell, segment.runs[0].end)
    return torch.cat([torch.arange(run.cell, run.end, device=device) for run in segment.runs])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...] | list[Block], scoring: Scoring, out: Tensor
) -> None:
    """Rows q [L,H,D] over k [G,N,D] and v [G,N,Dv], block by block, into out [L,H,Dv]."""
    if q.device.type != "cpu" and scoring.softcap is None and scoring.sinks is None:
        for block in blocks:
            out[block.start : block.end] = _fused(q[block.start : block.end], k, v, block, scoring.scale)
        return
    q, k = q.float() * scoring.scale, k.float()
    for block in blocks:
        out[block.start : block.end] = _by_products(q[block.start : block.end], k, v, block, scoring)


def _by_products(q: Tensor, k: Tensor, v: Tensor, block: Block, scoring: Scoring) -> Tensor:
    """q [L,H,D], scaled, and k [G,N,D] in float32, v [G,N,Dv] -> [L,H,Dv]. Scores and softmax are float32."""
    length, heads, size = q.shape
    groups = k.shape[0]
    rows = q.view(length, groups, -1, size).permute(1, 2, 0, 3).reshape(groups, -1, size)  # [G,H/G*L,D]
    scores = torch.bmm(rows, k[:, block.keys].transpose(1, 2))  # [G,H/G*L,n]
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    by_head = scores.view(heads, length, -1)
    for veil in block.veils:
        by_head[..., veil.keys].masked_fill_(veil.hidden, -torch.inf)
    if scoring.sinks is None:
        torch.softmax(scores, -1, out=scores)
    else:
        sink = scoring.sinks.float()[:, None, None].expand(-1, length, 1)
        scores = torch.cat([by_head, sink], -1).softmax(-1)[..., :-1].reshape(scores.shape)
    seen = torch.bmm(scores.to(v.dtype), v[:, block.keys])  # [G,H/G*L,Dv]
    return seen.view(heads, length, -1).transpose(0, 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    """The same in one call. A single row folds its query heads into rows; more rows get a view that repeats the keys."""
    length, heads, size = q.shape
    groups = k.shape[0]
    k, v = k[:, block.keys].to(q.dtype), v[:, block.keys].to(q.dtype)
    if length == 1:
        rows = q.view(1, groups, -1, size)
        return F.scaled_dot_product_attention(rows, k[None], v[None], scale=scale).reshape(1, heads, v.shape[-1])
    visible = torch.ones(length, k.shape[1], dtype=torch.bool, device=q.device)
    for veil in block.veils:
        visible[:, veil.keys] &= ~veil.hidden
    share = heads // groups
    rows = q.view(length, groups, share, size).permute(1, 2, 0, 3)  # [G,H/G,L,D]
    keys, values = (x[:, None].expand(-1, share, -1, -1) for x in (k, v))
    seen = F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=scale)
    return seen.permute(2, 0, 1, 3).reshape(length, heads, v.shape[-1])
