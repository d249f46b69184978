"""Runs on every rank: bytes of tensors that are alive while a loop samples, and what the planner predicts."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

from partsong import Mesh, generate, mesh_for, parallelize
from partsong.planner.calls import Size
from partsong.planner.pipeline import subject_of
from partsong.planner.steps import Tracer
from partsong.samplers import registry
from tests.parallel.memory_worker import Alive, flux
from tests.parallel.ranks import gathered

#: A picture whose tensors take as much memory as the model's weights, and more steps than any warm-up here.
SIDE, STEPS = 512, 8


def memory(nproc: int, mixes: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Bytes on each rank, counted and predicted, for every mix."""
    model, named = flux()
    pipe: Any = FluxPipeline(FlowMatchEulerDiscreteScheduler(), *[None] * 5, model)
    pipe.set_progress_bar_config(disable=True)
    prompt = {
        "prompt": None,
        "prompt_embeds": named["encoder_hidden_states"][:1],
        "pooled_prompt_embeds": named["pooled_projections"][:1],
    }
    size = Size(height=SIDE, width=SIDE, dtype=torch.float32)
    tracer = Tracer(subject_of(pipe, **prompt, height=SIDE, width=SIDE, num_inference_steps=STEPS), size, fused=False)
    results = {}
    for text in mixes:
        strategies = [registry.parse_strategy(part) for part in text.split()]
        told = tracer.trace(strategies, nproc, STEPS)
        with Mesh(**mesh_for(strategies, nproc)) as mesh, parallelize(pipe, *strategies, mesh=mesh) as plan:
            draw = torch.Generator().manual_seed(0)
            with Alive([*model.parameters(), *model.buffers()]) as alive:
                generate(
                    plan,
                    **prompt,
                    height=SIDE,
                    width=SIDE,
                    num_inference_steps=STEPS,
                    output_type="latent",
                    generator=draw,
                )
            results[text] = gathered((alive.most, told.working))
    return results
