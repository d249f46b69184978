"""Flux, from text and from images."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline, FluxPipeline, FluxTransformer2DModel

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import kl_autoencoder


def _transformer(**changed: Any) -> FluxTransformer2DModel:
    settings = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 10,
        "guidance_embeds": False,
        "axes_dims_rope": (2, 2, 4),
    }
    return randomized(FluxTransformer2DModel(**settings | changed))


def _pipe(kind: Any) -> Any:
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=kl_autoencoder(shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=_transformer(),
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "pooled_prompt_embeds": noise(samples, 10, seed=3),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _guided(samples: int) -> dict[str, Any]:
    unwanted = {
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_pooled_prompt_embeds": noise(samples, 10, seed=4),
    }
    return _prompts(samples) | unwanted | {"true_cfg_scale": 3.0}


def _from_image(samples: int) -> dict[str, Any]:
    image = noise(samples, 3, 48, 80, seed=5).clamp(-1, 1)
    return _prompts(samples) | {"image": image, "strength": 0.7, "num_inference_steps": 3}


HERE = (
    Case(name="FluxPipeline", build=lambda: _pipe(FluxPipeline), call=_guided),
    Case(name="FluxImg2ImgPipeline", build=lambda: _pipe(FluxImg2ImgPipeline), call=_from_image),
)
