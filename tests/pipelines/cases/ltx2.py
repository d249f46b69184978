"""LTX-2, which makes videos with their sound."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTX2ConditionPipeline,
    LTX2DFRPipeline,
    LTX2DFRTemporalRefinePipeline,
    LTX2HDRPipeline,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXEulerAncestralRFScheduler,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors
from diffusers.pipelines.ltx2.dfr_layout import epilogue_tiles
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition

from tests.pipelines.case import Case
from tests.pipelines.video_parts import kept, ltx2_audio_autoencoder, ltx2_autoencoder, pictures
from tests.tiny_models.weights import noise, randomized

LEFT = {
    "LTX2LatentUpsamplePipeline": "it has no denoiser: one network makes its latents larger in a single call",
    "LTX2VideoDiffusionDecodePipeline": "it has no denoiser: its autoencoder denoises within one call of its own",
}


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


def _pipe(kind: Any, more: dict[str, Any] | None = None, scheduler: Any = None, **changed: Any) -> Any:
    return kind(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(),
        vae=ltx2_autoencoder(),
        audio_vae=ltx2_audio_autoencoder(),
        text_encoder=None,
        tokenizer=None,
        connectors=_connectors(),
        transformer=_transformer(**changed),
        vocoder=None,
        **more or {},
    )


def _refining() -> Any:
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=4, mid_channels=32, num_blocks_per_stage=1, spatial_upsample=False, temporal_upsample=True
    )
    return _pipe(
        LTX2DFRTemporalRefinePipeline,
        {"temporal_latent_upsampler": randomized(upsampler)},
        LTXEulerAncestralRFScheduler(eta=0.5),
        use_keyframes_abs_pos_embedding=True,
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


def _dfr(samples: int) -> dict[str, Any]:
    """The frames are made up to 25, and one of them is made twice, as a keyframe."""
    names = ("prompt_embeds", "prompt_attention_mask", "output_type", "height", "width", "num_frames")
    return {name: _prompts(samples)[name] for name in names} | {"sigmas": [1.0, 0.5]}


def _dfr_tiles(samples: int) -> dict[str, Any]:
    return _dfr(samples) | {"video_tiles": epilogue_tiles((4, 3, 5), 2, [1])}


def _refined(samples: int) -> dict[str, Any]:
    """Two windows of a video of 49 frames, whose keyframes are given."""
    given = {
        "latents": noise(samples, 4, 7, 3, 5, seed=3),
        "keyframes_latents": noise(samples, 4, 2, 3, 5, seed=4),
        "keyframe_positions": [24, 48],
        "audio_latents": noise(samples, 2, 12, 4, seed=5),
        "num_frames": 49,
    }
    return _dfr(samples) | given


def _hdr(samples: int) -> dict[str, Any]:
    left_out = ("audio_stg_scale",)
    named = {name: value for name, value in _prompts(samples).items() if name not in left_out}
    shown = LTX2HDRReferenceCondition(frames=pictures(17, 96, 160), strength=0.9)
    return named | {"reference_conditions": [shown], "guidance_scale": 3.0}


HERE = (
    Case(name="LTX2Pipeline", build=lambda: _pipe(LTX2Pipeline), call=_prompts),
    Case(name="LTX2Pipeline + perturbed guidance", build=lambda: _pipe(LTX2Pipeline), call=_perturbed),
    Case(name="LTX2Pipeline + split rotary", build=lambda: _pipe(LTX2Pipeline, rope_type="split"), call=_prompts),
    Case(name="LTX2ImageToVideoPipeline", build=lambda: _pipe(LTX2ImageToVideoPipeline), call=_from_picture, samples=1),
    Case(name="LTX2ConditionPipeline", build=lambda: _pipe(LTX2ConditionPipeline), call=_prompts),
    Case(name="LTX2InContextPipeline", build=lambda: _pipe(LTX2InContextPipeline), call=_prompts),
    Case(
        name="LTX2DFRPipeline",
        build=lambda: _pipe(LTX2DFRPipeline, use_keyframes_abs_pos_embedding=True),
        call=_dfr,
    ),
    Case(
        name="LTX2DFRPipeline + tiles",
        build=lambda: _pipe(LTX2DFRPipeline, use_keyframes_abs_pos_embedding=True),
        call=_dfr_tiles,
        samples=1,
    ),
    Case(name="LTX2DFRTemporalRefinePipeline", build=_refining, call=_refined),
    Case(name="LTX2HDRPipeline", build=lambda: _pipe(LTX2HDRPipeline), call=_hdr),
)
