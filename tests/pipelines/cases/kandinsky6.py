"""Kandinsky 6, which makes videos with their sound, and its model that makes videos larger."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Kandinsky6SRPipeline,
    Kandinsky6SRTransformer3DModel,
    Kandinsky6SRVAE,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioVAE
from diffusers.models.autoencoders.mmaudio_vocoder import MMAudioVocoder

from tests.pipelines.case import Case
from tests.pipelines.video_parts import hunyuan_video_autoencoder
from tests.tiny_models.weights import noise, randomized


def _pipe(**changed: Any) -> Kandinsky6TI2VAPipeline:
    settings = {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 12,
        "in_text_dim2": 10,
        "time_dim": 8,
        "model_dim": 24,
        "ff_dim": 32,
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
        "axes_dims": (4, 2, 2),
        "in_audio_dim": 20,
        "out_audio_dim": 20,
    }
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return Kandinsky6TI2VAPipeline(
        transformer=randomized(Kandinsky6Transformer3DModel(**settings | changed), torch.float32),
        vae=hunyuan_video_autoencoder().float(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        audio_vae=MMAudioVAE(mel_bins=8, latent_channels=20, hidden_channels=8, layers_per_block=1).float(),
        vocoder=MMAudioVocoder(num_mels=8, upsample_initial_channel=64),
        **dict.fromkeys(names),
    )


def _call(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1, dtype=torch.float32),
        "pooled_prompt_embeds": noise(samples, 10, seed=3, dtype=torch.float32),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2, dtype=torch.float32),
        "negative_pooled_prompt_embeds": noise(samples, 10, seed=4, dtype=torch.float32),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
        "num_frames": 9,
    }


def _larger() -> Kandinsky6SRPipeline:
    transformer = Kandinsky6SRTransformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        time_dim=8,
        model_dim=24,
        ff_dim=32,
        num_visual_blocks=2,
        axes_dims=(4, 2, 2),
        nabla_threshold=0.4,
        nabla_window=(1, 1, 1),
        tile_sizes=((64, 64),),
    )
    vae = Kandinsky6SRVAE(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=1,
    )
    return Kandinsky6SRPipeline(
        transformer=randomized(transformer, torch.float32),
        vae=randomized(vae, torch.float32),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _small_video(samples: int) -> dict[str, Any]:
    """A video of three windows, of which two are made at a time."""
    return {
        "video": noise(samples, 5, 3, 32, 64, seed=5, dtype=torch.float32).sigmoid(),
        "resolution_scale": 2,
        "num_inference_steps": 2,
        "tiles_batch_size": 2,
        "output_type": "pt",
    }


HERE = (
    Case(name="Kandinsky6TI2VAPipeline", build=_pipe, call=_call, tolerance=1e-4),  # the model turns to float32
    Case(
        name="Kandinsky6TI2VAPipeline + places in both",
        build=lambda: _pipe(ca_rope=True, cross_gates=True),
        call=_call,
        tolerance=1e-4,
    ),
    Case(name="Kandinsky6SRPipeline", build=_larger, call=_small_video, samples=1, tolerance=1e-4),
)
