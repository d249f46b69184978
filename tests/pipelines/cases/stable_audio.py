"""Stable Audio and Stable Audio 3."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderSAME,
    EDMDPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableAudio3AudioToAudioPipeline,
    StableAudio3InpaintPipeline,
    StableAudio3Pipeline,
    StableAudioPipeline,
)
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

from tests.parallel.video_families_2026 import stable_audio, stable_audio_3
from tests.pipelines.case import Case
from tests.pipelines.video_parts import kept
from tests.tiny_models.autoencoders import oobleck_autoencoder
from tests.tiny_models.weights import noise, randomized


def _stable_audio() -> StableAudioPipeline:
    projection = StableAudioProjectionModel(text_encoder_dim=12, conditioning_dim=12, min_value=0, max_value=32)
    return StableAudioPipeline(
        vae=oobleck_autoencoder(),
        text_encoder=None,
        projection_model=randomized(projection),
        tokenizer=None,
        transformer=randomized(stable_audio(9, sample_size=9)),
        scheduler=EDMDPMSolverMultistepScheduler(solver_order=2, prediction_type="v_prediction", sigma_data=1.0),
    )


def _call(samples: int) -> dict[str, Any]:
    mask = torch.ones(samples, 7, dtype=torch.int64)
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "attention_mask": mask,
        "negative_attention_mask": mask,
        "num_inference_steps": 2,
        "output_type": "latent",
        "audio_end_in_s": 2.0,
    }


def _third(kind: Any, **changed: Any) -> Any:
    vae = AutoencoderSAME(
        audio_channels=2,
        patch_size=4,
        encoder_channels=8,
        encoder_c_mults=(1,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=4,
        dim_heads=8,
        sampling_rate=48,
    )
    embedder = StableAudio3DurationEmbedder(output_dim=12, fourier_dim=8)
    return kind(
        vae=randomized(vae),
        text_encoder=None,
        tokenizer=None,
        duration_embedder=randomized(embedder),
        transformer=randomized(stable_audio_3(6, **changed)),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _third_call(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "encoder_attention_mask": kept(samples),
        "num_inference_steps": 2,
        "output_type": "latent",
        "duration": 2.0,
    }


def _guided(samples: int) -> dict[str, Any]:
    unwanted = {"negative_prompt_embeds": noise(samples, 7, 12, seed=2), "guidance_scale": 3.0}
    return _third_call(samples) | unwanted | {"negative_encoder_attention_mask": kept(samples)}


HERE = (
    Case(name="StableAudioPipeline", build=_stable_audio, call=_call),
    Case(name="StableAudio3Pipeline", build=lambda: _third(StableAudio3Pipeline), call=_guided),
    Case(
        name="StableAudio3Pipeline + plain attention",
        build=lambda: _third(StableAudio3Pipeline, use_differential_attention=False),
        call=_guided,
    ),
    Case(
        name="StableAudio3AudioToAudioPipeline",
        build=lambda: _third(StableAudio3AudioToAudioPipeline),
        call=lambda samples: _third_call(samples) | {"audio": noise(1, 2, 96, seed=5)},
        samples=1,
    ),
    Case(
        name="StableAudio3InpaintPipeline",
        build=lambda: _third(StableAudio3InpaintPipeline),
        call=lambda samples: (
            _third_call(samples)
            | {"audio": noise(1, 2, 96, seed=5), "mask_start_seconds": 0.5, "mask_end_seconds": 1.0}
        ),
        samples=1,
    ),
)
