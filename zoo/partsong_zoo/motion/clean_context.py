"""Teaches `motion-clean` to continue clean blocks as `motion-causal` continues noisy ones.

Few-step causal models such as Self-Forcing read a past that is done. The teacher reads a past at its own noise level.
So it makes whole clips and keeps where it was after each step; the student gets blocks that are done, beside blocks in
the midst of their steps, and learns the teacher's next step for these. Who is done and who is in flight is drawn from
the slots of `CascadePipeline` at all its depths, so that it may start blocks early. Importing this module loads torch;
only the recipe imports it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from partsong.samplers.cascade_pipeline.slots import Cascade, Slot
from partsong_zoo.motion.distillation import few_step_sigmas
from partsong_zoo.motion.model import BLOCK
from partsong_zoo.motion.training import Animator, count_nulls, draw_nulls

__all__ = ["WINDOW", "continuation_loss", "draw_slot", "seen_blocks", "whole_walk"]

#: Blocks of the past that a block sees at least, the default of `CascadePipeline`.
WINDOW = 3


def draw_slot(blocks: int, num_steps: int, rng: np.random.Generator) -> Slot:
    """Draws a slot of a cascade of `blocks` blocks at any of its depths."""
    depths = [depth for depth in range(1, num_steps + 1) if num_steps % depth == 0]
    cascade = Cascade(blocks=blocks, steps=num_steps, depth=int(rng.choice(depths)), ranks=1)
    return cascade.slot(int(rng.integers(cascade.slots)))


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


@torch.no_grad()
def whole_walk(teacher: Animator, noise: Tensor, ids: Tensor, num_steps: int) -> Tensor:
    """Makes clips and keeps every state.

    Args:
        teacher: a causal transformer that reads a past at its own noise level.
        noise: where clips begin, `[batch, 4, latents, 8, 8]`.
        ids: captions, `[batch, 24]`.
        num_steps: its steps from noise to a clip.

    Returns:
        `[num_steps + 1, batch, 4, latents, 8, 8]`, from noise to clips.
    """
    sigmas, nulls, states = few_step_sigmas(num_steps), count_nulls(ids), [noise]
    for first, last in pairwise(sigmas):
        sigma = torch.full((len(noise),), first, device=noise.device)
        velocity = teacher(states[-1], sigma, ids, nulls, lookback=WINDOW).float()
        states.append(states[-1] + (last - first) * velocity)
    return torch.stack(states)


def continuation_loss(student: Animator, walk: Tensor, ids: Tensor, slot: Slot, rng: np.random.Generator) -> Tensor:
    """Measures how far the student's velocities are from the teacher's, for the blocks of a slot that are in flight.

    Args:
        student: the causal transformer in training.
        walk: the teacher's states, `[steps + 1, batch, 4, latents, 8, 8]`.
        ids: captions, `[batch, 24]`.
        slot: what each block's step is; blocks before it are clean, and blocks after it do not exist.
        rng: draws the texts' padding.
    """
    newest, done = max(slot.steps), slot.num_steps
    steps = torch.tensor([slot.steps.get(block, done) for block in range(newest + 1)]).repeat_interleave(BLOCK)
    frames = torch.arange(len(steps))
    sigmas = torch.tensor(few_step_sigmas(done))
    noisy = walk[steps, :, :, frames].permute(1, 2, 0, 3, 4)
    sigma = sigmas[steps].to(walk.device).expand(len(ids), -1)
    velocity = student(noisy, sigma, ids, draw_nulls(ids, rng), sees=seen_blocks(slot)).float()
    flying = steps < done
    here, there, at = steps[flying], steps[flying] + 1, frames[flying]
    length = (sigmas[there] - sigmas[here]).to(walk.device)[:, None, None, None, None]
    target = ((walk[there, :, :, at] - walk[here, :, :, at]) / length).permute(1, 2, 0, 3, 4)
    return (velocity[:, :, flying.to(walk.device)] - target).square().mean()
