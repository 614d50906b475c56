"""buckets: attention in few calls, for devices on which a call costs more than what it computes.

The sequences of a step that get one token each are one bucket: their keys and values are gathered by index, padded to
the longest, and attended to in one call of torch's scaled_dot_product_attention, or in products where that does not
support the scoring (softcap, sinks). Tables and masks are made once for all layers of a group. Storing two planes and
attending takes at most eight operations of torch a layer then, views included, however many sequences there are. There
are more where

  * lengths differ so much that padding would be more than twice the keys, or gathered keys would be many: the longest
    make up a bucket, then the others;
  * a sequence gets several tokens: those that get equally many share a bucket, and long prompts are cut into blocks;
  * K/V are quantised, or stored in another type than the queries have: they are widened as they are gathered.

Padding reads the last key that its sequence sees, and is masked: no cell is read that the sequence does not see.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcellar.kernels.uploads import uploaded
from kvcellar.memory.kv.history import LayerHistory, StepTables
from kvcellar.memory.plan import GroupPlan, Run
from kvcellar.memory.shapes import Scoring

ROWS = 512  # of a sequence in one call
PADDED = 3  # times the keys that the sequences of a bucket see: what may be gathered for them
GATHERED = 1 << 16  # keys of a bucket, unless a single sequence sees more
ALIGNED = 8  # the number of keys of a call is a multiple of this: kernels read masks so
_NONE = 1 << 62  # a position behind every run


class Block(NamedTuple):
    """Rows of one sequence, of which row i sees the positions [low[i], last[i]]."""

    row: int
    low: list[int]
    last: list[int]
    first: int  # position of the first cell of `runs`
    runs: tuple[Run, ...]

    @property
    def keys(self) -> int:
        return self.last[-1] + 1 - self.low[0]


class Bucket(NamedTuple):
    """Sequences that get equally many rows."""

    rows: slice | Tensor  # of the step, sequence by sequence
    length: int  # of each
    cells: Tensor  # [B*G,1,N]
    heads: Tensor  # [B*G,1,1]
    bias: Tensor  # [B*G or 1,1,L,N]: 0 where a row sees the key, else -inf

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        """Its rows, q [1,B*L,H,D] -> [1,B*L,H,Dv]. The query heads that share a KV head are the rows of a call where
        sequences have one row each; for more, a view repeats the keys."""
        keys, values = history.planes["k"], history.planes["v"]
        if keys.storage.hadamard:
            q = keys.meet(q)
        plain = keys.codes.dtype is q.dtype and values.codes.dtype is q.dtype
        k = keys.rows[self.cells, self.heads] if plain else keys.at(self.cells, self.heads, q.dtype)  # [B*G,1,N,D]
        v = values.rows[self.cells, self.heads] if plain else values.at(self.cells, self.heads, q.dtype)
        bias = self.bias if self.bias.dtype is q.dtype else self.bias.to(q.dtype)
        _, n, heads, size = q.shape
        calls, length = len(self.cells), self.length
        share = heads * n // (calls * length)
        if length == 1:
            x = q.reshape(calls, 1, share, size)
            if scoring.softcap is None and scoring.sinks is None:
                seen = F.scaled_dot_product_attention(x, k, v, attn_mask=bias, scale=scoring.scale)
            else:
                seen = weighed(x, k, v, bias, scoring, (-1, 1, share, 1))
            return seen.reshape(1, n, heads, -1)
        groups = heads // share
        x = q.reshape(-1, length, groups, share, size).permute(0, 2, 3, 1, 4).reshape(calls, share, length, size)
        seen = weighed(x, k, v, bias, scoring, (-1, share, 1, 1)).unflatten(0, (-1, groups))  # [B,G,H/G,L,Dv]
        return seen.permute(0, 3, 1, 2, 4).reshape(1, n, heads, -1)


class Buckets(tuple[Bucket, ...]):
    """All of a step, where one bucket is not all of it."""

    __slots__ = ()

    def attend(self, q: Tensor, history: LayerHistory, scoring: Scoring) -> Tensor:
        """q [1,T,H,D] -> [1,T,H,Dv]."""
        out = q.new_zeros(*q.shape[:3], history.planes["v"].plane.size)  # rows that see nothing stay zeros
        for bucket in self:
            out[:, bucket.rows] = bucket.attend(q[:, bucket.rows], history, scoring)
        return out


def buckets(plan: GroupPlan, tables: StepTables) -> Bucket | Buckets:
    """A step of one group."""
    found = [_bucket(f"bucket {i}", some, tables) for i, some in enumerate(_together(list(_blocks(plan))))]
    every = slice(0, sum(len(segment.pos) for segment in plan.segments))
    whole = len(found) == 1 and isinstance(found[0].rows, slice) and found[0].rows == every
    return found[0] if whole else Buckets(found)


def weighed(x: Tensor, k: Tensor, v: Tensor, bias: Tensor, scoring: Scoring, of_sinks: tuple[int, ...]) -> Tensor:
    """x [b,h,l,D] over k [b,1,N,D] and v [b,1,N,Dv] -> [b,h,l,Dv]. Sinks [H] are viewed as `of_sinks`, for a part of b.

    A row that sees nothing is NaN.
    """
    if scoring.softcap is None and scoring.sinks is None:
        k, v = (part.expand(-1, x.shape[1], -1, -1) for part in (k, v))
        return F.scaled_dot_product_attention(x, k, v, attn_mask=bias, scale=scoring.scale)
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = (x.to(wide) * scoring.scale) @ k.to(wide).transpose(-1, -2)  # [b,h,l,N]
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = scores + bias
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(wide).view(of_sinks)
        sinks = sinks.repeat(len(scores) // len(sinks), 1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


def attend_dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """q [T,H,D], k [N,G,D], v [N,G,Dv], visible [T,N] -> [T,H,Dv]. A row that sees nothing is NaN."""
    groups = k.shape[1]
    x = q.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [G,H/G,T,D]
    k, v = (part.transpose(0, 1)[:, None] for part in (k, v))
    bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    seen = weighed(x, k.to(q.dtype), v.to(q.dtype), bias[None, None], scoring, (groups, -1, 1, 1))
    return seen.permute(2, 0, 1, 3).reshape(len(q), q.shape[1], -1)


def _blocks(plan: GroupPlan) -> Iterator[Block]:
    """All rows that see something."""
    for segment in plan.segments:
        start, end = segment.pos.start, segment.pos.end
        for a in range(start, end, ROWS) if segment.runs else ():
            places = range(a, min(a + ROWS, end))
            low, last = [plan.layout.lowest(pos) for pos in places], [segment.last(pos) for pos in places]
            yield Block(segment.row + a - start, low, last, segment.first, segment.runs)


def _together(blocks: Sequence[Block]) -> list[list[Block]]:
    """Those of a bucket, in the order of their rows."""
    found: list[list[Block]] = []
    seen = 0
    for block in sorted(blocks, key=lambda block: (len(block.low), -block.keys)):
        one = found[-1] if found else [block]
        gathered = (len(one) + 1) * one[0].keys
        if (
            found
            and len(one[0].low) == len(block.low) < ROWS
            and gathered <= min(GATHERED, PADDED * (seen + block.keys))
        ):
            one.append(block)
            seen += block.keys
        else:
            found.append([block])
            seen = block.keys
    return [sorted(some, key=lambda block: block.row) for some in found]


def _bucket(name: str, blocks: Sequence[Block], tables: StepTables) -> Bucket:
    """Worked out on the device, from a few numbers for each run and row."""
    b, length, groups = len(blocks), len(blocks[0].low), tables.heads
    n, most = room(max(block.keys for block in blocks), ALIGNED), max(len(block.runs) for block in blocks)
    numbers = [number for block in blocks for number in _numbers(block, most)]
    starts, shifts, low, last = tables.fill(name, numbers).view(b, -1).split([most, most, length, length], 1)
    pos = low[:, :1] + torch.arange(n, device=tables.device)  # [B,N]
    read = torch.minimum(pos, last[:, -1:])
    run = torch.searchsorted(starts.contiguous(), read, right=True) - 1
    cells = tables.empty(f"{name} cells", (b, groups, n), torch.int64)
    cells.copy_((read + shifts.gather(1, run))[:, None])
    hidden = (pos[:, None] < low[..., None]) | (pos[:, None] > last[..., None])  # [B,L,N]
    copies = groups if b > 1 or length == 1 else 1  # one is as good where it is the same for the whole call
    # Masks of several rows are large, and belong to prompts, whose steps are not replayed: no table for them.
    made = tables.empty(f"{name} bias", (b, copies, length, n), tables.dtype) if length == 1 else None
    bias = made if made is not None else torch.empty(b, copies, length, n, dtype=tables.dtype, device=tables.device)
    bias.zero_().masked_fill_(hidden[:, None], -torch.inf)
    heads = torch.arange(groups, device=tables.device).repeat(b)
    return Bucket(
        _rows(blocks, tables.device), length, cells.view(-1, 1, n), heads.view(-1, 1, 1), bias.view(-1, 1, length, n)
    )


def _numbers(block: Block, most: int) -> Iterator[int]:
    """Where each run begins, as a position; what is added to a position to get its cell; what each row sees."""
    starts = list(accumulate((run.n for run in block.runs), initial=block.first))[:-1]
    missing = most - len(starts)
    yield from (*starts, *[_NONE] * missing)
    yield from (run.cell - start for run, start in zip(block.runs, starts, strict=True))
    yield from (*[0] * missing, *block.low, *block.last)


def _rows(blocks: Sequence[Block], device: torch.device) -> slice | Tensor:
    rows = [row for block in blocks for row in range(block.row, block.row + len(block.low))]
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return uploaded(rows, torch.int64, device)


def room(keys: int, least: int) -> int:
    """With how many keys to call for so many: one of eight numbers a doubling, at most an eighth more, multiples of
    `least`."""
    step = max(least, (1 << (keys - 1).bit_length()) >> 4)
    return -(-keys // step) * step
