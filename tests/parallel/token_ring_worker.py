"""Runs on every rank: the stages of Ring and TokenRing alone, on shapes that no model here has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partsong.kernels import attention
from partsong.ledger import Ledger
from partsong.parallel import Mesh
from partsong.parallel.attention_call import AttentionCall, AttentionShape, Stage, attend_locally, mask_rows
from partsong.parallel.exchange.ring import RingStage
from partsong.parallel.exchange.token_ring import TokenRingStage
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Axis
from tests.parallel.ranks import gathered

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
FORMS = ("keys", "queries and keys")
#: tokens of every rank, query heads, key/value heads
CASES = (((3, 0, 2, 1, 2), 6, 2), ((5, 4, 4, 4, 4), 3, 3), ((0, 0, 7, 0, 0), 4, 1))
#: The stages: of five ranks that double, some are to get an answer when they get queries.
STAGES: dict[str, Callable[[Axis], Stage]] = {
    "TokenRing, one": lambda axis: TokenRingStage(axis, StepClock(), blocks="one"),
    "TokenRing, doubling": lambda axis: TokenRingStage(axis, StepClock(), blocks="doubling"),
    "Ring, one": lambda axis: RingStage(axis, StepClock(), "one"),
    "Ring, doubling": lambda axis: RingStage(axis, StepClock(), "doubling"),
}
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


def masks(sizes: tuple[int, ...], form: str) -> Tensor:
    """A mask of keys, or one `[B, 1, L, L]` of queries and keys in which every query sees some keys."""
    if form == "keys":
        return keep(sizes)
    length = sum(sizes)
    drawn = torch.rand(BATCH, 1, length, length, generator=torch.Generator().manual_seed(5)) < 0.6
    return drawn | torch.eye(length, dtype=torch.bool)


def run(nproc: int) -> list[dict[Any, dict[str, Any]]]:
    """For each case: this rank's distance from one kernel over all keys, and its bytes."""
    results = {}
    with Mesh(ring=nproc) as mesh:
        axis = mesh.axis("ring")
        for stage_name, make in STAGES.items():
            for (sizes, heads, kv_heads), name, form in itertools.product(CASES, DTYPES, FORMS):
                results[stage_name, sizes, name, form] = _case(axis, make(axis), sizes, (heads, kv_heads), name, form)
        return gathered(results)


def _case(
    axis: Axis, stage: Stage, sizes: tuple[int, ...], numbers: tuple[int, int], name: str, form: str
) -> dict[str, Any]:
    dtype, mask, me = DTYPES[name], masks(sizes, form), axis.index
    q, k, v = inputs(sizes, *numbers, dtype)
    want = attention(q.double(), k.double(), v.double(), mask=mask)[0].split(list(sizes), 2)[me]
    q, k, v = (x.split(list(sizes), 2)[me] for x in (q, k, v))
    whole = None if form == "keys" else mask
    rows = mask.split(list(sizes), 3) if whole is None else mask_rows(whole, sizes, me)
    call = AttentionCall(0, q, k, v, sizes, me, rows, whole_mask=whole)
    with Ledger() as ledger:
        stage.run(call, attend_locally)
        got = stage.run(call, attend_locally)  # from the same memory
    shape = AttentionShape(BATCH, *numbers, HEAD_DIM, dtype.itemsize, sizes, me)
    return {
        "error": (got.double() - want).abs().max().item() if got.numel() else 0.0,
        "dtype": got.dtype is dtype,
        "counted": ledger.summary()["bytes_sent"] / 2,
        "predicted": stage.predict(shape)[0],
    }
