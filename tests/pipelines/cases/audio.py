"""ACE-Step and LongCat-AudioDiT, whose texts need real encoders."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTVae,
)
from diffusers.pipelines.ace_step import AceStepConditionEncoder

from tests.parallel.video_families_2026 import longcat_audio
from tests.pipelines.case import Case
from tests.pipelines.video_parts import letters, qwen3_encoder, umt5_encoder
from tests.tiny_models.autoencoders import oobleck_autoencoder
from tests.tiny_models.weights import noise, randomized


def _ace_step() -> AceStepPipeline:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    transformer = AceStepTransformer1DModel(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        **heads,
        in_channels=12,
        audio_acoustic_hidden_dim=4,
        sliding_window=3,
        encoder_hidden_size=24,
    )
    encoder = AceStepConditionEncoder(
        hidden_size=24,
        intermediate_size=32,
        text_hidden_dim=12,
        timbre_hidden_dim=4,
        num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
        **heads,
    )
    return AceStepPipeline(
        vae=oobleck_autoencoder(),
        text_encoder=qwen3_encoder(),
        tokenizer=letters(),
        transformer=randomized(transformer),
        condition_encoder=randomized(encoder),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _ace_step_call(samples: int) -> dict[str, Any]:
    return {
        "prompt": ["drums and a voice", "a choir"][:samples],
        "lyrics": ["la la la", "la"][:samples],
        "audio_duration": 5.0,
        "max_text_length": 40,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "output_type": "latent",
    }


def _longcat() -> LongCatAudioDiTPipeline:
    vae = LongCatAudioDiTVae(
        channels=4, c_mults=[1, 1], strides=[2, 2], latent_dim=4, encoder_latent_dim=8, downsampling_ratio=4
    )
    return LongCatAudioDiTPipeline(
        vae=randomized(vae),
        text_encoder=umt5_encoder(),
        tokenizer=letters(),
        transformer=randomized(longcat_audio(6)),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _longcat_call(samples: int) -> dict[str, Any]:
    return {
        "prompt": ["rain on a roof", "wind"][:samples],
        "negative_prompt": ["noise"] * samples,
        "latents": noise(samples, 13, 4, seed=7),
        "num_inference_steps": 2,
        "output_type": "latent",
    }


HERE = (
    Case(name="AceStepPipeline", build=_ace_step, call=_ace_step_call, tolerance=1e-6),  # norms sum in float32
    Case(name="LongCatAudioDiTPipeline", build=_longcat, call=_longcat_call),
)
