"""Parts that many tiny pipelines share: autoencoders, text encoders and tokenizers."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL

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
