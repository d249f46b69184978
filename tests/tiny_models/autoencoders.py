"""Tiny random autoencoders that several files build."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan, AutoencoderOobleck

from tests.tiny_models.weights import randomized


def kl_settings(blocks: int = 4, **changed: Any) -> dict[str, Any]:
    """Settings of an autoencoder whose latents of four channels are smaller: by two for each block but the first."""
    settings = {
        "block_out_channels": (4,) * blocks,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
    }
    return settings | changed


def kl_autoencoder(**changed: Any) -> AutoencoderKL:
    """Eight times smaller latents of four channels."""
    return randomized(AutoencoderKL(**kl_settings(**changed)))


def flux2_autoencoder(**changed: Any) -> AutoencoderKLFlux2:
    """Eight times smaller latents of four channels, normed."""
    return randomized(AutoencoderKLFlux2(**kl_settings(**changed)))


def wan_settings(**changed: Any) -> dict[str, Any]:
    """Settings of an autoencoder of videos: eight times smaller, a frame for the first and one for every four more."""
    settings = {
        "base_dim": 3,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return settings | changed


def qwen_autoencoder(**changed: Any) -> AutoencoderKLQwenImage:
    """Eight times smaller latents of four channels, with one frame."""
    return randomized(AutoencoderKLQwenImage(**wan_settings(base_dim=4, **changed)))


def wan_autoencoder(**changed: Any) -> AutoencoderKLWan:
    """Videos of four channels, eight times smaller, a frame for the first and one for every four after it."""
    return randomized(AutoencoderKLWan(**wan_settings(**changed)))


def oobleck_autoencoder() -> AutoencoderOobleck:
    """Sound in two channels, as four numbers for every two moments."""
    return randomized(
        AutoencoderOobleck(
            encoder_hidden_size=8,
            downsampling_ratios=[1, 2],
            channel_multiples=[1, 2],
            decoder_channels=4,
            decoder_input_channels=4,
            audio_channels=2,
            sampling_rate=8,
        )
    )
