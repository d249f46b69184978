"""Kandinsky 5, for videos and for pictures."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5I2IPipeline,
    Kandinsky5I2VPipeline,
    Kandinsky5T2IPipeline,
    Kandinsky5T2VPipeline,
)

from tests.parallel.video_families_2026 import kandinsky5
from tests.pipelines.case import Case
from tests.pipelines.video_parts import hunyuan_video_autoencoder, pictures
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized


def _pipe(kind: Any, vae: Any, *, given: bool) -> Any:
    transformer = randomized(kandinsky5(visual_cond=given), torch.float32)
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe = kind(transformer=transformer, vae=vae.float(), scheduler=scheduler, **dict.fromkeys(names))
    if hasattr(pipe, "resolutions"):
        pipe.resolutions = [(80, 48)]
    return pipe


#: The model itself turns to float32, and its rotary embedding to bfloat16.
_TOLERANCE = 1e-4


def _prompts(samples: int) -> dict[str, Any]:
    ends = torch.arange(samples + 1, dtype=torch.int32) * 7
    return {
        "prompt_embeds_qwen": noise(samples, 7, 12, seed=1, dtype=torch.float32),
        "prompt_embeds_clip": noise(samples, 10, seed=3, dtype=torch.float32),
        "prompt_cu_seqlens": ends,
        "negative_prompt_embeds_qwen": noise(samples, 7, 12, seed=2, dtype=torch.float32),
        "negative_prompt_embeds_clip": noise(samples, 10, seed=4, dtype=torch.float32),
        "negative_prompt_cu_seqlens": ends,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _video(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"num_frames": 9}


HERE = (
    Case(
        name="Kandinsky5T2VPipeline",
        build=lambda: _pipe(Kandinsky5T2VPipeline, hunyuan_video_autoencoder(), given=True),
        call=_video,
        tolerance=_TOLERANCE,
    ),
    Case(
        name="Kandinsky5I2VPipeline",
        build=lambda: _pipe(Kandinsky5I2VPipeline, hunyuan_video_autoencoder(), given=True),
        call=lambda samples: _video(samples) | {"image": pictures(1)[0], "num_frames": 21},
        samples=1,
        tolerance=_TOLERANCE,
    ),
    Case(
        name="Kandinsky5T2IPipeline",
        build=lambda: _pipe(Kandinsky5T2IPipeline, kl_autoencoder(), given=False),
        call=_prompts,
        tolerance=_TOLERANCE,
    ),
    Case(
        name="Kandinsky5I2IPipeline",
        build=lambda: _pipe(Kandinsky5I2IPipeline, kl_autoencoder(), given=True),
        call=lambda samples: _prompts(samples) | {"image": pictures(1)[0]},
        samples=1,
        tolerance=_TOLERANCE,
    ),
)
