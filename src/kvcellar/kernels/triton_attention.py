"""triton_attention: attention of new rows over cells, for GPUs, in Triton.

A block is some rows of one sequence, whose queries of one KV head are the rows of a tile (`M`). Keys are read in tiles
of `N` positions, from the cells that a table names. Each `SPLIT` positions have a softmax of their own; the splits of a
row are merged in order of position, either in one program or by `merge`, from what a program for each has written.

Always true:
  * tiles and splits begin at absolute positions, and what a row does not see changes none of its sums: a row's result
    depends on its query and the cells that it sees only, and on the shape of the tile (`M`);
  * a cell is read only if a row of the block sees it, or one that is between those which its rows see;
  * a value that is not finite makes the rows NaN that see it, and no others.

Importing this module needs `triton`, which CUDA builds of torch bring along.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

SPLIT = tl.constexpr(512)  # keys with a softmax of their own
PER_SCALE = tl.constexpr(128)  # elements of a vector that share a scale (`shapes.BLOCK`)
FLOATS = tl.constexpr(0)  # kinds of storage
INT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
FP8 = tl.constexpr(3)


@triton.jit
def codes_of(base, cells, cell_step, d, size: tl.constexpr, kind: tl.constexpr, mask):
    """[n,d] of the elements `d` of the vectors in `cells`, without their scales: exact in float16 and bfloat16."""
    if kind == INT4:
        half: tl.constexpr = (size + 1) // 2
        high = d >= half
        byte = tl.load(base + cells[:, None] * cell_step + tl.where(high, d - half, d)[None, :], mask=mask, other=0)
        nibble = tl.where(high[None, :], byte >> 4, byte & 15)
        return nibble.to(tl.float32) - 8.0
    x = tl.load(base + cells[:, None] * cell_step + d[None, :], mask=mask, other=0)
    if kind == FP8:  # sign, exponent and fraction to their places in a float16, whose exponent bias is larger by 8
        wide = (x.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385
        return wide.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return x if kind == FLOATS else x.to(tl.float32)


@triton.jit
def scales_of(base, cells, cell_step, block, mask):
    """[n] scales of one block of elements. Vectors without a finite scale read as NaN."""
    scale = tl.load(base + cells * cell_step + block, mask=mask, other=0).to(tl.float32)
    return tl.where(scale < float("inf"), scale, float("nan"))


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap)"""
    x = scores / softcap
    far = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -softcap, softcap) * (1.0 - far) / (1.0 + far)


@triton.jit
def joined(m, total, acc, other_m, other_total, other_acc):
    """Two softmaxes over different keys as one: maximum [M], sum of weights [M] and weighted values [M,Dv]."""
    most = tl.maximum(m, other_m)
    at = tl.where(most == float("-inf"), 0.0, most)  # rows that have seen nothing
    here, there = tl.exp(m - at), tl.exp(other_m - at)
    return most, total * here + other_total * there, acc * here[:, None] + other_acc * there[:, None]


