"""Video pipelines around the tiny models; prompts come as embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AnimateDiffPipeline, AutoencoderKL, DDIMScheduler, MotionAdapter, TextToVideoSDPipeline
from torch import Tensor, nn

from tests.parallel import pipelines
from tests.parallel.clip_models import LONGEST, VIDEOS, WIDTH
from tests.tiny_models.autoencoders import kl_settings
from tests.tiny_models.weights import noise, randomized

STEPS = 3


def _vae() -> AutoencoderKL:
    return randomized(AutoencoderKL(**kl_settings(2)))


def _scheduler() -> Any:
    return DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)


def _animate_diff() -> AnimateDiffPipeline:
    missing: Any = None
    adapter: Any = MotionAdapter(block_out_channels=(8,), motion_max_seq_length=LONGEST, motion_norm_num_groups=4)
    return AnimateDiffPipeline(_vae(), missing, missing, VIDEOS["AnimateDiff"].model(), adapter, _scheduler())


def _text_to_video() -> TextToVideoSDPipeline:
    missing: Any = None
    return TextToVideoSDPipeline(_vae(), missing, missing, VIDEOS["UNet3D"].model(), _scheduler())


@dataclass(frozen=True)
class VideoPipe:
    """How to build a pipeline and what to call it with; its model sees `frames` frames."""

    build: Callable[[], Any]
    size: dict[str, int]
    frames: int

    def make(self) -> Any:
        pipe = self.build()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def denoiser(self, pipe: Any) -> nn.Module:
        return pipe.unet if hasattr(pipe, "unet") else pipe.transformer

    def call(self, pipe: Any) -> Tensor:
        """One generation with guidance, without a generator: the noise is that of the default one."""
        torch.manual_seed(9)
        named = {
            "prompt_embeds": noise(1, 5, WIDTH, seed=1),
            "negative_prompt_embeds": noise(1, 5, WIDTH, seed=2),
            "num_inference_steps": STEPS,
        }
        output = pipe(**named, **self.size, output_type="pt")
        return torch.as_tensor(output.frames)


def _wan() -> Any:
    pipe = pipelines.PIPES["Wan"].build(torch.float64)
    pipe.vae.double()
    return pipe


PIPES = {
    "AnimateDiff": VideoPipe(_animate_diff, {"height": 16, "width": 8, "num_frames": 7}, frames=7),
    "UNet3D": VideoPipe(_text_to_video, {"height": 16, "width": 8, "num_frames": 7}, frames=7),
    "Wan": VideoPipe(_wan, {"height": 48, "width": 48, "num_frames": 17}, frames=5),
}
