"""Flux 2 and its small sibling Klein, from text and from reference pictures."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    Flux2KleinKVPipeline,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.parts import half_mask, picture


def _autoencoder() -> AutoencoderKLFlux2:
    return randomized(
        AutoencoderKLFlux2(
            block_out_channels=(4,) * 4,
            latent_channels=4,
            norm_num_groups=2,
            layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
    )


def _pipe(kind: Any, *, guidance_embeds: bool = False) -> Any:
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=12,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=guidance_embeds,
    )
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        transformer=randomized(transformer),
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _guided(samples: int) -> dict[str, Any]:
    unwanted = {"negative_prompt_embeds": noise(samples, 7, 12, seed=2), "guidance_scale": 3.0}
    return _prompts(samples) | unwanted


def _picture(size: int = 96) -> Any:
    return picture(1, size, size)


def _painted(samples: int) -> dict[str, Any]:
    more = {"image": picture(1), "mask_image": half_mask(1), "strength": 0.7, "num_inference_steps": 3}
    return _guided(samples) | more


HERE = (
    Case(name="Flux2Pipeline", build=lambda: _pipe(Flux2Pipeline, guidance_embeds=True), call=_prompts),
    Case(name="Flux2KleinPipeline", build=lambda: _pipe(Flux2KleinPipeline), call=_guided),
    Case(name="Flux2KleinKVPipeline", build=lambda: _pipe(Flux2KleinKVPipeline), call=_prompts),
    Case(name="Flux2KleinInpaintPipeline", build=lambda: _pipe(Flux2KleinInpaintPipeline), call=_painted),
)
