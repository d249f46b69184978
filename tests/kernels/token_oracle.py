"""The token head written out in float64 with a full softmax, and inputs to compare on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from partsong.kernels.call import missing_triton
from partsong.kernels.token_head import ENV

needs_triton = pytest.mark.skipif(bool(missing_triton()), reason=missing_triton() or "it is there")
_TRITON = pytest.param("triton", marks=needs_triton)
on_each_twin = pytest.mark.parametrize("twin", ["naive", _TRITON], indirect=True)
on_triton = pytest.mark.parametrize("twin", [_TRITON], indirect=True)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3}


@contextmanager
def forced(name: str) -> Iterator[str]:
    """Makes `token_stats` use one kernel, and tensors be born where it runs.

    Memory for the Triton kernel's results is full of NaN and of tokens there are not: an unwritten element fails.
    """
    device = "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"
    with pytest.MonkeyPatch.context() as patch, torch.device(device):
        patch.setenv(ENV, name)
        if name == "triton":
            from partsong.kernels import token_head_launch

            patch.setattr(token_head_launch, "_empty", _poisoned)
        yield name


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, math.nan if dtype.is_floating_point else -(10**9), dtype=dtype, device=device)


def inputs(rows: int | tuple[int, int], vocabulary: int, width: int, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (rows,) if isinstance(rows, int) else rows
    hidden = torch.randn(*shape, width, generator=generator, dtype=torch.float64, device="cpu")
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64, device="cpu")
    device = torch.get_default_device()
    return hidden.to(device, dtype), (weight * 3 / math.sqrt(width)).to(device, dtype)


def logits_of(hidden: Tensor, weight: Tensor, bias=None, softcap=None, logit_scale=1.0) -> Tensor:
    x = hidden.double() @ weight.double().T
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return logit_scale * (x if bias is None else x + bias.double())


def specification(x: Tensor, token: Tensor) -> dict[str, Tensor]:
    """The statistics of float64 logits, and of a token somebody else has drawn, by a softmax over everything."""
    p = torch.softmax(x, dim=-1)
    best = p.sort(dim=-1, descending=True).values
    runner_up = best[..., 1] if x.shape[-1] > 1 else torch.zeros_like(best[..., 0])
    return {
        "token_prob": p.gather(-1, token.unsqueeze(-1)).squeeze(-1),
        "max_prob": best[..., 0],
        "margin": best[..., 0] - runner_up,
        "entropy": -torch.special.xlogy(p, p).sum(dim=-1),
        "lse": torch.logsumexp(x, dim=-1),
    }


def check(stats, x: Tensor, tolerance: float) -> None:
    """All statistics against float64 logits; an argmax may differ from theirs where rounding cannot tell."""
    for name, expected in specification(x, stats.token).items():
        value = getattr(stats, name).double()
        assert value.shape == expected.shape
        error = (value - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert error <= tolerance, f"{name}: {error:.1e}"
    slack = 10 * tolerance * x[x.isfinite()].abs().max().clamp(min=1.0)
    assert (x.gather(-1, stats.argmax.unsqueeze(-1)).squeeze(-1) >= x.amax(dim=-1) - slack).all()
