"""Computes attention in Triton: any number of key segments, mask kinds, bias, start value, splits over the keys.

One program owns a tile of query rows of one key head. Query heads that share the key head are rows of the same tile,
so grouped keys are read once and decoding has more than one row to multiply. Everything that changes the code is a
compile-time constant; whatever only changes numbers is an argument.

Softmax is online in base 2 with a running maximum (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv
2307.08691). An empty row keeps maximum -inf and sum 0; nothing in the loop turns that into NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "BIAS_FULL", "BIAS_NONE", "BIAS_ROW", "GROUP_NONE", "GROUP_STREAMS", "GROUP_TREE", "ORDER_BLOCK", "ORDER_CAUSAL",
    "ORDER_NONE", "TABLE_WIDTH", "attention_kernel", "combine_kernel",
]  # fmt: skip

ORDER_NONE, ORDER_CAUSAL, ORDER_BLOCK = 0, 1, 2
GROUP_NONE, GROUP_STREAMS, GROUP_TREE = 0, 1, 2
BIAS_NONE, BIAS_ROW, BIAS_FULL = 0, 1, 2
#: int64 entries per segment: addresses of k and v, strides over batch, head and token of each, length, position,
#: stream, bits of the float32 bias.
TABLE_WIDTH = 12

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_CAUSAL, _BLOCK = tl.constexpr(ORDER_CAUSAL), tl.constexpr(ORDER_BLOCK)
_STREAMS, _TREE = tl.constexpr(GROUP_STREAMS), tl.constexpr(GROUP_TREE)
_ROW, _FULL = tl.constexpr(BIAS_ROW), tl.constexpr(BIAS_FULL)
_WIDTH = tl.constexpr(TABLE_WIDTH)


@triton.jit
def _tile(
    base, stride, first, length, dims, width: tl.constexpr, tma: tl.constexpr, upcast: tl.constexpr, rows: tl.constexpr
):
    """Loads rows `[first, first + rows)` of keys or values, zero beyond `length`: a product with garbage could be NaN.

    base is the address of row 0 or, for the copy engine (tma), the descriptor of all rows, which knows their stride.
    """
    if tma:
        tile = base.load([first, 0])
    else:
        cols = first + tl.arange(0, rows)
        inside = (cols < length)[:, None] & (dims < width)[None, :]
        tile = tl.load(base + cols.to(tl.int64)[:, None] * stride + dims[None, :], mask=inside, other=0.0)
    if upcast:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _keep(
    cols, keys, length, position, stream, row_position, row_id, key_ids, leaves, block,
    ORDER: tl.constexpr, GROUP: tl.constexpr, KEY_IDS: tl.constexpr,
):  # fmt: skip
    """Says which keys of a tile each row sees."""
    keep = (cols < length)[None, :]
    if ORDER == _CAUSAL:
        keep = keep & ((position + cols)[None, :] <= row_position[:, None])
    elif ORDER == _BLOCK:
        keep = keep & (((position + cols) // block)[None, :] <= (row_position // block)[:, None])
    if GROUP == _STREAMS:
        if KEY_IDS:
            ids = tl.load(key_ids + keys, mask=cols < length, other=-2)
            keep = keep & ((ids == -1)[None, :] | (ids[None, :] == row_id[:, None]))
        else:
            keep = keep & ((stream == -1) | (row_id == stream))[:, None]
    elif GROUP == _TREE:
        enter = tl.load(key_ids + keys, mask=cols < length, other=0)
        leave = tl.load(leaves + keys, mask=cols < length, other=0)
        keep = keep & (enter[None, :] <= row_id[:, None]) & (row_id[:, None] < leave[None, :])
    return keep


@triton.jit
def _run(
    acc, top, total, q, k_base, v_base, stride_k, stride_v, low, high, length, position, stream, logit, start,
    row_position, row_id, key_ids, leaves, block, bias, stride_bias, scale, dims,
    MASKED: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr, KEY_IDS: tl.constexpr, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends to the keys `[low, high)` of one segment."""
    for begin in tl.range(low, high, BLOCK_N):
        first = tl.multiple_of(begin, BLOCK_N)
        cols = first + tl.arange(0, BLOCK_N)
        k = _tile(k_base, stride_k, first, length, dims, WIDTH, TMA, UPCAST, BLOCK_N)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + logit
        if BIAS == _ROW:
            row = tl.load(bias + (start + cols) * stride_bias, mask=cols < length, other=0.0)
            logits += row.to(tl.float32)[None, :] * _LOG2E
        elif BIAS == _FULL:
            cells = bias[:, None] + ((start + cols) * stride_bias)[None, :]
            logits += tl.load(cells, mask=(cols < length)[None, :], other=0.0).to(tl.float32) * _LOG2E
        if MASKED:
            keep = _keep(
                cols, start + cols, length, position, stream, row_position, row_id, key_ids, leaves, block,
                ORDER, GROUP, KEY_IDS,
            )  # fmt: skip
            logits = tl.where(keep, logits, -float("inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(logits - safe[:, None])
        fade = tl.exp2(top - safe)
        v = _tile(v_base, stride_v, first, length, dims, WIDTH, TMA, UPCAST, BLOCK_N)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit
def attention_kernel(
    q_base, k_base, v_base, table, bias, query_ids, key_ids, leaves, init_out, init_lse, out, lse,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_bb, stride_bh, stride_bl, stride_bk, stride_query_ids, stride_key_ids,
    stride_ib, stride_ih, stride_il, stride_os, stride_ob, stride_oh, stride_ol,
    scale, num_queries, num_keys, key_heads, num_segments, offset, block, batch_size,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SEGMENTED: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr, KEY_IDS: tl.constexpr, BIAS: tl.constexpr,
    INIT: tl.constexpr, SPLITS: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes out `[SPLITS, B, Hq, Lq, D]` and lse `[SPLITS, B, Hq, Lq]`; grid (row tiles, B * Hkv, SPLITS).

    Row r of a key head is query ``r // GROUP_SIZE`` of query head ``head * GROUP_SIZE + r % GROUP_SIZE``.
    """
    tile = tl.program_id(0)
    if ORDER != 0:
        tile = tl.num_programs(0) - 1 - tile  # the longest rows first, so that the last programs are short ones
    batch, head, split = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads, tl.program_id(2)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query, q_head = rows // GROUP_SIZE, head * GROUP_SIZE + rows % GROUP_SIZE
    real = query < num_queries
    dims = tl.arange(0, BLOCK_D)
    cells = real[:, None] & (dims < WIDTH)[None, :]
    wide_batch, wide_query, wide_head = batch.to(tl.int64), query.to(tl.int64), q_head.to(tl.int64)

    at = wide_batch * stride_qb + wide_head * stride_qh + wide_query * stride_ql
    q = tl.load(q_base + at[:, None] + dims[None, :], mask=cells, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    row_position = offset + query
    row_id = query
    if GROUP != 0:
        row_id = tl.load(query_ids + wide_batch * stride_query_ids + query, mask=real, other=-3)
        key_ids += wide_batch * stride_key_ids
        leaves += wide_batch * stride_key_ids
    if BIAS == _ROW:
        bias += wide_batch * stride_bb
    elif BIAS == _FULL:
        bias += wide_batch * stride_bb + tl.where(real, wide_head * stride_bh + wide_query * stride_bl, 0)

    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if INIT:
        if split == 0:
            flat = (wide_batch * key_heads * GROUP_SIZE + wide_head) * num_queries + wide_query
            top = tl.load(init_lse + flat, mask=real, other=-float("inf")).to(tl.float32) * _LOG2E
            total = tl.where(top == -float("inf"), 0.0, 1.0)
            at = wide_batch * stride_ib + wide_head * stride_ih + wide_query * stride_il
            acc = tl.load(init_out + at[:, None] + dims[None, :], mask=cells, other=0.0).to(tl.float32)

    # Positions of the first and last real query of the tile bound the keys that are seen at all, and by all.
    first_row = offset + (tile * BLOCK_M) // GROUP_SIZE
    last_row = offset + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP_SIZE, num_queries - 1)
    done, start = 0, 0
    share = tl.cdiv(tl.cdiv(num_keys, BLOCK_N) + num_segments - 1, SPLITS)  # tiles per split, at most
    for segment in range(num_segments if SEGMENTED else 1):
        if SEGMENTED:
            entry = table + segment * _WIDTH
            # A loaded address or stride carries no alignment of its own, and without it rows load element by element.
            k_step, v_step = tl.multiple_of(tl.load(entry + 4), ALIGN), tl.multiple_of(tl.load(entry + 7), ALIGN)
            k_at = wide_batch * tl.load(entry + 2) + head * tl.load(entry + 3)
            v_at = wide_batch * tl.load(entry + 5) + head * tl.load(entry + 6)
            k_head = tl.load(entry).to(tl.pointer_type(k_base.dtype.element_ty)) + k_at
            v_head = tl.load(entry + 1).to(tl.pointer_type(k_base.dtype.element_ty)) + v_at
            if ALIGN > 1:
                k_head, v_head = tl.multiple_of(k_head, 16), tl.multiple_of(v_head, 16)
            length, position = tl.load(entry + 8).to(tl.int32), tl.load(entry + 9).to(tl.int32)
            stream = tl.load(entry + 10).to(tl.int32)
            logit = tl.load(entry + 11).to(tl.int32).to(tl.float32, bitcast=True) * _LOG2E
        else:
            k_step, v_step = stride_kl, stride_vl
            k_head = k_base + wide_batch * stride_kb + head.to(tl.int64) * stride_kh
            v_head = v_base + wide_batch * stride_vb + head.to(tl.int64) * stride_vh
            length, position, stream, logit = num_keys, 0, -1, 0.0
        if TMA:
            # One descriptor per tensor, made here: the host cannot make those of segments that it knows only by a
            # table.
            k_head = tl.make_tensor_descriptor(k_head, [length, WIDTH], [k_step, 1], [BLOCK_N, BLOCK_D])
            v_head = tl.make_tensor_descriptor(v_head, [length, WIDTH], [v_step, 1], [BLOCK_N, BLOCK_D])
        tiles = tl.cdiv(length, BLOCK_N)
        low = tl.minimum(tl.maximum(split * share - done, 0), tiles) * BLOCK_N
        high = tl.minimum(tl.maximum((split + 1) * share - done, 0), tiles) * BLOCK_N
        seen_by_all, seen = length, length
        if ORDER == _CAUSAL:
            seen_by_all, seen = first_row + 1 - position, last_row + 1 - position
        elif ORDER == _BLOCK:
            seen_by_all, seen = (first_row // block + 1) * block - position, (last_row // block + 1) * block - position
        high = tl.minimum(high, tl.maximum(seen, 0))
        free = tl.minimum(tl.maximum(tl.minimum(seen_by_all, length), 0) // BLOCK_N * BLOCK_N, high)
        if GROUP != 0:
            free = low
        free = tl.maximum(free, low)
        acc, top, total = _run(
            acc, top, total, q, k_head, v_head, k_step, v_step, low, free, length, position, stream, logit, start,
            row_position, row_id, key_ids, leaves, block, bias, stride_bk, scale, dims,
            False, ORDER, GROUP, KEY_IDS, BIAS, WIDTH, BLOCK_N, TMA, UPCAST, PRECISION,
        )  # fmt: skip
        acc, top, total = _run(
            acc, top, total, q, k_head, v_head, k_step, v_step, free, high, length, position, stream, logit, start,
            row_position, row_id, key_ids, leaves, block, bias, stride_bk, scale, dims,
            True, ORDER, GROUP, KEY_IDS, BIAS, WIDTH, BLOCK_N, TMA, UPCAST, PRECISION,
        )  # fmt: skip
        done += tiles
        start += length

    empty = total == 0.0
    whole = tl.where(empty, 1.0, total)
    at = split.to(tl.int64) * stride_os + wide_batch * stride_ob + wide_head * stride_oh + wide_query * stride_ol
    tl.store(out + at[:, None] + dims[None, :], (acc / whole[:, None]).to(out.dtype.element_ty), mask=cells)
    flat = ((split * batch_size + wide_batch) * key_heads * GROUP_SIZE + wide_head) * num_queries + wide_query
    tl.store(lse + flat, tl.where(empty, -float("inf"), (top + tl.log2(whole)) * _LN2), mask=real)


@triton.jit
def combine_kernel(
    parts, part_lse, out, lse, stride_ob, stride_oh, stride_ol, heads, num_queries, rows,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one row: parts float32 `[SPLITS, rows, WIDTH]`, part_lse `[SPLITS, rows]`; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    values = tl.load(part_lse + splits * rows + row, mask=splits < SPLITS, other=-float("inf"))
    top = tl.max(values, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp2((values - top) * _LOG2E)
    total = tl.sum(weights, 0)
    cells = (splits < SPLITS)[:, None] & (dims < WIDTH)[None, :]
    values = tl.load(parts + (splits[:, None] * rows + row) * WIDTH + dims[None, :], mask=cells, other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    batch, head, query = row // (heads * num_queries), row // num_queries % heads, row % num_queries
    at = batch * stride_ob + head * stride_oh + query * stride_ol
    tl.store(out + at + dims, merged.to(out.dtype.element_ty), mask=dims < WIDTH)
    tl.store(lse + row, tl.where(total == 0.0, -float("inf"), top + tl.log2(total) * _LN2))
