"""CogView 3 and 4, and GLM-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView4ControlPipeline,
    CogView4Pipeline,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
)

from tests.parallel.image_families_pairs import cogview3, cogview4, glm_image
from tests.pipelines.case import Case
from tests.pipelines.parts import Absent, picture, prompts
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import randomized


def _pipe(kind: Any, transformer: Any, scheduler: Any = None) -> Any:
    return kind(
        tokenizer=None,
        text_encoder=None,
        vae=kl_autoencoder(),
        transformer=randomized(transformer),
        scheduler=scheduler
        or FlowMatchEulerDiscreteScheduler(base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True),
    )


def _glm() -> Any:
    return GlmImagePipeline(
        tokenizer=None,
        processor=None,
        text_encoder=Absent(),
        vision_language_encoder=Absent(),
        vae=kl_autoencoder(latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        transformer=randomized(glm_image(6)),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def _prompts(samples: int) -> dict[str, Any]:
    return prompts(samples, guidance_scale=3.0)


def _with_prior(samples: int) -> dict[str, Any]:
    ids = torch.arange(samples * 60).view(samples, 60) % 32
    return _prompts(samples) | {"prior_token_ids": ids, "height": 96, "width": 160}


HERE = (
    Case(
        name="CogView3PlusPipeline",
        build=lambda: _pipe(CogView3PlusPipeline, cogview3(6), CogVideoXDDIMScheduler(snr_shift_scale=1.0)),
        call=_prompts,
    ),
    Case(
        name="CogView4Pipeline",
        build=lambda: _pipe(CogView4Pipeline, cogview4(6)),
        call=_prompts,
    ),
    Case(
        name="CogView4ControlPipeline",
        build=lambda: _pipe(CogView4ControlPipeline, cogview4(6, in_channels=8)),
        call=lambda samples: _prompts(samples) | {"control_image": picture(samples, seed=6)},
    ),
    Case(name="GlmImagePipeline", build=_glm, call=_with_prior),
)
