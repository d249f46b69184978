"""Runs on every rank: videos of the zoo that are decoded by all ranks together, block after block."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from partsong import CascadePipeline, DualParallel, ParallelVae, TimestepPipeline, zoo
from partsong.foreign_messages import quiet_libraries
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.samplers import generate, stream
from tests.parallel.ranks import gathered

__all__ = ["LOOPS", "videos"]

#: Loop -> the zoo's model, ranks, and steps where they are not the model's own.
LOOPS: dict[str, tuple[Strategy, str, int, int | None]] = {
    "cascade": (CascadePipeline(), "motion-clean", 2, None),
    "timestep": (TimestepPipeline(), "motion-causal", 3, None),
    "timestep, layers": (TimestepPipeline(pipe_degree=2), "motion-causal", 2, 1),
    "dual": (DualParallel(), "motion", 2, 6),
}


def videos(name: str) -> tuple[list[Any], list[int]]:
    """Makes one video by the loop alone, streamed and at once with decoding shared.

    Returns:
        The three videos on the first rank, and how many parts of the shared stream each rank was given.
    """
    strategy, model, nproc, steps = LOOPS[name]
    quiet_libraries()
    torch.set_num_threads(1)
    pipe = zoo.load(model)
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {**zoo.MODELS[model].defaults, "prompt": "a big red circle bounces left and right"}
    call |= {"num_frames": 31, "output_type": "np"} | ({} if steps is None else {"num_inference_steps": steps})
    made: list[Any] = []
    counts: list[int] = []
    for mix in ((strategy,), (strategy, ParallelVae())):
        with Mesh(**mesh_for(mix, nproc)) as mesh, parallelize(pipe, *mix, mesh=mesh) as plan:
            seeded = {**call, "generator": torch.Generator().manual_seed(0)}
            parts = [part.frames[0] for part in stream(plan, **seeded) if part is not None]
            made.append(np.concatenate(parts) if parts else None)
            if len(mix) > 1:
                seeded = {**call, "generator": torch.Generator().manual_seed(0)}
                made.append(generate(plan, **seeded).frames[0])
                counts = gathered(len(parts))
    return made, counts
