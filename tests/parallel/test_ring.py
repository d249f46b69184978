"""The ring's total: float32 from the first block on, whatever the model's dtype. On ranks: `test_equivalence`."""

from __future__ import annotations

import math

import pytest
import torch

from partsong.parallel.attention_call import AttentionCall
from partsong.parallel.exchange import ring
from tests.kernels.oracle import TOLERANCE, difference, inputs, oracle


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [None, "bool", "float"])
def test_blocks_add_up(dtype: torch.dtype, form: str | None) -> None:
    sizes = (9, 4, 12)
    q, k, v = inputs(2, 4, 2, 9, sum(sizes), 16, dtype=dtype)
    keep = torch.rand(2, 1, 1, sum(sizes), generator=torch.Generator().manual_seed(0)) < 0.6
    keep[0, ..., 9:13] = False  # a whole block that one sample does not see
    mask = {None: None, "bool": keep, "float": torch.zeros(keep.shape).masked_fill(~keep, -math.inf)}[form]
    masks = None if mask is None else tuple(mask.split(sizes, dim=-1))
    call = AttentionCall(layer=0, q=q, k=k[:, :, :9], v=v[:, :, :9], sizes=sizes, index=0, masks=masks)
    total = None
    for owner in (0, 2, 1):
        block = slice(sum(sizes[:owner]), sum(sizes[: owner + 1]))
        total = ring._attend(call, k[:, :, block], v[:, :, block], owner, total)
        assert total[0].dtype is total[1].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert total is not None
    assert difference(total, oracle(q, k, v, mask=keep if form else None)) <= TOLERANCE[dtype]
