"""Teaches `motion-causal` from the videos it makes itself, whole clips in one or two steps (self-forcing).

A causal model that is trained on clean pasts goes wrong when it must continue its own. So the student makes whole clips
of blocks that see earlier blocks, as it will be used. They move to where the teacher, which sees all frames at once and
is guided, finds them likelier than a model of the student's own clips does (distribution matching).

Sources: Self-Forcing, arXiv 2506.08009; DMD, arXiv 2311.18828. Importing this module loads torch; only the recipe
imports it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from partsong_zoo.motion.distillation import few_step_sigmas, own_walk
from partsong_zoo.motion.model import SHIFT, token_ids
from partsong_zoo.motion.training import Animator, blend, count_nulls, draw_noise
from partsong_zoo.training.consistency import matching_loss

__all__ = ["Forcing", "clean_clip", "matching_sigmas", "own_clip"]


def clean_clip(latents: Tensor, sigma: Tensor, velocity: Tensor) -> Tensor:
    """Returns the clean clips at the end of the straight lines that velocities begin."""
    return latents - sigma[:, None, None, None, None] * velocity


def matching_sigmas(num: int, rng: np.random.Generator) -> Tensor:
    """Draws the noise levels `[num]` at which clips are compared: between 0.02 and 0.98, shifted as the scheduler's."""
    level = rng.uniform(0.02, 0.98, num).astype(np.float32)
    return torch.from_numpy(SHIFT * level / (1 + (SHIFT - 1) * level))


def own_clip(
    student: Animator, noise: Tensor, ids: Tensor, *, step: int, num_steps: int, lookback: int | None
) -> Tensor:
    """Makes clips with the student as they look at one of its steps; only that step has a gradient.

    Args:
        student: a causal transformer.
        noise: where clips begin, `[batch, 4, latents, 8, 8]`.
        ids: captions, `[batch, 24]`.
        step: the step whose clean clips are asked for, from 0.
        num_steps: the student's steps from noise to a clip.
        lookback: how many blocks before itself a block sees.
    """
    before = torch.full((len(noise),), step, device=noise.device)
    here = own_walk(student, noise, ids, before, lookback, num_steps)
    sigma = torch.full((len(noise),), few_step_sigmas(num_steps)[step], device=noise.device)
    return clean_clip(here, sigma, student(here, sigma, ids, count_nulls(ids), lookback).float())


@dataclass(frozen=True, kw_only=True)
class Forcing:
    """Makes the losses of a step.

    Attributes:
        teacher: the transformer that sees all frames, frozen.
        guidance: its scale of classifier-free guidance.
    """

    teacher: Animator
    guidance: float

    def losses(self, clip: Tensor, fake: Animator, ids: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Returns the loss of the student that made a clip, and that of the model of its clips.

        Args:
            clip: the student's, `[batch, 4, latents, 8, 8]`.
            fake: the transformer that learns the student's clips.
            ids: captions, `[batch, 24]`.
            rng: draws noise and its levels.
        """
        sigma = matching_sigmas(len(ids), rng).to(clip.device)
        fresh, nulls = draw_noise(clip, rng), count_nulls(ids)
        noisy = blend(clip.detach(), fresh, sigma)
        learned = fake(noisy, sigma, ids, nulls).float()
        with torch.no_grad():
            velocities = (self._taught(noisy, sigma, ids), learned.detach())
            estimates = [clean_clip(noisy, sigma, velocity) for velocity in velocities]
        apart = learned - (fresh - clip.detach())
        return matching_loss(clip, *estimates), apart.square().flatten(1).sum(dim=1).mean()

    def _taught(self, noisy: Tensor, sigma: Tensor, ids: Tensor) -> Tensor:
        """Computes the guided teacher's velocity."""
        both = torch.cat([ids, token_ids([""]).to(ids.device).expand_as(ids)])
        velocity = self.teacher(noisy.repeat(2, 1, 1, 1, 1), sigma.repeat(2), both, count_nulls(both)).float()
        stated, silent = velocity.chunk(2)
        return silent + self.guidance * (stated - silent)
