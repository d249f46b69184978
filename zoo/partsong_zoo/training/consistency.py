"""Holds the losses that turn a flow model of many steps into one of few: consistency, discrete and continuous, and DMD.

All of them work on the trigonometric path, x = cos(t) clean + sin(t) noise, on which a model is its velocity F = dx/dt.
`trig_velocity` makes that of a model of rectified flow. Models are functions of latents `[B, ...]` and times `[B]`, and
their arguments that do not change, such as the caption, are bound beforehand. Importing this module loads torch.

Sources: TrigFlow and sCM, arXiv 2410.11081; rCM, arXiv 2510.08431; DMD, arXiv 2311.18828.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from partsong_zoo.training.attention_tangent import directional_derivative

__all__ = [
    "LAST_TIME",
    "clean_estimate",
    "consistency_tangent",
    "continuous_loss",
    "discrete_loss",
    "draw_times",
    "fake_loss",
    "guided",
    "matching_loss",
    "shifted_times",
    "trig_velocity",
]

#: A model: latents `[B, ...]` and times `[B]` to the velocity along the path.
Velocity = Callable[[Tensor, Tensor], Tensor]
#: Times end here, short of pure noise, where the ratio of noise to signal is 80.
LAST_TIME = math.atan(80.0)


def _like(time: Tensor, latents: Tensor) -> Tensor:
    """Lets one number per sample be multiplied with latents."""
    return time.to(latents).view(-1, *[1] * (latents.ndim - 1))


def trig_velocity(flow: Velocity) -> Velocity:
    """Turns a model of rectified flow, from latents and noise level to ``noise - clean``, into one of this path.

    A point of the path is one of rectified flow's, ``cos(t) + sin(t)`` times as large.
    """

    def velocity(latents: Tensor, time: Tensor) -> Tensor:
        cos, sin = _like(time.cos(), latents), _like(time.sin(), latents)
        size, level = cos + sin, time.sin() / (time.cos() + time.sin())
        toward_noise = flow(latents / size, level)
        clean = latents / size - _like(level, latents) * toward_noise
        return (cos - sin) * clean + cos * toward_noise

    return velocity


def clean_estimate(latents: Tensor, time: Tensor, velocity: Tensor) -> Tensor:
    """Returns the clean sample at the end of the straight line that a velocity begins."""
    return _like(time.cos(), latents) * latents - _like(time.sin(), latents) * velocity


def guided(captioned: Velocity, empty: Velocity, scale: float) -> Velocity:
    """Returns the velocity of classifier-free guidance."""

    def velocity(latents: Tensor, time: Tensor) -> Tensor:
        without = empty(latents, time)
        return without + scale * (captioned(latents, time) - without)

    return velocity


def draw_times(num: int, draw: torch.Generator, *, mean: float = 0.7, deviation: float = 1.6) -> Tensor:
    """Draws times whose tangent, the ratio of noise to signal, is log-normal, as rCM does."""
    return torch.randn(num, generator=draw).mul(deviation).add(mean).exp().atan().clamp(max=LAST_TIME)


def shifted_times(num: int, shift: float = 5.0) -> Tensor:
    """Lists `num` + 1 times from 0 up to `LAST_TIME`, whose noise levels are evenly spaced and then shifted up.

    >>> shifted_times(2).tolist()[0]
    0.0
    """
    even = torch.linspace(0.0, 1.0, num + 1, dtype=torch.float64)
    ratio = math.tan(LAST_TIME)
    level = shift * even / (1 + (shift - 1) * even) * ratio / (1 + ratio)
    return torch.atan2(level, 1 - level)


def consistency_tangent(
    student: Velocity, teacher: Tensor, latents: Tensor, time: Tensor, *, warmth: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the student's velocity, and the direction in which continuous consistency moves it.

    A consistent model predicts one clean sample all along the teacher's path, so its derivative along the path is 0.
    The direction is that derivative times ``-cos(t)``. It is 0 for a consistent model.

    Args:
        student: the model.
        teacher: the teacher's velocity at these points, guidance included.
        latents: points, `[B, ...]`.
        time: their times, `[B]`.
        warmth: share of the part that needs the student's derivative, from 0 to 1; with 0 the student is taught the
            teacher's velocity.
    """
    cos, sin = _like(time.cos(), latents), _like(time.sin(), latents)
    way = (cos * sin * teacher, time.cos() * time.sin())
    velocity, slope = directional_derivative(student, (latents, time), way)
    apart = (1 - warmth**2 * sin**2).clamp(min=0).sqrt() * (velocity - teacher)
    return velocity, -cos * apart - warmth * (cos * sin * latents + slope)


