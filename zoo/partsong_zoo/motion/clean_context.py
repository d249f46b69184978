"""Makes clips as `CascadePipeline` makes them, so that `motion-clean` learns to continue blocks that are clean.

Few-step causal models such as Self-Forcing read a past that is done, and a model that was trained on a past at its own
noise level has never seen one. So the student makes its clips block after block, or some blocks together as a cascade
of any depth does, and distribution matching moves them to the teacher's (see `partsong_zoo.motion.forcing`). Importing
this module loads torch; only the recipe imports it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partsong.samplers.cascade_pipeline.slots import Cascade, Slot
from partsong_zoo.motion.distillation import few_step_sigmas
from partsong_zoo.motion.model import BLOCK
from partsong_zoo.motion.training import Animator, count_nulls

__all__ = ["WINDOW", "cascaded_clip", "draw_cascade", "seen_blocks", "slot_velocity"]

#: Blocks of the past that a block sees at least, the default of `CascadePipeline`.
WINDOW = 3


def draw_cascade(blocks: int, num_steps: int, rng: np.random.Generator) -> tuple[Cascade, int]:
    """Draws a cascade of any depth that divides the steps, and one of its slots after the first block's first steps."""
    depths = [depth for depth in range(1, num_steps + 1) if num_steps % depth == 0]
    cascade = Cascade(blocks=blocks, steps=num_steps, depth=int(rng.choice(depths)), ranks=1)
    return cascade, int(rng.integers(cascade.lag, cascade.slots))


def seen_blocks(slot: Slot, window: int = WINDOW) -> Tensor:
    """Says which blocks each block sees in a slot.

    Returns:
        `[blocks, blocks]` up to the newest block, True where the row's block sees the column's: blocks in flight see
        each other and the past, clean blocks the past.
    """
    flying = [block for block, step in slot.steps.items() if step < slot.num_steps]
    number = torch.arange(max(slot.steps) + 1)
    back = number[:, None] - number
    sees = (back >= 0) & (back <= window)
    for block in flying:
        sees[block, min(max(0, block - window), *flying) : block] = True
        sees[block, flying] = True
    return sees


def _steps(slot: Slot) -> Tensor:
    """Returns the step of each latent frame up to the newest block; clean ones have made all."""
    steps = [slot.steps.get(block, slot.num_steps) for block in range(max(slot.steps) + 1)]
    return torch.tensor(steps).repeat_interleave(BLOCK)


def slot_velocity(student: Animator, latents: Tensor, ids: Tensor, slot: Slot) -> Tensor:
    """Computes the velocities of all blocks up to the newest in a slot, in one forward.

    Args:
        student: a causal transformer.
        latents: of at least these blocks, each at its own step, `[batch, 4, latents, 8, 8]`.
        ids: captions, `[batch, 24]`.
        slot: the step of each block in flight; blocks before it are clean.
    """
    steps = _steps(slot)
    sigma = torch.tensor(few_step_sigmas(slot.num_steps))[steps].to(latents.device).expand(len(ids), -1)
    return student(latents[:, :, : len(steps)], sigma, ids, count_nulls(ids), sees=seen_blocks(slot)).float()


def cascaded_clip(student: Animator, noise: Tensor, ids: Tensor, cascade: Cascade, last: int) -> Tensor:
    """Makes clips as they look in a slot of a cascade: blocks that are done, and clean estimates of those in flight.

    Only the estimates have a gradient.

    Args:
        student: a causal transformer.
        noise: where its blocks begin, `[batch, 4, latents, 8, 8]`.
        ids: captions, `[batch, 24]`.
        cascade: says which blocks make their steps together.
        last: the slot, from 0.

    Returns:
        The latents up to the newest block in flight.
    """
    sigmas, here = torch.tensor(few_step_sigmas(cascade.steps), device=noise.device), noise.clone()
    for number in range(last + 1):
        slot = cascade.slot(number)
        steps = _steps(slot).to(noise.device)
        ends = (steps + 1).clamp(max=cascade.steps) if number < last else torch.full_like(steps, cascade.steps)
        lengths = (sigmas[ends] - sigmas[steps])[None, None, :, None, None]
        with torch.set_grad_enabled(number == last and torch.is_grad_enabled()):
            stepped = here[:, :, : len(steps)] + lengths * slot_velocity(student, here, ids, slot)
        if number < last:
            here[:, :, : len(steps)] = stepped
    return stepped
