"""Runs on every rank: DualParallel against serial pipelines, its definition, and itself on other numbers of ranks.

The definition: a block at a step attends to itself, the last frames of the block before at the same step, and the first
frames of the block after at an earlier step; positions in time are those of the frames in the video. Here every visit
computes the keys of the three anew from what was noted of them, with the model's own rotary table.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any
from unittest import mock

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from partsong import DualParallel
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, parallelize
from partsong.samplers import generate, stream
from partsong.samplers.pipeline import stage_slots
from tests.parallel.pipeline_worker import clean
from tests.parallel.pipelines import embeds
from tests.parallel.ranks import error, gathered
from tests.parallel.video_families import wan_like
from tests.tiny_models.autoencoders import wan_settings
from tests.tiny_models.weights import randomize

STEPS = 4
SIZE = (32, 48)


class Euler(FlowMatchEulerDiscreteScheduler):
    """Steps in the latents' own type: the stock class rounds to float32, where one bit of difference may grow."""

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True, **_: Any) -> Any:
        if self.step_index is None:
            self._init_step_index(timestep)
        difference = float(self.sigmas[self.step_index + 1] - self.sigmas[self.step_index])
        self._step_index += 1
        return (sample + difference * model_output,)


def exact(kind: Any, **changed: Any) -> Any:
    """A tiny model built like Wan in float64, with a rotary table that is exact in that type."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, "num_layers": 4, "rope_max_seq_len": 64}
    torch.manual_seed(3)
    model = wan_like(kind, **sizes | changed).eval()
    randomize(model)
    exact_rotary(model.double())
    return model


def pipeline(scheduler: Any = None, layers: int = 4) -> WanPipeline:
    """A tiny Wan."""
    model = exact(WanTransformer3DModel, num_layers=layers)
    vae = AutoencoderKLWan(**wan_settings(latents_mean=[0.1] * 4, latents_std=[0.9] * 4)).eval()
    return WanPipeline(None, None, vae, scheduler or Euler(shift=3.0), model)


def exact_rotary(model: Any) -> None:
    """Turns by sums of angles are products of turns only where the table has no rounding of its own."""
    rope, length = model.rope, model.config.rope_max_seq_len
    angles = [
        torch.arange(length, dtype=torch.float64)[:, None]
        * 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim).repeat_interleave(2)
        for dim in (rope.t_dim, rope.h_dim, rope.w_dim)
    ]
    whole = torch.cat(angles, dim=1)
    rope.freqs_cos, rope.freqs_sin = whole.cos(), whole.sin()


def call(frames: int, guided: bool = True, **more: Any) -> dict[str, Any]:
    """Arguments of one generation."""
    return {
        "prompt_embeds": embeds(1, torch.float64),
        "negative_prompt_embeds": embeds(1, torch.float64, seed=2),
        "guidance_scale": 3.0 if guided else 1.0,
        "num_frames": frames,
        "height": SIZE[0],
        "width": SIZE[1],
        "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(5),
        "output_type": "latent",
        **more,
    }


def one_block(mesh: Mesh) -> float:
    """A video that fits into one block, with noise given, is the serial pipeline's."""
    pipe = pipeline(UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0))
    noise = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    serial = pipe(**call(9, latents=noise)).frames
    with parallelize(pipe, DualParallel(block_frames=4, context=2), mesh=mesh) as plan:
        found = generate(plan, **call(9, latents=noise)).frames
    return float((found - serial).abs().max() / serial.abs().max())


def videos(mesh: Mesh, names: Collection[str]) -> dict[str, Tensor]:
    """Latents of some videos, to be compared between numbers of ranks."""
    found = {}
    for name, knobs, frames, guided in (case for case in CASES if case[0] in names):
        pipe = pipeline()
        with parallelize(pipe, DualParallel(**knobs), mesh=mesh) as plan:
            found[name] = generate(plan, **call(frames, guided)).frames
    return found


CASES = (
    ("even", {"block_frames": 2, "context": 1}, 29, True),
    ("uneven", {"block_frames": 3, "context": 2}, 41, False),
    ("rarely", {"block_frames": 2, "context": 2, "admit_every": 3}, 33, True),
    ("recomputed", {"block_frames": 3, "context": 2, "previous": "recomputed"}, 41, True),
    ("both", {"block_frames": 2, "context": 1, "previous": "recomputed", "admit_every": 2}, 25, False),
    ("alone", {"block_frames": 2, "context": 0, "noise": "independent"}, 17, False),
)
NAMES = tuple(case[0] for case in CASES)


