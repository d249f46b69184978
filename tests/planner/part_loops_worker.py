"""Runs on every rank: loops that call the denoiser for parts, whose calls of each block and bytes are counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from partsong import CascadePipeline, DualParallel, StructureGuidance, TimestepPipeline, zoo
from partsong.foreign_messages import quiet_libraries
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.planner.part_loops import QueueSteps
from partsong.planner.pipeline import subject_of
from partsong.planner.steps import PlainSteps, Tracer
from partsong.samplers import generate, stream
from tests.parallel.ranks import gathered

__all__ = ["LOOPS", "counted"]

#: Loop, the zoo's model, and what of the call is not the model's own.
LOOPS: dict[str, tuple[Strategy, str, dict[str, Any]]] = {
    "guidance": (StructureGuidance(), "shapes", {"height": 128, "width": 128, "num_inference_steps": 3}),
    "dual": (DualParallel(), "motion", {"num_frames": 95, "num_inference_steps": 4}),
    "dual, recomputed": (DualParallel(previous="recomputed"), "motion", {"num_frames": 95, "num_inference_steps": 4}),
    "timestep": (TimestepPipeline(), "motion-causal", {"num_frames": 95}),
    "cascade of 2": (CascadePipeline(depth=2), "motion-clean", {"num_frames": 95}),
    "cascade of 4": (CascadePipeline(depth=4), "motion-clean", {"num_frames": 95}),
}


def counted(name: str, nproc: int) -> dict[str, tuple[float, float]]:
    """Runs a loop on all ranks.

    Returns:
        ``calls`` and ``bytes`` of the rank with most, as counted and as predicted.
    """
    strategy, model, changed = LOOPS[name]
    quiet_libraries()
    torch.set_num_threads(1)
    pipe = zoo.load(model)
    pipe.set_progress_bar_config(disable=True)
    call = {**zoo.MODELS[model].defaults, "prompt": "a big red circle", **changed}
    subject = subject_of(pipe, **call)
    traced = Tracer(subject, subject.sized(None, None, None, 1), fused=False).trace(
        [strategy], nproc, call["num_inference_steps"]
    )
    blocks: Any = getattr(pipe.transformer, "blocks", None) or pipe.transformer.transformer_blocks
    calls: Counter[int] = Counter()
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
    with (
        Mesh(**mesh_for((strategy,), nproc)) as mesh,
        parallelize(pipe, strategy, mesh=mesh) as plan,
        Ledger(flops=False) as ledger,
    ):
        call |= {"output_type": "latent", "generator": torch.Generator().manual_seed(0)}
        if isinstance(traced, QueueSteps):
            for _ in stream(plan, **call):
                pass
        else:
            generate(plan, **call)
        most = max(gathered(max(calls.values())))
        sent = max(gathered(ledger.summary()["bytes_sent"]))
    assert isinstance(traced, QueueSteps | PlainSteps)
    visits = traced.visits if isinstance(traced, QueueSteps) else traced.calls * traced.steps
    return {"calls": (most, visits), "bytes": (sent, traced.bytes_sent)}
