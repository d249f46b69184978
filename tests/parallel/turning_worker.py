"""Runs on every rank: blocks of frames on models whose positions along time are rotary in several forms.

In a model of one layer keys do not depend on what frames see of others. So where the latents stay as they are until the
last step, a block that sees whole neighbours gives what the model gives for all frames at once: that is compared here,
with positions made in float64. Text in the attention of the frames has no position, so it matters where frames count
from: the model of all frames counts from the first one of the block that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers import (
    CogVideoXPipeline,
    HunyuanVideoPipeline,
    Kandinsky5T2VPipeline,
    LTXPipeline,
    MochiPipeline,
)
from diffusers.models import embeddings
from diffusers.models.transformers import transformer_hunyuan_video, transformer_mochi
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partsong import CascadePipeline, DualParallel, TimestepPipeline
from partsong.ledger import Ledger
from partsong.parallel import Mesh, parallelize
from partsong.parallel.hooks.samples import sample_of
from partsong.samplers import generate, stream
from partsong.samplers.pipeline.paused import Denoise, PausedCall
from tests.parallel.dual_worker import Euler
from tests.parallel.ranks import error, gathered
from tests.parallel.video_families import cogvideox, hunyuan_video_like, ltx, mochi
from tests.parallel.video_families_2026 import kandinsky5
from tests.pipelines.video_parts import cogvideox_autoencoder, hunyuan_video_autoencoder, kept, ltx_autoencoder
from tests.tiny_models.weights import noise, randomized

#: Sides of a video in pixels and in latents, and tokens of a frame.
SIZE = {"height": 48, "width": 80}


class Still(Euler):
    """Leaves the latents as they are until the last step, which adds the prediction; all steps are at one time."""

    init_noise_sigma = 1.0

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, **_: Any) -> None:
        super().set_timesteps(num_inference_steps, device, sigmas)
        self.timesteps = torch.full_like(self.timesteps, 500.0)

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        return sample

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True, **_: Any) -> Any:
        self._step_index = (self.step_index or 0) + 1
        return (sample + model_output if self.step_index == len(self.timesteps) else sample,)


class Moving(Still):
    """Steps as Euler does."""

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True, **_: Any) -> Any:
        self._step_index = (self.step_index or 0) + 1
        return (sample - model_output / len(self.timesteps),)


def _ltx(layers: int, scheduler: Any) -> Any:
    transformer = ltx(
        6, attention_head_dim=10, cross_attention_dim=30, num_layers=layers, norm_elementwise_affine=False
    )
    kind: Any = LTXPipeline  # the parts that are missing encode prompts
    return kind(scheduler, ltx_autoencoder(), None, None, randomized(transformer))


def _cogvideox(layers: int, scheduler: Any) -> Any:
    transformer = cogvideox(6, num_layers=layers, sample_width=10, use_rotary_positional_embeddings=True)
    kind: Any = CogVideoXPipeline
    return kind(None, None, cogvideox_autoencoder(), randomized(transformer), scheduler)


def _hunyuan_video(layers: int, scheduler: Any) -> Any:
    transformer = hunyuan_video_like(num_single_layers=layers - 1, guidance_embeds=False)
    kind: Any = HunyuanVideoPipeline
    return kind(None, None, randomized(transformer), hunyuan_video_autoencoder(), scheduler, None, None)


def _mochi(layers: int, scheduler: Any) -> Any:
    transformer = mochi(6, num_layers=layers)
    kind: Any = MochiPipeline
    return kind(scheduler, None, None, None, randomized(transformer))


def _kandinsky(layers: int, scheduler: Any) -> Any:
    transformer = kandinsky5(layers)
    kind: Any = Kandinsky5T2VPipeline
    parts = {"transformer": randomized(transformer), "vae": hunyuan_video_autoencoder(), "scheduler": scheduler}
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return kind(**parts, **dict.fromkeys(names))


def _texts(width: int = 12) -> dict[str, Any]:
    return {"prompt_embeds": noise(1, 7, width, seed=1), "negative_prompt_embeds": noise(1, 7, width, seed=2)}


def _masked(width: int = 12) -> dict[str, Any]:
    masks = {"prompt_attention_mask": kept(1), "negative_prompt_attention_mask": kept(1, present=3)}
    return _texts(width) | masks


def _pooled() -> dict[str, Any]:
    pooled = {"pooled_prompt_embeds": noise(1, 10, seed=3), "negative_pooled_prompt_embeds": noise(1, 10, seed=4)}
    return _masked() | pooled | {"true_cfg_scale": 3.0}


def _mochi_texts() -> dict[str, Any]:
    return {name: value.bool() if "mask" in name else value for name, value in _masked(16).items()}


def _kandinsky_texts() -> dict[str, Any]:
    ends = torch.tensor([0, 7], dtype=torch.int32)
    return {
        "prompt_embeds_qwen": noise(1, 7, 12, seed=1),
        "prompt_embeds_clip": noise(1, 10, seed=3),
        "prompt_cu_seqlens": ends,
        "negative_prompt_embeds_qwen": noise(1, 7, 12, seed=2),
        "negative_prompt_embeds_clip": noise(1, 10, seed=4),
        "negative_prompt_cu_seqlens": ends,
    }


@dataclass(frozen=True)
class Turning:
    """How to make a tiny pipeline, and what to call it with.

    `factor` is how many frames of video a latent frame stands for, `shape` that of the latents of so many frames, and
    `dim` where those count frames or their tokens. In a `joint` model the text is in the attention of the frames.
    """

    build: Callable[[int, Any], Any]
    texts: Callable[[], dict[str, Any]]
    factor: int
    shape: Callable[[int], tuple[int, ...]]
    dim: int = 1
    joint: bool = False
    recomputes: bool = True
    size: tuple[int, int] = (48, 80)

    def make(self, layers: int, scheduler: Any = None) -> Any:
        pipe = self.build(layers, scheduler or Still())
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(self, frames: int, **more: Any) -> dict[str, Any]:
        """One generation of so many latent frames."""
        return {
            **self.texts(),
            "num_frames": (frames - 1) * self.factor + 1,
            "height": self.size[0],
            "width": self.size[1],
            "num_inference_steps": 2,
            "output_type": "latent",
            "generator": torch.Generator().manual_seed(5),
            **more,
        }

    def noise(self, frames: int) -> Tensor:
        """Latents to begin with; the channels of a picture that is not given are empty."""
        latents = noise(*self.shape(frames), seed=6)
        if latents.shape[-1] == 9:
            latents[..., 4:] = 0.0
        return latents


TURNING = {
    "LTX-Video": Turning(_ltx, _masked, 8, lambda f: (1, f * 2 * 3, 4), size=(64, 96)),
    "CogVideoX": Turning(_cogvideox, _texts, 4, lambda f: (1, f, 4, 6, 10), joint=True, recomputes=False),
    "HunyuanVideo": Turning(_hunyuan_video, _pooled, 4, lambda f: (1, 4, f, 6, 10), dim=2, joint=True),
    "Mochi": Turning(_mochi, _mochi_texts, 6, lambda f: (1, 4, f, 6, 10), dim=2, joint=True),
    "Kandinsky 5": Turning(_kandinsky, _kandinsky_texts, 4, lambda f: (1, f, 6, 10, 9), recomputes=False),
}


#: Those whose text is by itself, so that frames can see the past alone.
CAUSAL = tuple(name for name, turning in TURNING.items() if not turning.joint)


@contextmanager
def in_float64(first: int = 0) -> Iterator[None]:
    """Lets models and pipelines compute in float64 where they name a smaller type themselves.

    Args:
        first: what the first frame's position along time is, where text has none.
    """
    table, places = embeddings.get_1d_rotary_pos_embed, transformer_mochi.MochiRoPE._get_positions

    def exact(dim: int, pos: Any, *args: Any, **kwargs: Any) -> Any:
        return table(dim, pos + (first if dim == 4 else 0), *args, **{**kwargs, "freqs_dtype": torch.float64})

    def shifted(*args: Any, **kwargs: Any) -> Tensor:
        return places(*args, **kwargs) + torch.tensor([first, 0, 0])

    with ExitStack() as patches:
        for name in ("float32", "bfloat16"):
            patches.enter_context(mock.patch.object(torch, name, torch.float64))
        patches.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        patches.enter_context(mock.patch.object(transformer_mochi.MochiRoPE, "_get_positions", shifted))
        for place in (embeddings, transformer_hunyuan_video):
            patches.enter_context(mock.patch.object(place, "get_1d_rotary_pos_embed", exact))
        yield


def neighbours(name: str, mesh: Mesh, **knobs: Any) -> float:
    """Blocks that see their neighbours wholly, in a model of one layer, against all frames at once.

    Of three blocks the outer ones do not see each other, so it is the middle one that is compared.
    """
    turning, apart = TURNING[name], []
    for frames, blocks in ((4, (0, 1)), (6, (1,))):
        latents = turning.noise(frames)
        with in_float64():
            pipe = turning.make(1)
            with parallelize(pipe, DualParallel(block_frames=2, context=2, **knobs), mesh=mesh) as plan:
                found = generate(plan, **turning.call(frames, latents=latents.clone())).frames
        for block in blocks:
            with in_float64(-2 * block if turning.joint and not knobs else 0):
                serial = pipe(**turning.call(frames, latents=latents.clone())).frames
            parts = (x.unflatten(turning.dim, (frames, -1)) for x in (found, serial))
            apart.append(error(*(x.narrow(turning.dim, 2 * block, 2) for x in parts)))
    return max(apart)


@in_float64()
def one_block(name: str, mesh: Mesh) -> float:
    """A video of one block, with noise given, against the pipeline itself."""
    turning = TURNING[name]
    pipe, latents = turning.make(3, Moving()), turning.noise(3)
    serial = pipe(**turning.call(3, latents=latents.clone())).frames
    with parallelize(pipe, DualParallel(block_frames=3, context=2), mesh=mesh) as plan:
        return error(generate(plan, **turning.call(3, latents=latents.clone())).frames, serial)


@in_float64()
def video(name: str, mesh: Mesh) -> tuple[Tensor, bool]:
    """Latents of uneven blocks on models of three layers, and whether the bytes were told."""
    turning = TURNING[name]
    pipe = turning.make(3, Moving())
    with parallelize(pipe, DualParallel(block_frames=2, context=1), mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            found = generate(plan, **turning.call(7)).frames
        told = plan.explain().bytes_total()[mesh.rank] == int(ledger.summary().get("bytes_sent", 0))
    return found, told


class _PastAlone(TorchFunctionMode):
    """Lets frames see the blocks up to their own: what a causal model is."""

    def __init__(self, frames: int, block: int, unit: int) -> None:
        super().__init__()
        of = torch.arange(frames).div(block, rounding_mode="floor").repeat_interleave(unit)
        self.mask, self.calls = of[:, None] >= of[None, :], 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        if func is F.scaled_dot_product_attention and named["query"].shape[2] == named["key"].shape[2] == len(
            self.mask
        ):
            self.calls += 1
            return func(**named | {"attn_mask": self.mask})
        return func(*args, **(kwargs or {}))


def causal(name: str, mesh: Mesh) -> float:
    """A window that holds the past, against the model of all frames at once whose frames see the past alone."""
    turning, frames, block = TURNING[name], 6, 2
    with in_float64():
        pipe, latents = turning.make(2, Moving()), turning.noise(frames)
        with _PastAlone(frames, block, 6 if name == "LTX-Video" else 15) as mode:
            serial = pipe(**turning.call(frames, latents=latents.clone())).frames
        assert mode.calls >= 4
        pipe.transformer.register_to_config(num_frame_per_block=block)
        with parallelize(pipe, TimestepPipeline(window=3, sink=0), mesh=mesh) as plan:
            found = generate(plan, **turning.call(frames, latents=latents.clone())).frames
    return error(found, serial)


class Timeless(Moving):
    """Has all steps at time zero, so that a model of all frames can show the past as it is when it is clean."""

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, **_: Any) -> None:
        super().set_timesteps(num_inference_steps, device, sigmas)
        self.timesteps = torch.zeros_like(self.timesteps)


def cascaded(name: str, mesh: Mesh, guidance: float) -> float:
    """At depth 1, with a window that holds the past, against the model of all frames, block after block."""
    turning, frames, block, steps = TURNING[name], 6, 2, 2
    with in_float64():
        pipe, latents = turning.make(2, Timeless()), turning.noise(frames)
        named = turning.call(frames, latents=latents.clone(), guidance_scale=guidance)
        with PausedCall(pipe, "transformer", named) as call:
            event = call.send()
            assert isinstance(event, Denoise)
            asked = event.arguments
        serial = latents.clone()
        for start in range(0, frames, block):
            for _ in range(steps):
                whole = torch.cat([serial] * len(asked["hidden_states"]))
                with _PastAlone(frames, block, 6 if name == "LTX-Video" else 15), torch.no_grad():
                    out = sample_of(pipe.transformer(**{**asked, "hidden_states": whole}))
                if len(out) > 1:
                    without, towards = out.chunk(2)
                    out = without + guidance * (towards - without)
                each = serial.shape[turning.dim] // frames
                part = (turning.dim, start * each, block * each)
                serial.narrow(*part)[..., : out.shape[-1]] -= out.narrow(*part) / steps
        pipe.transformer.register_to_config(num_frame_per_block=block)
        with parallelize(pipe, CascadePipeline(depth=1, window=3, sink=0), mesh=mesh) as plan:
            found = generate(plan, **named).frames
    return error(found, serial[..., : found.shape[-1]])


class Told(Still):
    """Ends with latents that it was told."""

    latents: Tensor

    def step(self, *_: Any, **__: Any) -> Any:
        return (self.latents,)


@in_float64()
def decoded(name: str) -> tuple[float, list[int]]:
    """Frames streamed against the whole decoded at once, and how many came at a time."""
    turning = TURNING[name]
    pipe, small = turning.make(1, Moving()), {"height": turning.size[0] // 2 // 16 * 16, "width": 32}
    with parallelize(pipe, DualParallel(block_frames=2, context=1)) as plan:
        latents = generate(plan, **turning.call(7, **small)).frames
        parts = [part.frames for part in stream(plan, **turning.call(7, **small, output_type="pt"))]
    pipe.scheduler = Told()
    pipe.scheduler.latents = latents
    serial = pipe(**turning.call(7, **small, output_type="pt")).frames
    return error(torch.cat(parts, dim=1), serial), [part.shape[1] for part in parts]


@in_float64()
def resumed(name: str, folder: Any) -> bool:
    """Whether a video that was stopped and taken up again is the same to the last bit."""
    turning, knobs = TURNING[name], DualParallel(block_frames=2, context=1)
    with parallelize(turning.make(2, Moving()), knobs) as plan:
        whole = [part.frames for part in stream(plan, **turning.call(7))]
        with closing(cast("Generator[Any]", stream(plan, journal=folder, **turning.call(7)))) as parts:
            next(parts)
            next(parts)
        again = [part.frames for part in stream(plan, journal=folder, **turning.call(7))]
    return all(map(torch.equal, whole, again)) and len(whole) == len(again)


def ranks(nproc: int, names: Iterable[str] = TURNING) -> dict[str, tuple[float, tuple[Tensor, list[bool]]]]:
    """A video of one block against the pipeline, and one of several, on some ranks."""
    found = {}
    with Mesh(pipe=nproc) as mesh:
        for name in names:
            latents, told = video(name, mesh)
            found[name] = one_block(name, mesh), (latents, gathered(told) if nproc > 1 else [told])
    return found


def streamed(nproc: int) -> dict[str, float]:
    """Causal models, one rank per step."""
    with Mesh(stage=nproc) as mesh:
        return {name: causal(name, mesh) for name in CAUSAL}
