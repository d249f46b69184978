"""`merge` is exact, in any number of parts, and never NaN."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels import merge
from partsong.kernels.call import missing_triton
from tests.kernels.oracle import difference, inputs, oracle


@pytest.mark.parametrize("num_parts", range(1, 7))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_equal_the_whole(num_parts, dtype) -> None:
    q, k, v = inputs(2, 4, 2, 7, 23, 8)
    cuts = [round(23 * (i / num_parts) ** 2) for i in range(num_parts + 1)]
    parts = [oracle(q, k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(cuts)]
    parts = [(out.to(dtype), lse.to(dtype)) for out, lse in parts]
    merged = merge(parts)
    assert difference(merged, oracle(q, k, v)) <= (1e-12 if dtype is torch.float64 else 2e-6)
    assert merged[0].dtype is merged[1].dtype is dtype
    assert difference(merge(reversed(parts)), merged) <= (1e-14 if dtype is torch.float64 else 1e-6)


def test_empty_parts_count_nothing() -> None:
    out, lse = torch.randn(3, 5, 4), torch.randn(3, 5)
    empty = (torch.randn(3, 5, 4), torch.full((3, 5), -math.inf))
    for parts in ([empty, (out, lse)], [(out, lse), empty], [empty, empty, (out, lse), empty]):
        assert difference(merge(parts), (out, lse)) <= 1e-7
    both = merge([empty, empty])
    assert not both[0].any()
    assert (both[1] == -math.inf).all()


def test_rows_are_empty_one_by_one() -> None:
    first, second = torch.tensor([0.0, -math.inf, -math.inf, 3.0]), torch.tensor([-math.inf, 1.0, -math.inf, 3.0])
    ones = torch.ones(4, 2)
    out, lse = merge([(ones, first), (3 * ones, second)])
    assert out[:, 0].tolist() == [1.0, 3.0, 0.0, 2.0]
    assert lse.tolist() == pytest.approx([0.0, 1.0, -math.inf, 3.0 + math.log(2)])


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits_do_not_overflow(size) -> None:
    ones = torch.ones(1, 2)
    out, lse = merge([(ones, torch.tensor([size])), (3 * ones, torch.tensor([size]))])
    assert out.tolist() == [[2.0, 2.0]]
    assert lse.item() == pytest.approx(size + math.log(2), rel=1e-6)


def test_dtypes() -> None:
    half = (torch.randn(2, 3).bfloat16(), torch.randn(2))
    single, double = (torch.randn(2, 3), torch.randn(2)), (torch.randn(2, 3).double(), torch.randn(2).double())
    assert [x.dtype for x in merge([half, half])] == [torch.bfloat16, torch.float32]
    assert [x.dtype for x in merge([single, half])] == [torch.float32, torch.float32]
    assert [x.dtype for x in merge([half, double])] == [torch.bfloat16, torch.float64]
    assert [x.dtype for x in merge([half])] == [torch.bfloat16, torch.float32]


def test_bfloat16_parts_are_rounded_once() -> None:
    q, k, v = inputs(1, 2, 2, 64, 512, 16)
    parts = [oracle(q, a, b) for a, b in zip(k.chunk(16, 2), v.chunk(16, 2), strict=True)]
    merged, _ = merge([(parts[0][0].float(), parts[0][1].float()), *((o.bfloat16(), x.float()) for o, x in parts[1:])])
    assert (merged - oracle(q, k, v)[0]).abs().max() < 2e-3


def test_layout_and_inputs_are_kept() -> None:
    out = torch.randn(2, 5, 3, 4).transpose(1, 2)
    lse = torch.randn(2, 3, 5)
    before = out.clone(), lse.clone()
    merged, _ = merge([(out, lse), (out, lse)])
    assert merged.stride() == out.stride()
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


def test_refusals() -> None:
    good = (torch.zeros(2, 3, 4), torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="at least one"):
        merge([])
    with pytest.raises(ArgumentError, match="part 1"):
        merge([good, (torch.zeros(2, 2, 4), torch.zeros(2, 2))])
    with pytest.raises(ArgumentError, match="part 0"):
        merge([(torch.zeros(2, 3, 4), torch.zeros(2, 3, 1))])
    with pytest.raises(ArgumentError, match="one device"):
        merge([good, (good[0].to("meta"), good[1].to("meta"))])
    for bad in (good[0], (good[0],), (good[0].long(), good[1]), (None, good[1])):
        with pytest.raises(ArgumentTypeError):
            merge([good, bad])


@pytest.mark.skipif(bool(missing_triton()), reason=missing_triton() or "it is there")
@pytest.mark.parametrize("num_parts", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_fused_kernel_equals_its_slow_twin(num_parts, dtype) -> None:
    from partsong.kernels.merge_triton import merged

    seeded = torch.Generator().manual_seed(num_parts)
    parts = []
    for part in range(num_parts):
        out = torch.randn(2, 37, 3, 20, generator=seeded).transpose(1, 2)  # tokens before heads, as kernels give them
        lse = 30 * torch.randn(2, 3, 37, generator=seeded)
        lse[:, part % 3, ::2] = -math.inf
        lse[:, 0, 5] = -math.inf  # empty in every part
        parts.append((out.to(dtype) if part else out.contiguous(), lse))
    out, lse = merged(parts)
    want, want_lse = merge([(out.double(), lse.double()) for out, lse in parts])
    assert out.dtype is torch.float32
    assert out.stride() == parts[0][0].stride()
    assert difference((out, lse), (want, want_lse)) <= 2e-6
    assert not out[:, 0, 5].any()
    assert (lse[:, 0, 5] == -math.inf).all()
