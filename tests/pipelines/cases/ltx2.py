"""LTX-2, which makes videos with their sound."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTX2ConditionPipeline,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.video_parts import kept, ltx2_audio_autoencoder, ltx2_autoencoder, pictures

LEFT = {"LTX2LatentUpsamplePipeline": "it has no denoiser: one network makes its latents larger in a single call"}


def _transformer(**changed: Any) -> LTX2VideoTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 3,
        "attention_head_dim": 8,
        "cross_attention_dim": 24,
        "audio_in_channels": 8,
        "audio_out_channels": 8,
        "audio_num_attention_heads": 3,
        "audio_attention_head_dim": 4,
        "audio_cross_attention_dim": 12,
        "num_layers": 2,
        "caption_channels": 8,
        "qk_norm": "rms_norm_across_heads",
        "rope_double_precision": False,
        "perturbed_attn": True,
    }
    return randomized(LTX2VideoTransformer3DModel(**settings | changed))


def _connectors() -> LTX2TextConnectors:
    connectors = LTX2TextConnectors(
        caption_channels=8,
        text_proj_in_factor=2,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=4,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=4,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        rope_double_precision=False,
    )
    return randomized(connectors)


def _pipe(kind: Any, **changed: Any) -> Any:
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=ltx2_autoencoder(),
        audio_vae=ltx2_audio_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        connectors=_connectors(),
        transformer=_transformer(**changed),
        vocoder=None,
    )


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 16, seed=1),
        "prompt_attention_mask": kept(samples).flip(1),
        "negative_prompt_embeds": noise(samples, 7, 16, seed=2),
        "negative_prompt_attention_mask": kept(samples).flip(1),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 96,
        "width": 160,
        "num_frames": 17,
        "stg_scale": 0.0,
        "audio_stg_scale": 0.0,
    }


def _perturbed(samples: int) -> dict[str, Any]:
    changed = {"stg_scale": 1.0, "audio_stg_scale": 1.0, "spatio_temporal_guidance_blocks": [1]}
    return _prompts(samples) | changed


def _from_picture(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": pictures(1, 96, 160)[0], "image_crf": 0}


HERE = (
    Case(name="LTX2Pipeline", build=lambda: _pipe(LTX2Pipeline), call=_prompts),
    Case(name="LTX2Pipeline + perturbed guidance", build=lambda: _pipe(LTX2Pipeline), call=_perturbed),
    Case(name="LTX2Pipeline + split rotary", build=lambda: _pipe(LTX2Pipeline, rope_type="split"), call=_prompts),
    Case(name="LTX2ImageToVideoPipeline", build=lambda: _pipe(LTX2ImageToVideoPipeline), call=_from_picture, samples=1),
    Case(name="LTX2ConditionPipeline", build=lambda: _pipe(LTX2ConditionPipeline), call=_prompts),
    Case(name="LTX2InContextPipeline", build=lambda: _pipe(LTX2InContextPipeline), call=_prompts),
)