def continuous_loss(
    student: Velocity,
    teacher: Tensor,
    latents: Tensor,
    time: Tensor,
    *,
    warmth: float = 1.0,
    softening: float = 0.1,
) -> Tensor:
    """Returns sCM's loss, the mean over samples: the distance to the student's own answer moved to consistency.

    Args:
        student: the model; its gradient is taken through one plain call.
        teacher: as in `consistency_tangent`, and so are the others.
        latents: points, `[B, ...]`.
        time: their times, `[B]`.
        warmth: share of the derivative's part; it rises from 0 to 1 in the first steps of a training.
        softening: added to the norm by which a sample's direction is divided, so that small ones stay small.
    """
    velocity, direction = consistency_tangent(student, teacher, latents, time, warmth=warmth)
    # A sample whose derivative overflows must not spoil the batch.
    direction = torch.where(direction.isfinite().flatten(1).all(dim=1).view(_ones(direction)), direction, 0.0)
    norm = direction.flatten(1).norm(dim=1).view(_ones(direction))
    target = (velocity + direction / (norm + softening)).detach()
    return 100.0 * (student(latents, time) - target).square().flatten(1).sum(dim=1).mean()


def discrete_loss(
    student: Velocity, target: Velocity, teacher: Tensor, latents: Tensor, times: tuple[Tensor, Tensor]
) -> Tensor:
    """Returns the loss of discrete consistency: the same clean sample from a point and from the next one of the path.

    Args:
        student: the model.
        target: the student without gradient, or the average of its weights.
        teacher: the teacher's velocity at the points, which leads to the next ones in one straight step.
        latents: points, `[B, ...]`.
        times: of the points and of the next ones, `[B]` each; where the next time is 0 the next point is the answer.
    """
    here, there = times
    with torch.no_grad():
        after = latents - _like(here - there, latents) * teacher
        wanted = clean_estimate(after, there, target(after, there))
    apart = clean_estimate(latents, here, student(latents, here)) - wanted
    # Clean samples differ by sin(t) times the velocities, which models should learn equally well at all times.
    return (apart / _like(here.sin(), latents)).square().mean()


def matching_loss(sample: Tensor, teacher: Tensor, fake: Tensor) -> Tensor:
    """Returns the loss of distribution matching, whose gradient moves samples from the fake model to the teacher.

    Args:
        sample: what the student has made, `[B, ...]`, with gradient.
        teacher: the teacher's clean estimate of the sample with fresh noise.
        fake: that of the model which has learned the student's samples.
    """
    with torch.no_grad():
        size = (sample - teacher).abs().flatten(1).mean(dim=1).clamp(min=1e-6)
        wanted = sample - (fake - teacher) / size.view(_ones(sample))
    return (sample - wanted).square().flatten(1).sum(dim=1).mean()


def fake_loss(velocity: Tensor, sample: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Returns the loss by which a model learns the student's samples, as large as `matching_loss`.

    Args:
        velocity: the model's at the path's point between a sample and noise.
        sample: what the student has made, `[B, ...]`, without gradient.
        noise: as much noise.
        time: times `[B]`.
    """
    cos, sin = _like(time.cos(), sample), _like(time.sin(), sample)
    return (velocity - (cos * noise - sin * sample)).square().flatten(1).sum(dim=1).mean()


def _ones(latents: Tensor) -> tuple[int, ...]:
    return (-1, *[1] * (latents.ndim - 1))