def counted(nproc: int, mesh: Mesh) -> tuple[list[int], list[int]]:
    """Bytes every rank sent in a generation, and those predicted."""
    pipe = pipeline()
    with parallelize(pipe, DualParallel(block_frames=3, context=2), mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            for _ in stream(plan, **call(41)):
                pass
        sent = int(ledger.summary().get("bytes_sent", 0))
        return gathered(sent) if nproc > 1 else [sent], plan.explain().bytes_total()


def slots(mesh: Mesh) -> dict[str, int]:
    """Exchanges made for a video of six blocks: the slots the queue took, but for the last."""
    exchanged, counts = stage_slots.exchange, {}
    for name, guided in (("guided", True), ("plain", False)):
        short = pipeline(layers=max(2, mesh.world_size))
        with parallelize(short, DualParallel(block_frames=3, context=2), mesh=mesh) as plan:
            count = itertools.count()
            with mock.patch.object(stage_slots, "exchange", lambda *a, n=count, **k: (next(n), exchanged(*a, **k))[1]):
                for _ in stream(plan, **call(69, guided)):
                    pass
            counts[name] = next(count)
    return counts


def growing(mesh: Mesh) -> str:
    """What is said of a pipeline that begins to guide in mid-run."""
    pipe = pipeline()

    class Later(type(pipe)):
        @property
        def do_classifier_free_guidance(self) -> bool:
            return bool(self.scheduler.step_index) and self._guidance_scale > 1

    pipe.__class__ = Later
    try:
        with parallelize(pipe, DualParallel(block_frames=2, context=1), mesh=mesh) as plan:
            generate(plan, **call(29))
    except PartsongError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


def decoded(mesh: Mesh) -> tuple[float, list[int]]:
    """Frames streamed against the whole decoded at once, and how many came at a time."""
    pipe = pipeline()
    with parallelize(pipe, DualParallel(block_frames=2, context=1), mesh=mesh) as plan:
        latents = generate(plan, **call(29)).frames
        parts = [part.frames for part in stream(plan, **call(29, output_type="pt")) if part is not None]
    if not parts:
        return 0.0, []
    std, mean = (torch.tensor(pipe.vae.config[name]).view(1, 4, 1, 1, 1) for name in ("latents_std", "latents_mean"))
    with torch.no_grad():
        whole = pipe.vae.decode(latents.float() / (1.0 / std) + mean, return_dict=False)[0]
    wanted = pipe.video_processor.postprocess_video(whole, output_type="pt")
    return float((torch.cat(parts, dim=1) - wanted).abs().max()), [part.shape[1] for part in parts]


def refusals(mesh: Mesh) -> dict[str, str]:
    """What is said of calls that have no correct form."""
    pipe = pipeline()
    said = {}
    with parallelize(pipe, DualParallel(block_frames=2, context=1), mesh=mesh) as plan:
        trials = {
            "frames": lambda: generate(plan, **call(28)),
            "latents": lambda: generate(plan, **call(29, latents=torch.zeros(1, 4, 7, 4, 6))),
            "pipeline": lambda: pipe(**call(29)),
            "callback": lambda: generate(plan, **call(29, callback_on_step_end=_failing)),
        }
        for name, trial in trials.items():
            try:
                trial()
            except (PartsongError, RuntimeError) as problem:
                said[name] = f"{type(problem).__name__}: {problem}"
    said["hooks"] = "none" if clean(pipe.transformer) and clean(pipe.vae) else "left"
    return said


def _failing(pipe: Any, step: int, time: Any, named: dict[str, Any]) -> dict[str, Any]:
    if step == 2:
        raise RuntimeError("in the third step")
    return named


def ranks(nproc: int, names: Collection[str] = NAMES) -> dict[str, Any]:
    """Everything, on one number of ranks, with these videos."""
    with Mesh(pipe=nproc) as mesh:
        return {
            "one block": one_block(mesh),
            "videos": videos(mesh, names),
            "counted": counted(nproc, mesh),
            "slots": slots(mesh),
            "growing": growing(mesh),
            "decoded": decoded(mesh),
            "refusals": refusals(mesh),
        }


def by_heads(attn: Any, hidden: Tensor) -> list[Tensor]:
    """Queries, keys and values of each head."""
    mixed = (attn.norm_q(attn.to_q(hidden)), attn.norm_k(attn.to_k(hidden)), attn.to_v(hidden))
    return [x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in mixed]


class _TwinAttention:
    """Wan's self-attention with keys kept before they are turned; every position is that of the frame in the video."""

    def __init__(self, layer: int, film: Film) -> None:
        self.layer, self.film = layer, film

    def __call__(self, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        film = self.film
        q, k, v = by_heads(attn, hidden_states)
        film.store[film.block, film.step, film.branch, self.layer] = (k, v)
        keys, values = [film.turned(k, film.block, -film.front)], [v]
        for block, step, last in ((film.block - 1, film.step, True), (film.block + 1, film.step - film.lag, False)):
            if last and film.recomputes:
                continue  # they are among the frames at work
            if (block, step, film.branch, self.layer) in film.store:
                other_k, other_v = film.store[block, step, film.branch, self.layer]
                frames = other_k.shape[2] // film.area
                front = film.context if film.recomputes else 0
                first = max(frames - film.context, 0) if last else front
                part = slice(first * film.area, None if last else (front + film.context) * film.area)
                keys.append(film.turned(other_k[:, :, part], block, first - front))
                values.append(other_v[:, :, part])
        weights = (film.turned(q, film.block, -film.front) @ torch.cat(keys, 2).mT / q.shape[-1] ** 0.5).softmax(-1)
        out = (weights @ torch.cat(values, 2)).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


class Film:
    """What the twin knows of all blocks."""

    def __init__(self, model: Any, frames: int, context: int, lag: int, recomputes: bool = False) -> None:
        self.frames, self.context, self.lag, self.recomputes = frames, context, lag, recomputes
        self.rows, self.columns = SIZE[0] // 16, SIZE[1] // 16
        self.area = self.rows * self.columns
        self.block = self.step = self.branch = 0
        self.store: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self.rope = model.rope
        for layer, block in enumerate(model.blocks):
            block.attn1.set_processor(_TwinAttention(layer, self))

    @property
    def front(self) -> int:
        """Frames of the block before that are computed again."""
        return self.context if self.recomputes and self.block else 0

    def turned(self, x: Tensor, block: int, first: int) -> Tensor:
        """Rotary positions from angles, as complex numbers: time in the video, row, column."""
        count = x.shape[2] // self.area
        places = torch.cartesian_prod(
            torch.arange(count) + block * self.frames + first, torch.arange(self.rows), torch.arange(self.columns)
        ).double()
        angles = [
            places[:, i, None] * 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            for i, dim in enumerate((self.rope.t_dim, self.rope.h_dim, self.rope.w_dim))
        ]
        turns = torch.polar(torch.ones((), dtype=torch.float64), torch.cat(angles, dim=1))
        return torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * turns).flatten(-2)


def twin(knobs: dict[str, Any], noise: Tensor, guided: bool) -> Tensor:
    """The definition, written out: rounds over blocks, one Euler step per visit."""
    pipe = pipeline()
    frames, lag = knobs["block_frames"], knobs.get("admit_every", 1)
    film = Film(pipe.transformer, frames, knobs["context"], lag, knobs.get("previous") == "recomputed")
    inputs = {}
    pipe.scheduler.set_timesteps(STEPS)
    sigmas, times = pipe.scheduler.sigmas, pipe.scheduler.timesteps
    latents = dict(enumerate(noise.split(frames, dim=2)))
    named = call(9, guided)
    for number in range(lag * (len(latents) - 1) + STEPS):
        for film.block in reversed(latents):
            film.step = number - lag * film.block
            if not 0 <= film.step < STEPS:
                continue
            x, t = latents[film.block], times[film.step].expand(1)
            inputs[film.block, film.step] = x
            if film.front:
                x = torch.cat([inputs[film.block - 1, film.step][:, :, -film.front :], x], dim=2)
            predictions = []
            for film.branch, text in enumerate(("prompt_embeds", "negative_prompt_embeds")[: 2 if guided else 1]):
                predictions.append(pipe.transformer(x, t, named[text], return_dict=False)[0])
            v = predictions[0]
            if guided:
                v = predictions[1] + named["guidance_scale"] * (predictions[0] - predictions[1])
            difference = float(sigmas[film.step + 1] - sigmas[film.step])
            latents[film.block] = latents[film.block] + difference * v[:, :, film.front :]
    return torch.cat(list(latents.values()), dim=2)


@torch.no_grad()
@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)  # Wan rounds its residual stream to float32
def definition() -> list[float]:
    """Distance of videos from their definition, relative."""
    found = []
    for _, knobs, frames, guided in CASES:
        shape = (1, 4, (frames - 1) // 4 + 1, SIZE[0] // 8, SIZE[1] // 8)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()  # what the pipeline keeps of it
        with parallelize(pipeline(), DualParallel(**knobs)) as plan:
            got = generate(plan, **call(frames, guided, latents=noise)).frames
        found.append(error(got, twin(knobs, noise, guided)))
    return found
