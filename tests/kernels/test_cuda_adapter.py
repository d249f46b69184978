"""What the CUDA kernels need around them that can be checked without a GPU: the operator is replaced by einsum."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import pad

from partsong.kernels import Causal, Segment
from partsong.kernels.backends import cuda
from partsong.kernels.call import Call
from tests.kernels.oracle import TOLERANCE, difference, inputs, oracle

KERNELS = [cuda.CUDNN, cuda.FLASH, cuda.EFFICIENT]


def stand_in(shape: str):
    """An operator that checks what the real one demands and returns its kind of log-sum-exp."""

    def call(q, k, v, bias, causal, scale):
        assert q.shape[3] % 8 == 0
        for x in (q, k, v):
            assert x.stride(3) == 1
            assert all(step % (16 // x.element_size()) == 0 for step in x.stride()[:3])
        if bias is not None:
            assert bias.shape == (*q.shape[:3], k.shape[2])
            assert bias.dtype is q.dtype
            assert all(step % 16 == 0 for step in bias.stride()[:3])
            assert bias.stride(3) == 1
        if shape == "padded":
            assert q.shape[1] == k.shape[1]
        mask = torch.ones(q.shape[2], k.shape[2]).tril().bool()[None, None] if causal else None
        out, lse = oracle(q, k, v, mask=mask, bias=bias, scale=scale)
        empty = lse.isinf()
        out, lse = out.masked_fill(empty[..., None], math.nan), lse.masked_fill(empty, math.inf)
        lse = {"plain": lse, "trailing": lse[..., None], "padded": pad(lse, (0, -lse.shape[2] % 32), value=math.inf)}[
            shape
        ]
        return out.to(q.dtype), lse.float()

    return call


def with_stand_in(monkeypatch: pytest.MonkeyPatch, kernel: cuda.CudaKernel, shape: str) -> cuda.CudaKernel:
    monkeypatch.setattr(cuda.CudaKernel, "call", staticmethod(stand_in(shape)))
    return kernel


def call_of(q, k, v, bias, scale, mask=None):
    return Call(q, (Segment(k, v, position=0),), mask, bias, scale)


def test_square_causal_is_the_operators_own(monkeypatch) -> None:
    kernel = with_stand_in(monkeypatch, cuda.FLASH, "plain")
    q, k, v = inputs(1, 4, 2, 21, 21, 16, dtype=torch.float16)
    call = call_of(q, k, v, None, 0.25, Causal()).plain()
    assert call.bias is None
    mask = torch.ones(21, 21).tril().bool()[None, None]
    assert difference(kernel.run(call), oracle(q, k, v, mask=mask, scale=0.25)) <= TOLERANCE[torch.float16]
    assert call_of(q[:, :, 1:], k, v, None, 0.25, Causal(offset=1)).plain().bias is not None


@pytest.mark.parametrize("shape", ["plain", "trailing", "padded"])
@pytest.mark.parametrize("width", [8, 13, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_adapter(shape, width, masked, monkeypatch) -> None:
    kernel = with_stand_in(monkeypatch, dataclasses.replace(cuda.EFFICIENT, grouped=shape != "padded"), shape)
    q, k, v = inputs(2, 4, 2, 9, 21, width, dtype=torch.float32)
    bias = None
    if masked:
        bias = torch.zeros(2, 1, 9, 21).masked_fill(torch.rand(2, 1, 9, 21) < 0.5, -math.inf)
        bias[0, 0, 3] = -math.inf
    result = kernel.run(call_of(q, k, v, bias, width**-0.5))
    assert difference(result, oracle(q, k, v, bias=bias)) <= TOLERANCE[torch.float32]
    assert result[1].is_contiguous()


def test_strided_and_unaligned_inputs_are_copied(monkeypatch) -> None:
    kernel = with_stand_in(monkeypatch, cuda.FLASH, "plain")
    q, k, v = inputs(1, 2, 2, 9, 21, 16, dtype=torch.float16)
    result = kernel.run(call_of(q.mT.contiguous().mT, torch.cat([k, k[..., :1]], -1)[..., :16], v, None, 0.25))
    assert difference(result, oracle(q, k, v, scale=0.25)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_refuses_the_cpu_with_a_reason(kernel) -> None:
    q, k, v = inputs(1, 1, 1, 2, 3, 8)
    assert kernel.supports(call_of(q, k, v, None, 1.0)) == (False, "the tensors are on cpu, not cuda")
    if not torch.cuda.is_available():
        assert kernel.usable() == (False, "no CUDA device")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_operator_takes_the_arguments_we_give(kernel) -> None:
    names = [argument.name for argument in getattr(torch.ops.aten, kernel.operator).default._schema.arguments]
    bias = ["attn_bias", "compute_log_sumexp"] if kernel.takes_bias else []
    debug = [] if kernel.name == "efficient" else ["return_debug_mask"]
    assert names == ["query", "key", "value", *bias, "dropout_p", "is_causal", *debug, "scale"]
