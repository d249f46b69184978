"""Computes attention on Hopper: one warp loads, two warp groups compute, each 64 query rows of the same head.

Plain Triton ignores warp specialisation on sm_90. Here a producer warp keeps a ring of key and value tiles filled by
the copy engine (TMA) and gives its registers away; the consumers wait for tiles only, and the softmax of one overlaps
the products of the other. Source: FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["CONSUMERS", "ROWS", "hopper_attention_kernel"]

#: Rows per consumer and consumers per program.
ROWS, CONSUMERS = 64, 2
_ROWS = gl.constexpr(ROWS)
_LOG2E, _LN2 = gl.constexpr(1.4426950408889634), gl.constexpr(0.6931471805599453)
#: What copies a tile from global to shared memory; triton 3.9 renames it.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _tiles_seen(last_row, num_keys, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Counts the key tiles that rows up to `last_row` see any key of."""
    keys = num_keys
    if CAUSAL:
        keys = gl.minimum(num_keys, last_row + 1)
    return (keys + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_ready, k_full, k_empty, v_full, v_empty,
    batch, head, key_head, first_row, num_tiles, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    for part in gl.static_range(CONSUMERS):
        bar = q_ready.index(part)
        mbarrier.expect(bar, q_desc.block_type.nbytes)
        _load(q_desc, [batch, head, first_row + part * _ROWS, 0], bar, q_tiles.index(part))
    for tile in range(num_tiles):
        stage, turn = tile % STAGES, (tile // STAGES) & 1
        # A fresh barrier counts as having completed the phase before: the first round does not wait.
        mbarrier.wait(k_empty.index(stage), turn ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        row = tile * k_desc.block_type.shape[2]
        _load(k_desc, [batch, key_head, row, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), turn ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        _load(v_desc, [batch, key_head, row, 0], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _consume(
    PART: gl.constexpr, q_tiles, k_tiles, v_tiles, q_ready, k_full, k_empty, v_full, v_empty, out, lse,
    stride_ob, stride_oh, stride_ol, batch, head, heads, first_row, num_tiles, num_queries, num_keys, scale,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    weights_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, logits_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)

    rows = first_row + PART * _ROWS + gl.arange(0, _ROWS, layout=row_layout)
    top = gl.full([_ROWS], -float("inf"), gl.float32, layout=row_layout)
    total = gl.zeros([_ROWS], gl.float32, layout=row_layout)
    acc = gl.zeros([_ROWS, WIDTH], gl.float32, layout=out_layout)
    q = q_tiles.index(PART).reshape([_ROWS, WIDTH])
    mbarrier.wait(q_ready.index(PART), 0)
    for tile in range(num_tiles):
        stage, turn = tile % STAGES, (tile // STAGES) & 1
        mbarrier.wait(k_full.index(stage), turn)
        k = k_tiles.index(stage).reshape([BLOCK_N, WIDTH]).permute((1, 0))
        logits = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=logits_layout)
        logits = warpgroup_mma(q, k, logits, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k_empty.index(stage), count=1)
        logits = logits * scale
        cols = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, logits_layout))
        edge = (tile + 1) * BLOCK_N > num_keys
        if CAUSAL:
            edge = edge | ((tile + 1) * BLOCK_N > first_row + PART * _ROWS)
        if edge:
            keep = gl.expand_dims(cols < num_keys, 0)
            if CAUSAL:
                keep = keep & (gl.expand_dims(cols, 0) <= gl.expand_dims(rows, 1))
            logits = gl.where(keep, logits, -float("inf"))
        new = gl.maximum(top, gl.max(logits, axis=1))
        safe = gl.where(new == -float("inf"), 0.0, new)
        weights = gl.exp2(logits - gl.expand_dims(safe, 1))
        fade = gl.exp2(top - safe)
        total = total * fade + gl.sum(weights, axis=1)
        top = new
        acc = acc * gl.expand_dims(gl.convert_layout(fade, out_row_layout), 1)
        operand = gl.convert_layout(weights.to(v_tiles.dtype), weights_layout)
        mbarrier.wait(v_full.index(stage), turn)
        v = v_tiles.index(stage).reshape([BLOCK_N, WIDTH])
        acc = warpgroup_mma(operand, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage), count=1)

    empty = total == 0.0
    whole = gl.where(empty, 1.0, total)
    flat = (batch.to(gl.int64) * heads + head) * num_queries + rows
    gl.store(lse + flat, gl.where(empty, -float("inf"), (top + gl.log2(whole)) * _LN2), mask=rows < num_queries)
    result = acc / gl.expand_dims(gl.convert_layout(whole, out_row_layout), 1)
    out_rows = first_row + PART * _ROWS + gl.arange(0, _ROWS, layout=out_row_layout)
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, out_layout))
    at = batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + out_rows.to(gl.int64) * stride_ol
    cells = out + gl.expand_dims(at, 1) + gl.expand_dims(dims, 0)
    gl.store(cells, result.to(out.dtype.element_ty), mask=gl.expand_dims(out_rows < num_queries, 1))


@gluon.jit
def hopper_attention_kernel(
    q_desc, k_desc, v_desc, out, lse, stride_ob, stride_oh, stride_ol, heads, group, num_queries, num_keys, scale,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Computes out `[B, Hq, Lq, WIDTH]` and lse `[B, Hq, Lq]` on a grid (tiles of 128 queries, B * Hq).

    It takes 4 warps and 4 + 1 more. Causal means the square mask: as many queries as keys. The descriptors read tiles
    of `[1, 1, 64 | BLOCK_N, WIDTH]`.
    """
    tile = gl.program_id(0)
    if CAUSAL:
        tile = gl.num_programs(0) - 1 - tile  # the longest rows first
    batch, head = gl.program_id(1) // heads, gl.program_id(1) % heads
    first_row = tile * _ROWS * CONSUMERS
    num_tiles = _tiles_seen(first_row + _ROWS * CONSUMERS - 1, num_keys, BLOCK_N, CAUSAL)

    element: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(element, [CONSUMERS, 1, 1, _ROWS, WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(element, [STAGES, 1, 1, BLOCK_N, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(element, [STAGES, 1, 1, BLOCK_N, WIDTH], v_desc.layout)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], one)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    zero: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (zero, q_tiles, k_tiles, v_tiles, q_ready, k_full, k_empty, v_full, v_empty, out, lse,
                        stride_ob, stride_oh, stride_ol, batch, head, heads, first_row, num_tiles, num_queries,
                        num_keys, scale, WIDTH, BLOCK_N, STAGES, CAUSAL)),
            (_consume, (second, q_tiles, k_tiles, v_tiles, q_ready, k_full, k_empty, v_full, v_empty, out, lse,
                        stride_ob, stride_oh, stride_ol, batch, head, heads, first_row, num_tiles, num_queries,
                        num_keys, scale, WIDTH, BLOCK_N, STAGES, CAUSAL)),
            (_produce, (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_ready, k_full, k_empty, v_full, v_empty,
                        batch, head, head // group, first_row, num_tiles, STAGES, CONSUMERS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
