"""Teaches `motion-causal` to do with one guidance-free step what several guided steps do.

The video is denoised in a few steps. For every step the teacher, which takes more of them, walks the same stretch of
noise levels in smaller guided steps. The student learns the straight line from the start to where the teacher arrives.
This is progressive distillation (Salimans and Ho 2022, arXiv 2202.00512) with guidance included (Meng et al. 2022,
arXiv 2210.03142). Importing this module loads torch; only the recipe imports it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partsong_zoo.few_steps import build_few_step_scheduler
from partsong_zoo.motion.model import SHIFT, token_ids
from partsong_zoo.motion.training import Animator, blend, count_nulls, draw_noise, draw_nulls


def step_odds(steps: int) -> list[float]:
    """Returns how often each step is trained: the first decides most, and is trained twice as often as another.

    >>> step_odds(4)
    [0.4, 0.2, 0.2, 0.2]
    """
    return [(2 if step == 0 else 1) / (steps + 1) for step in range(steps)]


def few_step_sigmas(steps: int = 4) -> list[float]:
    """Returns the noise levels `[steps + 1]` of few-step sampling, from 1 to 0."""
    scheduler = build_few_step_scheduler(SHIFT)
    scheduler.set_timesteps(steps)
    return [float(sigma) for sigma in scheduler.sigmas]


@torch.no_grad()
def guided_walk(
    teacher: Animator,
    start: Tensor,
    ends: tuple[Tensor, Tensor],
    ids: Tensor,
    *,
    substeps: int,
    guidance: float,
    lookback: int | None,
) -> Tensor:
    """Computes where the teacher arrives.

    Args:
        teacher: A causal transformer.
        start: Noisy latents, `[batch, 4, latents, 8, 8]`.
        ends: The noise levels at the start and at the arrival, `[batch]` each.
        ids: Captions, `[batch, 24]`.
        substeps: How many Euler steps it makes.
        guidance: Scale of classifier-free guidance.
        lookback: How many blocks before itself a block sees.
    """
    empty = token_ids([""]).to(ids.device).expand_as(ids)
    both = torch.cat([ids, empty])
    here, nulls = start, count_nulls(both)
    for step in range(substeps):
        sigma = ends[0] + (ends[1] - ends[0]) * step / substeps
        velocity = teacher(here.repeat(2, 1, 1, 1, 1), sigma.repeat(2), both, nulls, lookback).float()
        stated, silent = velocity.chunk(2)
        guided = silent + guidance * (stated - silent)
        here = here + ((ends[1] - ends[0]) / substeps)[:, None, None, None, None] * guided
    return here


@torch.no_grad()
def own_walk(
    student: Animator, noise: Tensor, ids: Tensor, steps: Tensor, lookback: int | None, num_steps: int = 4
) -> Tensor:
    """Computes where the student itself is after `steps` `[batch]` of its `num_steps` steps from `noise`."""
    sigmas, nulls, here = few_step_sigmas(num_steps), count_nulls(ids), noise
    for step in range(int(steps.max())):
        sigma = torch.full((len(noise),), sigmas[step], device=noise.device)
        velocity = student(here, sigma, ids, nulls, lookback).float()
        there = here + (sigmas[step + 1] - sigmas[step]) * velocity
        here = torch.where((steps > step)[:, None, None, None, None], there, here)
    return here


def distillation_loss(
    student: Animator,
    teacher: Animator,
    clean: Tensor,
    ids: Tensor,
    rng: np.random.Generator,
    *,
    substeps: int,
    guidance: float,
    lookback: int | None,
    num_steps: int = 4,
) -> Tensor:
    """Measures how far the student's single steps end from the teacher's walks.

    Half of the calls start from noisy latents of the pool, half from where the student's own steps have led.

    Args:
        student: The causal transformer in training.
        teacher: The multi-step one.
        clean: Latents of the pool, `[batch, 4, latents, 8, 8]`.
        ids: Their captions, `[batch, 24]`.
        rng: Draws steps and noise.
        substeps: The teacher's steps per step of the student.
        guidance: The teacher's guidance.
        lookback: How many blocks before itself a block sees.
        num_steps: The student's steps from noise to a clip.
    """
    sigmas = torch.tensor(few_step_sigmas(num_steps), device=clean.device)
    step = torch.from_numpy(rng.choice(num_steps, size=len(clean), p=step_odds(num_steps))).to(clean.device)
    noise, first, last = draw_noise(clean, rng), sigmas[step], sigmas[step + 1]
    is_own = rng.random() < 0.5
    start = own_walk(student, noise, ids, step, lookback, num_steps) if is_own else blend(clean, noise, first)
    knobs = {"substeps": substeps, "guidance": guidance, "lookback": lookback}
    arrival = guided_walk(teacher, start, (first, last), ids, **knobs)
    target = (start - arrival) / (first - last)[:, None, None, None, None]
    velocity = student(start, first, ids, draw_nulls(ids, rng), lookback)
    return (velocity.float() - target).square().mean()
