"""Losses of few-step training on a Gaussian, whose consistency function is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from partsong_zoo.training import consistency
from partsong_zoo.training.consistency import (
    clean_estimate,
    consistency_tangent,
    continuous_loss,
    discrete_loss,
    draw_times,
    fake_loss,
    guided,
    matching_loss,
    shifted_times,
    trig_velocity,
)

MEAN, SPREAD = 0.7, 0.4


def points(num: int = 6) -> tuple[Tensor, Tensor]:
    """Latents and times on the path of a Gaussian."""
    draw = torch.Generator().manual_seed(3)
    time = torch.linspace(0.1, 1.4, num, dtype=torch.float64)
    clean, noise = torch.randn(2, num, 3, generator=draw, dtype=torch.float64)
    return time.cos()[:, None] * (MEAN + SPREAD * clean) + time.sin()[:, None] * noise, time


def width(time: Tensor) -> Tensor:
    return (SPREAD**2 * time.cos() ** 2 + time.sin() ** 2).sqrt()[:, None]


def path(latents: Tensor, time: Tensor) -> Tensor:
    """The exact velocity of the flow that carries the Gaussian to noise: its mean falls, its width grows."""
    cos, sin = time.cos()[:, None], time.sin()[:, None]
    growth = (1 - SPREAD**2) * sin * cos / width(time) ** 2
    return -sin * MEAN + growth * (latents - cos * MEAN)


def clean_end(latents: Tensor, time: Tensor) -> Tensor:
    """Where that flow comes from: the consistency function."""
    return MEAN + SPREAD * (latents - time.cos()[:, None] * MEAN) / width(time)


def consistent(latents: Tensor, time: Tensor) -> Tensor:
    return (time.cos()[:, None] * latents - clean_end(latents, time)) / time.sin()[:, None]


class Scaled(torch.nn.Module):
    """A model times a number that is trained."""

    def __init__(self, model: consistency.Velocity, factor: float = 1.0) -> None:
        super().__init__()
        self.model, self.factor = model, torch.nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        return self.factor * self.model(latents, time)


def gradient(loss: Tensor, model: Scaled) -> float:
    (got,) = torch.autograd.grad(loss, [model.factor])
    return float(got)


def test_both_forms_of_a_velocity_agree() -> None:
    latents, time = points()

    def flow(x: Tensor, level: Tensor) -> Tensor:
        return torch.sin(3 * x) + level[:, None]

    velocity = trig_velocity(flow)(latents, time)
    size, level = (time.cos() + time.sin())[:, None], (time.sin() / (time.cos() + time.sin()))[:, None]
    clean = latents / size - level * flow(latents / size, level[:, 0])
    torch.testing.assert_close(
        velocity, (time.cos()[:, None] * latents - clean) / time.sin()[:, None], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(clean_estimate(latents, time, velocity), clean, rtol=0, atol=1e-12)


def test_the_flow_of_the_gaussian_ends_where_it_says() -> None:
    latents, time = points()
    here, steps = latents, 10_000
    for step in range(steps):
        now = time * (1 - step / steps)
        middle = time * (1 - (step + 0.5) / steps)
        halfway = here - 0.5 * (time / steps)[:, None] * path(here, now)
        here = here - (time / steps)[:, None] * path(halfway, middle)
    torch.testing.assert_close(here, clean_end(latents, time), rtol=1e-7, atol=1e-7)


def test_a_consistent_model_is_left_where_it_is() -> None:
    latents, time = points()
    velocity, direction = consistency_tangent(consistent, path(latents, time), latents, time)
    torch.testing.assert_close(velocity, consistent(latents, time), rtol=0, atol=1e-12)
    assert float(direction.abs().max()) < 1e-12
    student = Scaled(consistent)
    assert abs(gradient(continuous_loss(student, path(latents, time), latents, time), student)) < 1e-8


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_another_model_is_moved_towards_it(factor: float) -> None:
    latents, time = points(40)
    student = Scaled(consistent, factor)
    slope = gradient(continuous_loss(student, path(latents, time), latents, time), student)
    assert slope * (factor - 1) > 0


def test_without_its_derivative_a_student_is_taught_the_velocity() -> None:
    latents, time = points()
    teacher, cos = path(latents, time), time.cos()[:, None]
    student = Scaled(consistent, 1.2)
    got = gradient(continuous_loss(student, teacher, latents, time, warmth=0.0, softening=1.0), student)
    apart = student(latents, time) - teacher
    norm = (cos * apart).norm(dim=1, keepdim=True).detach()
    distilled = 100.0 * (student(latents, time) * 2 * (cos * apart / (norm + 1.0)).detach()).sum(dim=1).mean()
    assert got == pytest.approx(gradient(distilled, student), rel=1e-12)


def test_a_sample_that_overflows_is_left_out() -> None:
    latents, time = points()
    teacher = path(latents, time)
    teacher[2] = torch.nan
    loss = continuous_loss(Scaled(consistent, 1.1), teacher, latents, time)
    assert bool(loss.isfinite())


def test_discrete_consistency_is_least_where_steps_are_exact() -> None:
    latents, time = points(40)
    losses = []
    for parts in (2, 8, 32):
        next_time = time * (1 - 1 / parts)
        losses.append(float(discrete_loss(consistent, consistent, path(latents, time), latents, (time, next_time))))
    assert losses[1] < losses[0] / 50 and losses[2] < losses[1] / 50  # an Euler step is wrong by its square
    at_zero = discrete_loss(path, path, path(latents, time), latents, (time, torch.zeros_like(time)))
    assert bool(at_zero.isfinite())


def test_matching_moves_samples_from_the_fake_to_the_teacher() -> None:
    sample = torch.tensor([[0.0, 1.0], [2.0, 2.0]], dtype=torch.float64, requires_grad=True)
    teacher, fake = torch.full((2, 2), 3.0).double(), torch.full((2, 2), 1.0).double()
    (way,) = torch.autograd.grad(matching_loss(sample, teacher, fake), [sample])
    size = torch.tensor([[2.5], [1.0]]).double()
    torch.testing.assert_close(way, 2 * (fake - teacher) / size / 2)
    same = matching_loss(sample, teacher, teacher)
    assert float(same.detach()) == 0.0


def test_the_fake_learns_the_velocity_of_samples() -> None:
    draw = torch.Generator().manual_seed(0)
    num = 60_000
    sample, noise = (
        MEAN + SPREAD * torch.randn(num, 1, generator=draw).double(),
        torch.randn(num, 1, generator=draw).double(),
    )
    time = torch.full((num,), 0.8, dtype=torch.float64)
    model = Scaled(path)
    # The flow's velocity is the mean of the samples' own ones, so no other multiple of it is better.
    noisy = time.cos()[:, None] * sample + time.sin()[:, None] * noise
    assert abs(gradient(fake_loss(model(noisy, time), sample, noise, time), model)) < 0.02


def test_guidance_and_times() -> None:
    latents, time = points()
    one, other = (lambda x, t: x), (lambda x, t: 0 * x)
    torch.testing.assert_close(guided(one, other, 5.0)(latents, time), 5 * latents)
    times = draw_times(4000, torch.Generator().manual_seed(0))
    assert float(times.min()) > 0 and float(times.max()) <= consistency.LAST_TIME
    assert float(times.tan().log().mean()) == pytest.approx(0.7, abs=0.1)
    grid = shifted_times(48)
    assert len(grid) == 49 and grid[0] == 0 and bool((grid.diff() > 0).all())
    assert float(grid[-1]) == pytest.approx(math.atan(80.0))
