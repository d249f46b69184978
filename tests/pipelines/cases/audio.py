"""ACE-Step and LongCat-AudioDiT, whose texts need real encoders."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    AutoencoderOobleck,
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
)
from diffusers.pipelines.ace_step import AceStepConditionEncoder

from tests.pipelines.case import Case, noise, randomized
from tests.pipelines.video_parts import letters, qwen3_encoder, umt5_encoder


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
    vae = AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[1, 2],
        channel_multiples=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        audio_channels=2,
        sampling_rate=8,
    )
    return AceStepPipeline(
        vae=randomized(vae),
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
    transformer = LongCatAudioDiTTransformer(
        dit_dim=24, dit_depth=2, dit_heads=3, dit_text_dim=12, latent_dim=4, ff_mult=2.0
    )
    vae = LongCatAudioDiTVae(
        channels=4, c_mults=[1, 1], strides=[2, 2], latent_dim=4, encoder_latent_dim=8, downsampling_ratio=4
    )
    return LongCatAudioDiTPipeline(
        vae=randomized(vae),
        text_encoder=umt5_encoder(),
        tokenizer=letters(),
        transformer=randomized(transformer),
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
