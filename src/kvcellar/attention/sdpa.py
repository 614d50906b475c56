"""sdpa: portable attention with torch's scaled_dot_product_attention, one call per sequence and block of rows.

The query heads that share a KV head are folded: at decode into the rows of one small matrix, in a prompt by a view of
the keys that repeats them without a copy. Expanding keys and values, or `enable_gqa`, costs about ten times as much at
decode (`docs/log.md`). Softcap and sinks are not known to torch's kernel and go through plain matrix products.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcellar.contracts import Arrangement, Ask, History, Scoring
from kvcellar.plan import GroupPlan, Segment

BLOCK = 256  # rows per call: bounds the mask, and skips the keys that no row of a block sees


class Block(NamedTuple):
    """Rows [start,end) of one sequence and the cells of the keys they see: a slice if they are one run."""

    start: int
    end: int
    cells: slice | Tensor
    visible: Tensor | None  # [L,n]; None: every row sees every key
    causal: bool  # the rows are also the keys: row i sees keys 0..i


class Sdpa:
    """Any device, any float type, any head sizes."""

    name = "sdpa"
    arrangement: Arrangement = "token"

    def refuse(self, ask: Ask) -> str | None:
        if ask.query_heads % ask.kv_heads:
            return f"{ask.query_heads} query heads cannot share {ask.kv_heads} KV heads evenly"
        return None

    def prepare(self, plan: GroupPlan, device: torch.device) -> list[Block]:
        return [block for segment in plan.segments for block in _blocks(plan, segment, device)]

    def attend(self, q: Tensor, history: History, scoring: Scoring) -> Tensor:
        k, v = history.plane("k"), history.plane("v")  # [C,G,D], [C,G,Dv]
        plain = scoring.softcap is None and scoring.sinks is None
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])  # [T,H,Dv]
        block: Block
        for block in history.prepared:
            rows, keys, values = q[block.start : block.end], _read(k, block.cells), _read(v, block.cells)
            if keys.dtype != q.dtype:
                keys, values = keys.to(q.dtype), values.to(q.dtype)
            if not plain:
                seen = _weigh(rows, keys, values, block, scoring)
            elif block.end - block.start == 1:
                seen = _one_row(rows, keys, values, scoring.scale)
            else:
                seen = _many_rows(rows, keys, values, block, scoring.scale)
            out[block.start : block.end] = seen
        return out

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
        block = Block(0, q.shape[0], slice(0, k.shape[0]), visible, False)
        if scoring.softcap is None and scoring.sinks is None:
            return _many_rows(q, k, v, block, scoring.scale)
        return _weigh(q, k, v, block, scoring)


def _blocks(plan: GroupPlan, segment: Segment, device: torch.device) -> list[Block]:
    start, end = segment.pos.start, segment.pos.end
    lowest = plan.layout.lowest
    if segment.first == start and lowest(end - 1) <= start and end - start > 1:
        return [Block(segment.row, segment.row + end - start, _cells(segment, start, end, device), None, True)]
    blocks: list[Block] = []
    for a in range(start, end, BLOCK):
        b = min(a + BLOCK, end)
        first = lowest(a)
        visible = None
        if b - a > 1:
            pos = torch.arange(a, b, device=device)[:, None]
            low = torch.tensor([lowest(p) for p in range(a, b)], device=device)[:, None]
            key = torch.arange(first, b, device=device)
            visible = (key >= low) & (key <= pos)
        row = segment.row + a - start
        blocks.append(Block(row, row + b - a, _cells(segment, first, b, device), visible, False))
    return blocks


def _cells(segment: Segment, first: int, end: int, device: torch.device) -> slice | Tensor:
    """The cells of positions [first, end)."""
    found: list[tuple[int, int]] = []
    at = segment.first
    for run in segment.runs:
        low, high = max(first, at), min(end, at + run.n)
        if low < high:
            found.append((run.cell + low - at, run.cell + high - at))
        at += run.n
    if len(found) == 1:
        return slice(*found[0])
    return torch.cat([torch.arange(a, b, device=device) for a, b in found])


def _read(plane: Tensor, cells: slice | Tensor) -> Tensor:
    """[n,heads,size]: a view where the cells are one run, else gathered (which costs about a tenth of attending)."""
    return plane[cells] if isinstance(cells, slice) else plane.index_select(0, cells)


def _one_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [1,H,D]: the query heads of a KV head are the rows of one call, all of which see everything."""
    n, g, d = k.shape
    folded = q.view(1, g, -1, d)  # [1,G,H/G,D]
    seen = F.scaled_dot_product_attention(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale)
    return seen.reshape(1, q.shape[1], v.shape[-1])


def _many_rows(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    """q [L,H,D]: KV heads are the batch of one call, the query heads that share one are its heads."""
    length, heads, d = q.shape
    g = k.shape[1]
    share = heads // g
    rows = q.view(length, g, share, d).permute(1, 2, 0, 3)  # [G,H/G,L,D]
    keys = k.transpose(0, 1)[:, None].expand(-1, share, -1, -1)  # [G,H/G,n,D], no copy
    values = v.transpose(0, 1)[:, None].expand(-1, share, -1, -1)
    seen = F.scaled_dot_product_attention(
        rows, keys, values, attn_mask=block.visible, is_causal=block.causal, scale=scale
    )
    return seen.permute(2, 0, 1, 3).reshape(length, heads, v.shape[-1])


def _weigh(q: Tensor, k: Tensor, v: Tensor, block: Block, scoring: Scoring) -> Tensor:
    """The same by plain matrix products, with softcap and sinks; weights in float32."""
    length, heads, d = q.shape
    n, g, _ = k.shape
    rows = q.view(length, g, heads // g, d).permute(1, 2, 0, 3).reshape(g, -1, d)  # [G,H/G*L,D]
    scores = torch.matmul(rows, k.permute(1, 2, 0)).float() * scoring.scale  # [G,H/G*L,n]
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.view(heads, length, n)
    visible = block.visible
    if block.causal:
        visible = torch.ones(length, n, dtype=torch.bool, device=q.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if scoring.sinks is not None:
        sink = scoring.sinks.float()[:, None, None].expand(-1, length, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :n]
    else:
        weights = scores.softmax(-1)
    seen = torch.matmul(weights.to(v.dtype).reshape(g, -1, n), v.transpose(0, 1))  # [G,H/G*L,Dv]
    return seen.view(heads, length, -1).transpose(0, 1)
