"""CogView 3 and 4, and GLM-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView3PlusTransformer2DModel,
    CogView4ControlPipeline,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import Absent, kl_autoencoder, picture

_SETTINGS = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "out_channels": 4,
    "text_embed_dim": 12,
    "time_embed_dim": 10,
    "condition_dim": 4,
}


def _pipe(kind: Any, model: Any, scheduler: Any = None, **changed: Any) -> Any:
    return kind(
        tokenizer=None,
        text_encoder=None,
        vae=kl_autoencoder(),
        transformer=randomized(model(**_SETTINGS | changed)),
        scheduler=scheduler
        or FlowMatchEulerDiscreteScheduler(base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True),
    )


def _glm() -> Any:
    settings = _SETTINGS | {"prior_vq_quantizer_codebook_size": 32}
    return GlmImagePipeline(
        tokenizer=None,
        processor=None,
        text_encoder=Absent(),
        vision_language_encoder=Absent(),
        vae=kl_autoencoder(latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        transformer=randomized(GlmImageTransformer2DModel(**settings)),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _with_prior(samples: int) -> dict[str, Any]:
    ids = torch.arange(samples * 60).view(samples, 60) % 32
    return _prompts(samples) | {"prior_token_ids": ids, "height": 96, "width": 160}


HERE = (
    Case(
        name="CogView3PlusPipeline",
        build=lambda: _pipe(
            CogView3PlusPipeline,
            CogView3PlusTransformer2DModel,
            CogVideoXDDIMScheduler(snr_shift_scale=1.0),
            pos_embed_max_size=8,
            sample_size=8,
        ),
        call=_prompts,
    ),
    Case(
        name="CogView4Pipeline",
        build=lambda: _pipe(CogView4Pipeline, CogView4Transformer2DModel, sample_size=8, rope_axes_dim=(8, 8)),
        call=_prompts,
    ),
    Case(
        name="CogView4ControlPipeline",
        build=lambda: _pipe(
            CogView4ControlPipeline, CogView4Transformer2DModel, in_channels=8, sample_size=8, rope_axes_dim=(8, 8)
        ),
        call=lambda samples: _prompts(samples) | {"control_image": picture(samples, seed=6)},
    ),
    Case(name="GlmImagePipeline", build=_glm, call=_with_prior),
)
