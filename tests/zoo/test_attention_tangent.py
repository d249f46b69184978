"""The derivative of attention against torch's own, differences, and whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong_zoo.shapes.model import build_transformer
from partsong_zoo.training.attention_tangent import attention_tangent, directional_derivative


def draws(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    logits = scale * q @ k.mT
    return (logits if bias is None else logits + bias).softmax(dim=-1) @ v


SHAPES = ((2, 3, 7, 5), (2, 3, 11, 5), (2, 3, 11, 4))


@pytest.mark.parametrize("block", [1024, 4, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_torch_forward_differentiation(block: int, biased: bool) -> None:
    values, tangents = tuple(draws(*SHAPES)), tuple(draws(*SHAPES, seed=1))
    bias = None
    if biased:
        (bias,) = draws((2, 1, 7, 11), seed=2)
        bias[:, :, :, :4] = -torch.inf  # a whole block of keys that nobody sees
    expected = torch.func.jvp(lambda q, k, v: softmax_attention(q, k, v, bias, 0.3), values, tangents)
    got = attention_tangent(values, tangents, bias=bias, scale=0.3, block=block)  # type: ignore[arg-type]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_equals_differences() -> None:
    values, tangents, step = draws(*SHAPES), draws(*SHAPES, seed=1), 1e-5
    ends = []
    for sign in (1, -1):
        q, k, v = (value + sign * step * tangent for value, tangent in zip(values, tangents, strict=True))
        ends.append(softmax_attention(q, k, v, None, 5**-0.5))
    derivative = attention_tangent(tuple(values), tuple(tangents))[1]  # type: ignore[arg-type]
    torch.testing.assert_close(derivative, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_a_row_without_keys_is_zero() -> None:
    values, tangents = tuple(draws(*SHAPES)), tuple(draws(*SHAPES, seed=1))
    bias = torch.zeros(1, 1, 7, 11, dtype=torch.float64)
    bias[:, :, 3] = -torch.inf
    out, derivative = attention_tangent(values, tangents, bias=bias, block=4)  # type: ignore[arg-type]
    assert not out[:, :, 3].any() and not derivative[:, :, 3].any()
    assert bool(out.isfinite().all()) and bool(derivative.isfinite().all())


# The model computes its timestep's embedding in float32, so differences in time have to be coarse.
@pytest.mark.parametrize(("slope", "step", "tolerance"), [(0.0, 1e-5, 1e-6), (40.0, 1e-3, 5e-3)])
def test_a_whole_model_with_fused_attention(slope: float, step: float, tolerance: float) -> None:
    torch.manual_seed(0)
    model = build_transformer(heads=2, depth=2).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    latents, text, pooled, way = draws((2, 4, 8, 8), (2, 5, 192), (2, 192), (2, 4, 8, 8))
    times, rise = torch.tensor([300.0, 700.0]).double(), torch.tensor([slope, -slope]).double()
    way = way if slope == 0 else 0.01 * way

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return model(x, text, pooled, t, return_dict=False)[0]

    out, derivative = directional_derivative(velocity, (latents, times), (way, rise))
    with torch.no_grad():
        torch.testing.assert_close(out, velocity(latents, times), rtol=1e-9, atol=1e-9)
        ahead, behind = (velocity(latents + s * step * way, times + s * step * rise) for s in (1, -1))
    expected = (ahead - behind) / (2 * step)
    assert float((derivative - expected).norm() / expected.norm()) < tolerance


def test_what_does_not_depend_has_no_derivative() -> None:
    (x,) = draws((3,))
    _, derivative = directional_derivative(lambda _: torch.ones(3), (x,), (x,))
    assert not derivative.any()


def test_tangents_of_another_shape_are_refused() -> None:
    q, k, v = draws(*SHAPES)
    with pytest.raises(ArgumentError, match="must be alike"):
        attention_tangent((q, k, v), (k, k, v))