@triton.jit
def write_out(
    out, out_row, out_head, rows, heads, alive, dv, DV: tl.constexpr, m, total, acc, sinks, SINKS: tl.constexpr,
):  # fmt: skip
    """The results of rows: zeros where a row has seen nothing."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=alive, other=0.0)
        most = tl.maximum(m, sink)
        here = tl.exp(m - most)
        acc, total = acc * here[:, None], total * here + tl.exp(sink - most)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out + rows[:, None] * out_row + heads[:, None] * out_head + dv[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=alive[:, None] & (dv < DV)[None, :])


@triton.jit
def scores_of(
    q, q_row, q_head, rows, heads, alive, cell, held, k, k_cell, k_scale, k_scale_cell,
    D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[M,N] products of queries and keys."""
    scores = tl.zeros([M, N], tl.float32)
    for block in tl.static_range(0, D, BD):
        d = block + tl.arange(0, BD)
        inside = (d < D)[None, :]
        places = q + rows[:, None] * q_row + heads[:, None] * q_head + d[None, :]
        x = tl.load(places, mask=alive[:, None] & inside, other=0).to(DTYPE)
        y = codes_of(k, cell, k_cell, d, D, KIND, held[:, None] & inside).to(DTYPE)
        products = tl.dot(x, tl.trans(y), input_precision="ieee")
        if KIND != FLOATS:
            products *= scales_of(k_scale, cell, k_scale_cell, block // PER_SCALE, held)[None, :]
        scores += products
    return scores


@triton.jit
def weighted(
    weights, cell, held, v, v_cell, v_scale, v_scale_cell, DV: tl.constexpr, BDV: tl.constexpr, KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Values [M,BDV] times their weights [M,N], and which keys [N] have values that are not finite: 0 there."""
    dv = tl.arange(0, BDV)
    there = held[:, None] & (dv < DV)[None, :]
    y = codes_of(v, cell, v_cell, dv, DV, KIND, there)
    if KIND == FLOATS:
        finite = tl.abs(y.to(tl.float32)) < float("inf")
        broken = tl.max((finite == 0).to(tl.int32), 1)
        y = tl.where(finite, y, 0.0)
    elif BDV <= PER_SCALE:
        scale = scales_of(v_scale, cell, v_scale_cell, 0, held)
        broken = (scale != scale).to(tl.int32)
        weights *= tl.where(scale == scale, scale, 0.0)[None, :]
    else:
        places = v_scale + cell[:, None] * v_scale_cell + (dv // PER_SCALE)[None, :]
        scales = tl.load(places, mask=there, other=0).to(tl.float32)
        finite = scales < float("inf")
        broken = tl.max((finite == 0).to(tl.int32), 1)
        y *= tl.where(finite, scales, 0.0)
    return tl.dot(weights.to(DTYPE), y.to(DTYPE), input_precision="ieee"), broken


@triton.jit
def one_split(
    q, q_row, q_head, rows, heads, alive, low, end, first, last,
    cells, base, k, k_cell, k_scale, k_scale_cell, v, v_cell, v_scale, v_scale_cell, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of weights and weighted values of the rows over the keys [first,last) of one split."""
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    for start in range(first // N * N, last, N):
        pos = start + tl.arange(0, N)
        held = (pos >= first) & (pos < last)
        cell = tl.load(cells + base + pos, mask=held, other=0)
        scores = scale * scores_of(
            q, q_row, q_head, rows, heads, alive, cell, held, k, k_cell, k_scale, k_scale_cell, D, BD, M, N, K_KIND,
            K_DTYPE,
        )  # fmt: skip
        if CAP:
            scores = capped(scores, softcap)
        seen = (pos[None, :] >= low[:, None]) & (pos[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        most = tl.maximum(m, tl.max(scores, 1))
        at = tl.where(most == float("-inf"), 0.0, most)  # rows that have seen nothing
        weights = tl.exp(scores - at[:, None])
        shrink = tl.exp(m - at)
        total = total * shrink + tl.sum(weights, 1)
        values, broken = weighted(weights, cell, held, v, v_cell, v_scale, v_scale_cell, DV, BDV, V_KIND, V_DTYPE)
        touched = tl.max(seen.to(tl.int32) * broken[None, :], 1)
        acc = tl.where((touched > 0)[:, None], float("nan"), acc * shrink[:, None] + values)
        m = most
    return m, total, acc


@triton.jit
def part_of(blocks, program, parts, most: tl.constexpr):
    """First row, number of rows and base of the part of a block that a program computes: up to `most` rows."""
    block = blocks + 3 * (program // parts)
    skipped = program % parts * most
    return tl.load(block) + skipped, tl.minimum(tl.load(block + 1) - skipped, most), tl.load(block + 2)


@triton.jit
def attend(
    q, q_row, q_head, out, out_row, out_head, partial, sums, blocks, bounds, cells, k, k_cell, k_head, k_scale,
    k_scale_cell, k_scale_head, v, v_cell, v_head, v_scale, v_scale_cell, v_scale_head, sinks, scale, softcap,
    all_heads, all_rows, parts, SHARE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Grid (blocks x parts, KV heads, splits if `APART`, else 1). `blocks` [B,3]: first row, number of rows, what
    is added to a position to get its place in `cells`. `bounds` [T,2]: the positions [low,end) that a row sees."""
    row, count, base = part_of(blocks, tl.program_id(0), parts, M // SHARE)
    group = tl.program_id(1).to(tl.int64)
    if count > 0:
        at = tl.arange(0, M)
        alive = at < count * SHARE
        rows, heads = (row + at // SHARE).to(tl.int64), group * SHARE + at % SHARE
        low = tl.load(bounds + 2 * rows, mask=alive, other=0)
        end = tl.load(bounds + 2 * rows + 1, mask=alive, other=0)
        first, last = tl.load(bounds + 2 * row), tl.load(bounds + 2 * (row + count - 1) + 1)
        k, v = k + group * k_head, v + group * v_head
        k_scale, v_scale = k_scale + group * k_scale_head, v_scale + group * v_scale_head
        dv = tl.arange(0, BDV)
        if APART:
            number = tl.program_id(2)
            split = first // SPLIT + number
            here, there = tl.maximum(first, split * SPLIT), tl.minimum(last, split * SPLIT + SPLIT)
            if here < there:
                m, total, acc = one_split(
                    q, q_row, q_head, rows, heads, alive, low, end, here, there,
                    cells, base, k, k_cell, k_scale, k_scale_cell, v, v_cell, v_scale, v_scale_cell, scale, softcap,
                    D, DV, BD, BDV, M, N, K_KIND, V_KIND, K_DTYPE, V_DTYPE, CAP,
                )  # fmt: skip
                place = (number * all_rows + rows) * all_heads + heads
                tl.store(sums + 2 * place, m, mask=alive)
                tl.store(sums + 2 * place + 1, total, mask=alive)
                tl.store(partial + place[:, None] * DV + dv[None, :], acc, mask=alive[:, None] & (dv < DV)[None, :])
        else:
            m = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, BDV], tl.float32)
            for split in range(first // SPLIT, tl.cdiv(last, SPLIT)):
                here, there = tl.maximum(first, split * SPLIT), tl.minimum(last, split * SPLIT + SPLIT)
                other_m, other_total, other_acc = one_split(
                    q, q_row, q_head, rows, heads, alive, low, end, here, there,
                    cells, base, k, k_cell, k_scale, k_scale_cell, v, v_cell, v_scale, v_scale_cell, scale, softcap,
                    D, DV, BD, BDV, M, N, K_KIND, V_KIND, K_DTYPE, V_DTYPE, CAP,
                )  # fmt: skip
                m, total, acc = joined(m, total, acc, other_m, other_total, other_acc)
            write_out(out, out_row, out_head, rows, heads, alive, dv, DV, m, total, acc, sinks, SINKS)


@triton.jit
def merge(
    out, out_row, out_head, partial, sums, blocks, bounds, sinks, all_heads, all_rows, parts, SHARE: tl.constexpr,
    DV: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks x parts, KV heads): the splits that programs of `attend` have written apart."""
    row, count, _ = part_of(blocks, tl.program_id(0), parts, M // SHARE)
    group = tl.program_id(1).to(tl.int64)
    if count > 0:
        at = tl.arange(0, M)
        alive = at < count * SHARE
        rows, heads = (row + at // SHARE).to(tl.int64), group * SHARE + at % SHARE
        first, last = tl.load(bounds + 2 * row), tl.load(bounds + 2 * (row + count - 1) + 1)
        dv = tl.arange(0, BDV)
        m = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, BDV], tl.float32)
        for split in range(first // SPLIT, tl.cdiv(last, SPLIT)):
            place = ((split - first // SPLIT) * all_rows + rows) * all_heads + heads
            other_m = tl.load(sums + 2 * place, mask=alive, other=0.0)
            other_total = tl.load(sums + 2 * place + 1, mask=alive, other=0.0)
            inside = alive[:, None] & (dv < DV)[None, :]
            other_acc = tl.load(partial + place[:, None] * DV + dv[None, :], mask=inside, other=0.0)
            m, total, acc = joined(m, total, acc, other_m, other_total, other_acc)
        write_out(out, out_row, out_head, rows, heads, alive, dv, DV, m, total, acc, sinks, SINKS)
