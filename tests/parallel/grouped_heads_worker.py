"""Runs on every rank: Ulysses' stage alone, where a rank's queries read the keys of several groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partsong.parallel import Mesh
from partsong.parallel.attention_call import AttentionCall, attend_locally
from partsong.parallel.exchange.ulysses import Ulysses
from tests.parallel.ranks import gathered

#: tokens of every rank, query heads, key/value heads
CASES = (((3, 4, 2), 8, 4), ((3, 4, 2), 6, 3), ((2, 5, 1), 6, 2), ((4, 1, 3), 8, 2))
BATCH, HEAD_DIM = 2, 4


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends head by head, each query head with the keys and values of its own group."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        weights = (q[:, head] @ k[:, head // group].mT / math.sqrt(q.shape[-1])).softmax(-1)
        heads.append(weights @ v[:, head // group])
    return torch.stack(heads, 1)


def apart(nproc: int) -> list[dict[tuple[int, int], float]]:
    """For each case: this rank's largest distance from what is made by hand."""
    results = {}
    with Mesh(ulysses=nproc) as mesh:
        (stage,) = Ulysses().stages(mesh, None)  # type: ignore[arg-type]
        axis = mesh.axis("ulysses")
        for tokens, heads, kv_heads in CASES:
            sizes = tokens[:nproc]
            draw = torch.Generator().manual_seed(heads)
            shapes = [(BATCH, count, sum(sizes), HEAD_DIM) for count in (heads, kv_heads, kv_heads)]
            q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
            want = by_hand(q, k, v).split(list(sizes), 2)[axis.index]
            mine = (part.split(list(sizes), 2)[axis.index] for part in (q, k, v))
            got = stage.run(AttentionCall(0, *mine, sizes, axis.index), attend_locally)
            results[heads, kv_heads] = float((got - want).abs().max())
        return gathered(results)
