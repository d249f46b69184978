"""The ring's total: float32 from the first block on, whatever the model's dtype. On ranks: `test_equivalence`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from partsong import Ring, TokenRing
from partsong.errors import ArgumentError
from partsong.parallel.attention_call import AttentionCall
from partsong.parallel.exchange import ring
from partsong.parallel.exchange.turns import doubles, turns_of
from partsong.parallel.ranks.mesh import Axis
from tests.kernels.oracle import TOLERANCE, difference, inputs, oracle


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [None, "bool", "float"])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_blocks_add_up(dtype: torch.dtype, form: str | None, one_by_one: bool) -> None:
    sizes = (9, 4, 12)
    q, k, v = inputs(2, 4, 2, 9, sum(sizes), 16, dtype=dtype)
    keep = torch.rand(2, 1, 1, sum(sizes), generator=torch.Generator().manual_seed(0)) < 0.6
    keep[0, ..., 9:13] = False  # a whole block that one sample does not see
    mask = {None: None, "bool": keep, "float": torch.zeros(keep.shape).masked_fill(~keep, -math.inf)}[form]
    masks = None if mask is None else tuple(mask.split(sizes, dim=-1))
    call = AttentionCall(layer=0, q=q, k=k[:, :, :9], v=v[:, :, :9], sizes=sizes, index=0, masks=masks)
    total = None
    parts = [slice(sum(sizes[:owner]), sum(sizes[: owner + 1])) for owner in range(3)]
    for owners in [(0,), (2,), (1,)] if one_by_one else [(0,), (2, 1)]:
        keys, values = (torch.cat([x[:, :, parts[owner]] for owner in owners], dim=2) for x in (k, v))
        total = ring._attend(call, keys, values, owners, total)
        assert total[0].dtype is total[1].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert total is not None
    assert difference(total, oracle(q, k, v, mask=keep if form else None)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("doubling", [False, True])
def test_after_all_turns_every_rank_has_had_every_block(doubling: bool) -> None:
    for size in range(1, 34):
        has = [[rank] for rank in range(size)]  # whose blocks each rank has, in the order in which it numbers them
        for turn in turns_of(size, doubling=doubling):
            sent = [[has[rank][block] for block in turn.sent] for rank in range(size)]
            for rank in range(size):
                assert turn.first == len(has[rank])
                has[rank] = has[rank] + sent[(rank - turn.hop) % size]
        assert has == [[(rank - block) % size for block in range(size)] for rank in range(size)]
        turns = len(turns_of(size, doubling=doubling))
        assert turns == ((size - 1).bit_length() if doubling else size - 1)


@pytest.mark.parametrize("strategy", [Ring, TokenRing])
def test_compressed_blocks_are_not_joined(strategy: Any) -> None:
    with pytest.raises(ArgumentError, match="travel one by one"):
        strategy(wire="int8", blocks="doubling").validate()


def test_blocks_are_joined_where_a_gpu_would_wait_for_its_host() -> None:
    gpus = Axis("ring", tuple(range(8)), 0, None, is_fused=True)
    cpus = Axis("ring", tuple(range(8)), 0, None, is_fused=False)
    flux, wan = (4608 // 8,) * 8, (75_600 // 8,) * 8
    assert doubles("auto", gpus, flux, 24) and not doubles("auto", gpus, wan, 40)
    assert not doubles("auto", cpus, flux, 24) and doubles("doubling", cpus, flux, 24)
    assert not doubles("one", gpus, flux, 24)
