"""Runs on every rank: TimestepPipeline against the causal model on all frames at once, its definition, and itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest import mock

import torch
from diffusers import LCMScheduler, SkyReelsV2Pipeline, UniPCMultistepScheduler
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2Transformer3DModel
from torch import Tensor

from partsong import TimestepPipeline
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, parallelize
from partsong.samplers import generate, stream
from tests.parallel.dual_worker import SIZE, STEPS, Euler, Film, by_heads, call, exact
from tests.parallel.dual_worker import pipeline as wan
from tests.parallel.pipeline_worker import clean
from tests.parallel.ranks import error, gathered

FRAMES = 21  # six latent frames, three blocks
LONG = 45
NAMES = ("window", "guided", "noisy")


def pipeline(scheduler: Any = None, block: int = 2) -> SkyReelsV2Pipeline:
    """A tiny causal model in float64."""
    model = exact(SkyReelsV2Transformer3DModel, num_frame_per_block=block)
    return SkyReelsV2Pipeline(None, None, model, wan().vae, scheduler or Euler(shift=3.0))


def noise() -> Tensor:
    """Latents of the short video, as the pipeline keeps them."""
    shape = (1, 4, (FRAMES - 1) // 4 + 1, SIZE[0] // 8, SIZE[1] // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def whole(guided: bool, mesh: Mesh) -> float:
    """With a window that holds the past: distance to the model run on all frames at once."""
    pipe = pipeline()
    serial = pipe(**call(FRAMES, guided, latents=noise())).frames
    with parallelize(pipe, TimestepPipeline(window=3, sink=0), mesh=mesh) as plan:
        found = generate(plan, **call(FRAMES, guided, latents=noise())).frames
    return error(found, serial)


def layered() -> float:
    """Steps x layers against the same."""
    pipe = pipeline()
    named = call(FRAMES, False, latents=noise(), num_inference_steps=2)
    serial = pipe(**named).frames
    with (
        Mesh(stage=2, pipe=2) as mesh,
        parallelize(pipe, TimestepPipeline(window=3, sink=0, pipe_degree=2), mesh=mesh) as plan,
    ):
        found, parts = generate(plan, **named).frames, list(stream(plan, **call(LONG, False, num_inference_steps=2)))
        assert [part is not None for part in parts] == [mesh.is_main] * 6
    return error(found, serial)


def videos(mesh: Mesh, names: Collection[str]) -> dict[str, Tensor]:
    """Latents of some videos, to be compared between numbers of ranks."""
    found = {}
    cases: dict[str, tuple[Any, dict[str, int], bool]] = {
        "window": (None, {"window": 1, "sink": 1}, False),
        "guided": (None, {"window": 2, "sink": 2}, True),
        "noisy": (LCMScheduler(), {"window": 2, "sink": 1}, False),
    }
    for name in names:
        scheduler, knobs, guided = cases[name]
        with parallelize(pipeline(scheduler), TimestepPipeline(**knobs), mesh=mesh) as plan:
            found[name] = generate(plan, **call(LONG, guided)).frames
    return found


def counted(nproc: int, mesh: Mesh) -> tuple[list[int], list[int], list[int]]:
    """Bytes every rank sent in a stream, those predicted, and how many frames came at a time on the first."""
    with parallelize(pipeline(), TimestepPipeline(), mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            parts = [part.frames.shape[1] for part in stream(plan, **call(LONG, output_type="pt")) if part is not None]
        sent = int(ledger.summary().get("bytes_sent", 0))
        return gathered(sent) if nproc > 1 else [sent], plan.explain().bytes_total(), parts


def refusals(mesh: Mesh) -> dict[str, str]:
    """What is said of calls that have no correct form."""
    unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    said = {}

    def run(pipe: Any, named: dict[str, Any]) -> None:
        with parallelize(pipe, TimestepPipeline(), mesh=mesh) as plan:
            generate(plan, **named)

    pipe = pipeline()
    trials = {
        "frames": lambda: run(pipe, call(25)),
        "steps": lambda: run(pipe, call(21, num_inference_steps=1)),
        "scheduler": lambda: run(pipeline(unipc), call(21)),
        "model": lambda: run(wan(), call(21)),
        "callback": lambda: run(pipe, call(21, callback_on_step_end=print)),
    }
    for name, trial in trials.items():
        try:
            trial()
        except PartsongError as problem:
            said[name] = f"{type(problem).__name__}: {problem}"
    said["hooks"] = "none" if clean(pipe.transformer) and clean(pipe.vae) else "left"
    return said


def ranks(nproc: int, names: Collection[str] = NAMES) -> dict[str, Any]:
    """Everything, on one number of ranks, with these videos."""
    with Mesh(stage=nproc) as mesh:
        return {
            "whole": [whole(guided, mesh) for guided in (False, True)],
            "videos": videos(mesh, names),
            "counted": counted(nproc, mesh),
            "refusals": refusals(mesh),
        }


class _TwinAttention:
    """Self-attention to a window of the past and a sink, with keys kept before they are turned."""

    def __init__(self, layer: int, past: _Past) -> None:
        self.layer, self.past = layer, past

    def __call__(self, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        past = self.past
        q, k, v = by_heads(attn, hidden_states)
        past.store[past.block, past.step, self.layer] = (k, v)
        first = max(0, past.block - past.window)
        seen = [(k, v, 0)]
        for block in range(first, past.block):
            seen.append((*past.store[block, past.step, self.layer], (block - past.block) * past.frames))
        if first > 0 and past.sink:
            part = slice(0, past.sink * past.turn.area)
            sink = [x[:, :, part] for x in past.store[0, past.step, self.layer]]
            seen.append((*sink, (first - past.block) * past.frames - past.sink))
        keys = torch.cat([past.turn.turned(x, 0, place) for x, _, place in seen], dim=2)
        weights = (past.turn.turned(q, 0, 0) @ keys.mT / q.shape[-1] ** 0.5).softmax(-1)
        out = (weights @ torch.cat([x for _, x, _ in seen], dim=2)).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


class _Past:
    """What the twin knows: keys of all blocks in all steps."""

    def __init__(self, model: Any, window: int, sink: int) -> None:
        self.frames, self.window, self.sink = 2, window, sink
        self.block = self.step = 0
        self.store: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.turn = Film(model, self.frames, 0, 1)
        for layer, block in enumerate(model.blocks):
            block.attn1.set_processor(_TwinAttention(layer, self))


@torch.no_grad()
@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)  # the model rounds its residual stream to float32
def definition(window: int, sink: int) -> float:
    """Distance of a long video from its definition: block by block, all steps of each, with a window and a sink."""
    shape = (1, 4, (LONG - 1) // 4 + 1, SIZE[0] // 8, SIZE[1] // 8)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    with parallelize(pipeline(), TimestepPipeline(window=window, sink=sink)) as plan:
        found = generate(plan, **call(LONG, False, latents=start)).frames
    pipe = pipeline()
    past, text = _Past(pipe.transformer, window, sink), call(LONG)["prompt_embeds"]
    pipe.scheduler.set_timesteps(STEPS)
    sigmas, times, made = pipe.scheduler.sigmas, pipe.scheduler.timesteps, []
    for past.block, x in enumerate(start.split(2, dim=2)):
        for past.step in range(STEPS):
            v = pipe.transformer(x, times[past.step].expand(1), text, return_dict=False)[0]
            x = x + float(sigmas[past.step + 1] - sigmas[past.step]) * v
        made.append(x)
    return error(found, torch.cat(made, dim=2))
