"""triton_launch: calls the kernels of `kernels/triton_attention.py` for a layer. Importing it imports triton."""

from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.errors import TritonError  # pyright: ignore[reportMissingImports]

from kvcellar.kernels import triton_attention as kernels
from kvcellar.memory.attention.blocks import FEW, PARTIAL_BYTES, SPLIT, Call, Launch, power_of_two
from kvcellar.memory.kv.history import StoredPlane
from kvcellar.memory.shapes import BLOCK, Kind

PROGRAMS = 256  # from so many blocks on, a GPU is busy without dividing histories
KINDS: Mapping[Kind, int] = {"int8": 1, "int4": 2, "fp8": 3}
SMALLEST, TILE = 16, 64  # rows of a tile for blocks of few rows, and of others
MOST = 8192  # weighted values of a tile
KEYS_BYTES = 1 << 14  # of a tile of keys or values
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

ATTEND: Any = kernels.attend  # to a type checker a function, which has no grid
MERGE: Any = kernels.merge

assert (kernels.SPLIT.value, kernels.PER_SCALE.value) == (SPLIT, BLOCK), "the kernels' sizes are those of the tables"


def launch(call: Call) -> None:
    """All blocks of a step."""
    try:
        for one in call.prepared.launches:
            _launch(call, one)
    except TritonError as error:  # it is no RuntimeError, which the errors of torch are
        raise RuntimeError(f"triton cannot run its attention kernel here: {error}") from error


def _launch(call: Call, one: Launch) -> None:
    (rows, heads, size), groups, values = call.q.shape, call.keys.plane.heads, call.values.plane.size
    wide_keys, wide_values = max(SMALLEST, min(BLOCK, power_of_two(size))), max(SMALLEST, power_of_two(values))
    tile = SMALLEST if one.rows <= FEW else min(TILE, max(SMALLEST, MOST // wide_values))
    parts = -(-one.rows // (tile // (heads // groups)))  # programs of a block
    apart = (
        one.splits > 1
        and len(one.blocks) * parts * groups < PROGRAMS
        and one.splits * rows * heads * (values + 2) * torch.float32.itemsize <= PARTIAL_BYTES
    )
    shape = (one.splits, rows, heads) if apart else (0, 1, 1)
    partial = call.q.new_empty((*shape, values), dtype=torch.float32)
    sums = call.q.new_empty((*shape, 2), dtype=torch.float32)
    sinks = call.scoring.sinks
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    softcap = call.scoring.softcap
    into = (call.out, *call.out.stride()[:2])
    grid = (len(one.blocks) * parts, groups, one.splits if apart else 1)
    ATTEND[grid](
        call.q, *call.q.stride()[:2], *into, partial, sums, one.blocks, call.prepared.bounds, call.prepared.cells,
        *_plane(call.keys), *_plane(call.values), call.out if sinks is None else sinks, call.scoring.scale,
        softcap or 1.0, heads, rows, parts,
        SHARE=heads // groups, D=size, DV=values, BD=wide_keys, BDV=wide_values, M=tile,
        N=max(SMALLEST, min(64, KEYS_BYTES // (max(wide_keys, wide_values) * call.q.itemsize))),
        K_KIND=KINDS.get(call.keys.storage.kind, 0), V_KIND=KINDS.get(call.values.storage.kind, 0),
        K_DTYPE=_dtype(call.q, call.keys), V_DTYPE=_dtype(call.q, call.values), CAP=softcap is not None,
        SINKS=sinks is not None, APART=apart, num_warps=4 if tile * wide_values < MOST else 8,
        num_stages=2, enable_fp_fusion=False,  # sums are rounded alike in both kernels
    )  # fmt: skip
    if apart:
        MERGE[grid[:2]](
            *into, partial, sums, one.blocks, call.prepared.bounds, call.out if sinks is None else sinks, heads, rows,
            parts,
            SHARE=heads // groups, DV=values, BDV=wide_values, M=tile, SINKS=sinks is not None,
            enable_fp_fusion=False,
        )  # fmt: skip


def _plane(stored: StoredPlane) -> tuple[Any, ...]:
    """Codes and scales, each with its steps from cell to cell and from head to head."""
    rows, scales = stored.rows, stored.scales  # [C,G,width], [C,G,blocks]
    if scales is None:
        return (rows, *rows.stride()[:2], rows, 0, 0)
    scales = scales if stored.arrangement == "token" else scales.transpose(0, 1)
    return (rows, *rows.stride()[:2], scales, *scales.stride()[:2])


def _dtype(q: Tensor, stored: StoredPlane) -> Any:
    """What is multiplied: the queries' type, which codes have exactly, or float32 where floats of two types meet."""
    dtype = q.dtype if stored.storage.quantised else torch.promote_types(q.dtype, stored.codes.dtype)
    return DTYPES[dtype]
