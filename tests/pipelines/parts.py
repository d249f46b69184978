"""Parts that many tiny pipelines share: autoencoders, text encoders and tokenizers."""

from __future__ import annotations

from typing import Any

import numpy as np
from diffusers import AutoencoderKL, AutoencoderKLWan
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from tests.pipelines.case import randomized


def kl_autoencoder(**changed: Any) -> AutoencoderKL:
    """Eight times smaller latents of four channels."""
    blocks = 4
    settings = {
        "block_out_channels": (4,) * blocks,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
    }
    return randomized(AutoencoderKL(**settings | changed))


def wan_autoencoder(**changed: Any) -> AutoencoderKLWan:
    """Videos of four channels, eight times smaller, a frame for the first and one for every four after it."""
    settings = {
        "base_dim": 3,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return randomized(AutoencoderKLWan(**settings | changed))


def clip_vision(width: int = 32) -> CLIPVisionModel:
    """A vision tower that sees pictures as five tokens."""
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return randomized(CLIPVisionModel(config))


def clip_vision_processor() -> CLIPImageProcessor:
    """What prepares pictures for `clip_vision`."""
    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def pictures(count: int, height: int = 48, width: int = 80) -> list[Image.Image]:
    """Seeded noise as pictures."""
    noise = np.random.default_rng(7).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in noise]
