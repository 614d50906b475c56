"""products: attention on a CPU in plain torch, sequence by sequence, on the cells where they are.

It is two matrix products around a softmax, for a block of rows at a time: scores in float32, weights rounded to the
type of the values. That is as exact there as torch's scaled_dot_product_attention.

A CPU's products in bfloat16 are oneDNN's, which compiles a kernel for every shape and keeps it. That takes longer than
most of the products do. So only blocks of `BLOCK` rows are multiplied so, with zeros behind their keys up to one of few
numbers (`room`); other products are in float32, by MKL, which keeps nothing.

The query heads that share a KV head are folded into rows that read it once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcellar.memory.attention.buckets import room
from kvcellar.memory.kv.history import LayerHistory, StoredPlane
from kvcellar.memory.layout import Layout
from kvcellar.memory.plan import Segment
from kvcellar.memory.shapes import Scoring

BLOCK = 128  # rows scored at once: bounds the scores, and skips the keys that no row of a block sees
LONG_RUN = 32  # cells of a run, on average, from which on runs are copied one by one instead of cell by cell


class Veil(NamedTuple):
    """A stretch of a block's keys that some of its rows must not see."""

    keys: slice
    hidden: Tensor  # [L,m], True where the row must not see the key


class Block(NamedTuple):
    """Rows [start,end) of a part, and the stretch of its keys that they see, but for what veils hide."""

    start: int
    end: int
    keys: slice
    veils: tuple[Veil, ...]


Cells = slice | tuple[slice, ...] | Tensor  # one run, a few long ones, or many short ones as an index [n]


class Part(NamedTuple):
    """One sequence: rows [start,end) of the step, and the cells of its keys in order of position."""

    start: int
    end: int
    cells: Cells
    blocks: tuple[Block, ...]  # none if there is nothing to see


class Products:
    """Some sequences of a step of one group."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        """q [1,T,H,D] -> [1,T,H,Dv]."""
        keys, values = history.planes["k"], history.planes["v"]
        q = q[0]
        out = q.new_empty(*q.shape[:2], values.plane.size)  # [T,H,Dv]
        rows = _Rows(keys.meet(q) if keys.storage.hadamard else q, keys.plane.heads, scoring)
        for one in self._parts:
            if not one.blocks:
                out[one.start : one.end] = 0
                continue
            k, v = _read(keys, one.cells, rows.key_dtype), _read(values, one.cells, rows.value_dtype(one.blocks))
            rows.attend(one.start, one.blocks, k, v, out)
        return out[None]


def attend_dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """q [T,H,D], k [N,G,D], v [N,G,Dv], visible [T,N] -> [T,H,Dv]. What a row that sees nothing gets is undefined."""
    every = slice(0, k.shape[0])
    starts = range(0, q.shape[0], BLOCK)
    blocks = [Block(a, min(a + BLOCK, q.shape[0]), every, (Veil(every, ~visible[a : a + BLOCK]),)) for a in starts]
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])  # [T,H,Dv]
    rows = _Rows(q, k.shape[1], scoring)
    values = v.transpose(0, 1).to(rows.value_dtype(blocks))
    rows.attend(0, blocks, k.transpose(0, 1).to(rows.key_dtype), values, out)
    return out


def part(layout: Layout, segment: Segment, device: torch.device) -> Part:
    """A segment, cut into blocks, with what each row must not see of its block's keys."""
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
    return Part(segment.row, segment.row + end - start, _cells(segment, device), tuple(blocks))


