"""Runs on every rank: the stage of TokenRing alone, on shapes that no model here has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partsong.kernels import attention
from partsong.ledger import Ledger
from partsong.parallel import Mesh
from partsong.parallel.attention_call import AttentionCall, AttentionShape, attend_locally
from partsong.parallel.exchange.token_ring import TokenRingStage
from partsong.parallel.hooks.clock import StepClock
from tests.parallel.ranks import gathered

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
#: tokens of every rank, query heads, key/value heads
CASES = (((3, 0, 2, 1), 6, 2), ((5, 4, 4, 4), 3, 3), ((0, 0, 7, 0), 4, 1))
BATCH, HEAD_DIM = 2, 5


def inputs(sizes: tuple[int, ...], heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded queries, keys and values of all tokens, cast from the same numbers."""
    draw = torch.Generator().manual_seed(sum(sizes))
    shapes = [(BATCH, sum(sizes), count, HEAD_DIM) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v


def keep(sizes: tuple[int, ...]) -> Tensor:
    """A key mask `[B, 1, 1, L]` that hides all keys of the first rank that has any in the first sample."""
    mask = torch.ones(BATCH, 1, 1, sum(sizes), dtype=torch.bool)
    mask[0, ..., : next(size for size in sizes if size)] = False
    return mask


def run(nproc: int) -> list[dict[Any, dict[str, Any]]]:
    """For each case and type: this rank's distance from one kernel over all keys, and its bytes."""
    results = {}
    with Mesh(ring=nproc) as mesh:
        axis = mesh.axis("ring")
        stage = TokenRingStage(axis, StepClock())
        for sizes, heads, kv_heads in CASES:
            for name, dtype in DTYPES.items():
                q, k, v = inputs(sizes, heads, kv_heads, dtype)
                mask = keep(sizes)
                want = attention(q.double(), k.double(), v.double(), mask=mask)[0].split(list(sizes), 2)[axis.index]
                q, k, v = (x.split(list(sizes), 2)[axis.index] for x in (q, k, v))
                call = AttentionCall(0, q, k, v, sizes, axis.index, mask.split(list(sizes), 3))
                with Ledger() as ledger:
                    got = stage.run(call, attend_locally)
                shape = AttentionShape(BATCH, heads, kv_heads, HEAD_DIM, dtype.itemsize, sizes, axis.index)
                results[sizes, name] = {
                    "error": (got.double() - want).abs().max().item() if got.numel() else 0.0,
                    "dtype": got.dtype is dtype,
                    "counted": int(ledger.summary()["bytes_sent"]),
                    "predicted": stage.predict(shape)[0],
                }
        return gathered(results)
