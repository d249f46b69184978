"""Samples for the gallery on every rank: a picture step by step, and a long video."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from partsong import DualParallel, TimestepPipeline, generate, zoo
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.samplers.registry import parse_strategy
from partsong.seeds import generators
from tests.animation import Pixels


def steps_of(strategy: str, caption: str, seed: int) -> tuple[Pixels, Pixels]:
    """Samples a picture of `shapes` on one process and with a strategy.

    Returns:
        For either, what the finished picture was expected to be after each step but the first, `[S, H, W, 3]` in
        [0, 1]. The last is the picture.
    """
    torch.set_num_threads(1)
    chosen = parse_strategy(strategy)
    with Mesh(**mesh_for((chosen,), 2)) as mesh:
        pipe = zoo.load("shapes")
        pipe.set_progress_bar_config(disable=True)
        serial = _watched(pipe, caption, seed)
        with parallelize(pipe, chosen, mesh=mesh):
            return serial, _watched(pipe, caption, seed)


def _watched(pipe: Any, caption: str, seed: int) -> Pixels:
    """Samples with a pipeline whose latents move along straight lines: two of them say where the line ends."""
    latents: list[torch.Tensor] = []

    def keep(_: Any, step: int, time: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents.append(values["latents"].clone())
        return values

    arguments = dict(zoo.MODELS["shapes"].defaults)
    pipe(caption, generator=generators(seed, 1)[0], callback_on_step_end=keep, output_type="latent", **arguments)
    sigmas = pipe.scheduler.sigmas[1:].tolist()
    ends = [
        new - sigma * (new - old) / (sigma - before)
        for (old, new), (before, sigma) in zip(pairwise(latents), pairwise(sigmas), strict=True)
    ]
    vae = pipe.vae
    with torch.no_grad():
        decoded = [vae.decode(each / vae.config.scaling_factor + vae.config.shift_factor).sample for each in ends]
    images = torch.cat(decoded).clamp(-1, 1)
    return ((images.permute(0, 2, 3, 1) + 1) / 2).numpy()


def video_of(method: str, caption: str, seed: int, frames: int) -> Pixels:
    """Samples a video on two ranks, `[F, H, W, 3]` in [0, 1].

    Args:
        method: ``timestep-pipeline`` or ``dual-parallel``.
        caption: what it shows.
        seed: of the noise.
        frames: how many.
    """
    torch.set_num_threads(1)
    model, strategy = {
        "timestep-pipeline": ("motion-causal", TimestepPipeline()),
        "dual-parallel": ("motion", DualParallel()),
    }[method]
    with Mesh(**mesh_for((strategy,), 2)) as mesh:
        pipe = zoo.load(model)
        pipe.set_progress_bar_config(disable=True)
        arguments = {**zoo.MODELS[model].defaults, "num_frames": frames, "output_type": "np"}
        with parallelize(pipe, strategy, mesh=mesh) as plan:
            made = generate(plan, prompt=caption, generator=generators(seed, 1)[0], **arguments)
    return np.asarray(made.frames[0])
