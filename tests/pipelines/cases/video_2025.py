"""Allegro, EasyAnimate, Motif-Video, Sana-Video, Helios and AnyFlow."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AllegroPipeline,
    AnyFlowFARPipeline,
    AnyFlowFARTransformer3DModel,
    AnyFlowPipeline,
    AnyFlowTransformer3DModel,
    AutoencoderKLAllegro,
    AutoencoderKLMagvit,
    ClassifierFreeGuidance,
    DDIMScheduler,
    EasyAnimateInpaintPipeline,
    EasyAnimatePipeline,
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeliosPipeline,
    HeliosPyramidPipeline,
    HeliosScheduler,
    MotifVideoImage2VideoPipeline,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)

from tests.parallel.video_families_2026 import allegro, any_flow, easy_animate, helios
from tests.pipelines.case import Case
from tests.pipelines.parts import prompts
from tests.pipelines.video_parts import kept, pictures
from tests.tiny_models.autoencoders import wan_autoencoder
from tests.tiny_models.weights import noise, randomized

LEFT = {"EasyAnimateControlPipeline": "its own call passes an argument that its encode_prompt does not take"}

_HEADS = {"num_attention_heads": 3, "attention_head_dim": 8}
_CHANNELS = {"in_channels": 4, "out_channels": 4}
_NO_TEXT = {"tokenizer": None, "text_encoder": None}

#: Motif-Video's times are float32, whatever its weights are.
_TOLERANCE = 1e-4


def _masked(samples: int) -> dict[str, Any]:
    masks = {"prompt_attention_mask": kept(samples), "negative_prompt_attention_mask": kept(samples, present=3)}
    return prompts(samples) | masks


def _video(samples: int) -> dict[str, Any]:
    return _masked(samples) | {"num_frames": 9}


def _allegro() -> AllegroPipeline:
    transformer = allegro(6, sample_width=10)
    vae = AutoencoderKLAllegro(block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2)
    return AllegroPipeline(
        vae=randomized(vae), transformer=randomized(transformer), scheduler=DDIMScheduler(), **_NO_TEXT
    )


def _easy(kind: Any, **changed: Any) -> Any:
    transformer = easy_animate(6, sample_width=10, sample_height=6, **changed)
    vae = AutoencoderKLMagvit(latent_channels=4, block_out_channels=[4, 4, 4, 4], layers_per_block=1, norm_num_groups=2)
    vae.register_to_config(cache_mag_vae=False)  # asked for in the inpainting pipeline, and in no class' defaults
    return kind(
        vae=randomized(vae),
        transformer=randomized(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **_NO_TEXT,
    )


def _motif(kind: Any, **changed: Any) -> Any:
    transformer = MotifVideoTransformer3DModel(
        **_HEADS,
        in_channels=9,
        out_channels=4,
        num_layers=1,
        num_single_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=12,
        rope_axes_dim=(4, 2, 2),
        **changed,
    )
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=wan_autoencoder().float(),
        transformer=randomized(transformer, torch.float32),
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
        feature_extractor=None,
        **_NO_TEXT,
    )


def _motif_call(samples: int) -> dict[str, Any]:
    return {name: value.float() if name.endswith("embeds") else value for name, value in _video(samples).items()}


def _sana(kind: Any) -> Any:
    transformer = SanaVideoTransformer3DModel(
        **_CHANNELS,
        **_HEADS,
        num_layers=2,
        num_cross_attention_heads=3,
        cross_attention_head_dim=8,
        cross_attention_dim=24,
        caption_channels=12,
        rope_max_seq_len=32,
    )
    return kind(
        vae=wan_autoencoder(),
        transformer=randomized(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **_NO_TEXT,
    )


def _sana_call(samples: int) -> dict[str, Any]:
    return _masked(samples) | {
        "frames": 9,
        "use_resolution_binning": False,
        "height": 96,
        "width": 160,
        "negative_prompt": None,
    }


def _helios(kind: Any, stages: int, **more: Any) -> Any:
    return kind(
        vae=wan_autoencoder(),
        transformer=randomized(helios(6)),
        # With the gamma of its default, 1/3, the covariance of the noise between stages is singular.
        scheduler=HeliosScheduler(stages=stages, gamma=0.25),
        **_NO_TEXT,
        **more,
    )


def _helios_call(samples: int) -> dict[str, Any]:
    chunks = {"num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1], "num_frames": 18}
    return prompts(samples) | chunks


def _pyramid_call(samples: int) -> dict[str, Any]:
    named = _helios_call(samples) | {
        "pyramid_num_inference_steps_list": [2, 1, 1],
        "height": 64,
        "width": 128,
        "num_frames": 9,
    }
    del named["num_inference_steps"]
    return named


def _any_flow(kind: Any, model: Any, **changed: Any) -> Any:
    return kind(
        vae=wan_autoencoder(),
        transformer=randomized(any_flow(6, model, **changed)),
        scheduler=FlowMapEulerDiscreteScheduler(),
        **_NO_TEXT,
    )


HERE = (
    Case(name="AllegroPipeline", build=_allegro, call=lambda samples: _video(samples) | {"negative_prompt": None}),
    Case(name="EasyAnimatePipeline", build=lambda: _easy(EasyAnimatePipeline), call=_video),
    Case(
        name="EasyAnimateInpaintPipeline",
        build=lambda: _easy(EasyAnimateInpaintPipeline, in_channels=9),
        call=lambda samples: (
            _video(samples)
            | {"video": noise(1, 3, 9, 48, 80, seed=5).clamp(0, 1), "mask_video": noise(1, 1, 9, 48, 80, seed=6).sign()}
        ),
        samples=1,
    ),
    Case(name="MotifVideoPipeline", build=lambda: _motif(MotifVideoPipeline), call=_motif_call, tolerance=_TOLERANCE),
    Case(
        name="MotifVideoPipeline + cross-attention",
        build=lambda: _motif(
            MotifVideoPipeline, enable_text_cross_attention_dual=True, enable_text_cross_attention_single=True
        ),
        call=_motif_call,
        tolerance=_TOLERANCE,
    ),
    Case(
        name="MotifVideoImage2VideoPipeline",
        build=lambda: _motif(MotifVideoImage2VideoPipeline),
        call=lambda samples: _motif_call(samples) | {"image": pictures(1)[0], "prompt": None},
        samples=1,
        tolerance=_TOLERANCE,
    ),
    Case(name="SanaVideoPipeline", build=lambda: _sana(SanaVideoPipeline), call=_sana_call, tolerance=1e-5),
    Case(
        name="SanaImageToVideoPipeline",
        build=lambda: _sana(SanaImageToVideoPipeline),
        call=lambda samples: _sana_call(samples) | {"image": pictures(1)[0]},
        samples=1,
        tolerance=1e-5,  # its linear attention is computed in float32
    ),
    Case(
        name="HeliosPipeline",
        build=lambda: _helios(HeliosPipeline, 1),
        call=_helios_call,
    ),
    Case(
        name="HeliosPyramidPipeline",
        build=lambda: _helios(HeliosPyramidPipeline, 3),
        call=_pyramid_call,
    ),
    Case(
        name="AnyFlowPipeline",
        build=lambda: _any_flow(AnyFlowPipeline, AnyFlowTransformer3DModel),
        call=lambda samples: prompts(samples) | {"num_frames": 9, "guidance_scale": 3.0},
    ),
    Case(
        name="AnyFlowFARPipeline",
        # Four chunks of a frame each, of which the last sees the first at half its resolution.
        build=lambda: _any_flow(
            AnyFlowFARPipeline, AnyFlowFARTransformer3DModel, chunk_partition=(1, 1, 1, 1), full_chunk_limit=2
        ),
        call=lambda samples: prompts(samples) | {"num_frames": 13, "guidance_scale": 3.0, "height": 64, "width": 96},
    ),
)