def _cells(segment: Segment, device: torch.device) -> Cells:
    """All that the segment sees."""
    runs = tuple(slice(run.cell, run.end) for run in segment.runs)
    if len(runs) == 1:
        return runs[0]
    if segment.end - segment.first >= LONG_RUN * len(runs):  # for no runs, too: nothing is read then
        return runs
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def _read(stored: StoredPlane, cells: Cells, dtype: torch.dtype) -> Tensor:
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
    """The queries of a step, arranged for the products: q [T,H,D], of which H/G heads share a KV head."""

    def __init__(self, q: Tensor, groups: int, scoring: Scoring) -> None:
        self._scoring, self._groups = scoring, groups
        self.key_dtype = self._wide = wide = torch.promote_types(q.dtype, torch.float32)
        self._narrow = q.dtype if _multiplies(q.dtype) else wide  # type of values ...
        self._in_blocks = self._narrow is not wide  # ... of whole blocks, if it is true
        self._weight_dtype = wide if q.dtype is torch.float16 else q.dtype  # that the weights are rounded to
        self._q = (q.to(wide) * scoring.scale).view(q.shape[0], groups, -1, q.shape[-1])  # [T,G,H/G,D]

    def value_dtype(self, blocks: Sequence[Block]) -> torch.dtype:
        """What the values of these blocks are read as."""
        return self._wide if self._in_blocks and not any(map(_is_whole, blocks)) else self._narrow

    def attend(self, start: int, blocks: Sequence[Block], k: Tensor, v: Tensor, out: Tensor) -> None:
        """The rows of a part that begins at `start`, over its k [G,N,D] and v [G,N,Dv], into out [T,H,Dv]."""
        if self._in_blocks and v.dtype is self._narrow:
            v = _with_zeros(v, max(v.shape[1], *map(_end, filter(_is_whole, blocks))), v.shape[2], v.dtype)
        for block in blocks:
            a, b = start + block.start, start + block.end
            if b - a == 1 and len(blocks) == 1 and not block.veils:  # a row behind other blocks may see less
                out[a] = self._one_row(a, k, v).view(out.shape[1:])
            else:
                out[a:b] = self._by_products(a, b, k[:, block.keys], v, block)

    def _one_row(self, row: int, k: Tensor, v: Tensor) -> Tensor:
        """[G,H/G,Dv], of a row that sees everything."""
        scores = torch.bmm(self._q[row], k.transpose(1, 2))  # [G,H/G,n]
        return torch.bmm(self._rounded(self._weights(scores, 1), v.dtype), v)

    def _by_products(self, a: int, b: int, k: Tensor, v: Tensor, block: Block) -> Tensor:
        """[b-a,H,Dv], of rows a to b over the block's k [G,n,D] and the part's v [G,N,Dv]."""
        rows = self._q[a:b].permute(1, 2, 0, 3).reshape(self._groups, -1, k.shape[-1])  # [G,H/G*L,D]
        scores = torch.bmm(rows, k.transpose(1, 2))  # [G,H/G*L,n]
        weights = self._weights(scores, b - a, block.veils)
        if not self._in_blocks or v.dtype is self._wide:
            seen = torch.bmm(self._rounded(weights, v.dtype), v[:, block.keys])  # [G,H/G*L,Dv]
        elif _is_whole(block):
            keys = slice(block.keys.start, _end(block))
            weights = _with_zeros(weights, weights.shape[1], keys.stop - keys.start, v.dtype)  # [G,H/G*L,room]
            seen = torch.bmm(weights, v[:, keys])
        else:
            seen = torch.bmm(self._rounded(weights, self._wide), v[:, block.keys].to(self._wide))
        return seen.view(-1, b - a, v.shape[-1]).transpose(0, 1)

    def _rounded(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights as the product with values of this type takes them."""
        return weights.to(self._weight_dtype).to(dtype)

    def _weights(self, scores: Tensor, length: int, veils: Sequence[Veil] = ()) -> Tensor:
        """Scores [G,H/G*L,n] of L rows, made into weights; overwrites them."""
        softcap, sinks = self._scoring.softcap, self._scoring.sinks
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        for veil in veils:
            scores.view(-1, length, scores.shape[-1])[..., veil.keys].masked_fill_(veil.hidden, -torch.inf)
        if sinks is None:
            return torch.softmax(scores, -1, out=scores)
        sink = sinks.to(scores.dtype).view(self._groups, -1, 1).expand(-1, -1, length).reshape(*scores.shape[:2], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def _is_whole(block: Block) -> bool:
    return block.end - block.start == BLOCK


def _end(block: Block) -> int:
    """Of the keys that a whole block is multiplied with."""
    return block.keys.start + room(block.keys.stop - block.keys.start, BLOCK)


def _with_zeros(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """x [G,m,n] as [G,rows,columns], with zeros below it and beside it."""
    out = x.new_empty(x.shape[0], rows, columns, dtype=dtype)
    out[:, : x.shape[1], : x.shape[2]] = x
    out[:, x.shape[1] :] = 0
    out[:, :, x.shape[2] :] = 0
    return out


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether a product in `dtype` is as fast as one in float32. On CPUs without instructions for it, torch takes ten
    times as long in bfloat16, and a hundred times in float16, which is not used on a CPU here."""
    if dtype is torch.float16:
        return False
    if dtype is not torch.bfloat16:
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
