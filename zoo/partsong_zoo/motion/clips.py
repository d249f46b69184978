"""Runs the Wan autoencoder over whole clips at once, for training. Importing this module loads torch.

The stock class walks through a clip in chunks and keeps the last frames of every convolution. On a CPU that costs far
more than the convolutions themselves. A causal network does not need the walk: these two functions compute the same
numbers in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def encode_clip(vae: Any, video: Tensor) -> Tensor:
    """Computes what `vae.encode(video)` has as `latent_dist.parameters`.

    Args:
        vae: An AutoencoderKLWan with residual shortcuts and no patches.
        video: `[batch, 3, frames, height, width]` in [-1, 1], `frames` one more than a multiple of 4.

    Returns:
        Means and logarithms of variances, `[batch, 2 * channels, latents, height / 4, width / 4]`.
    """
    encoder = vae.encoder
    x = encoder.conv_in(video)
    for block in encoder.down_blocks:
        shortcut = block.avg_shortcut(x)
        for resnet in block.resnets:
            x = resnet(x)
        if block.downsampler is not None:
            x = block.downsampler(x)
            if block.downsampler.mode == "downsample3d":
                # The first frame stays alone; every later latent sees two frames and the one before them.
                x = torch.cat([x[:, :, :1], block.downsampler.time_conv(x)], dim=2)
        x = x + shortcut
    x = encoder.conv_out(F.silu(encoder.norm_out(encoder.mid_block(x))))
    return vae.quant_conv(x)


def decode_clip(vae: Any, latents: Tensor) -> Tensor:
    """Computes what `vae.decode(latents)` gives before it clamps to [-1, 1].

    Args:
        vae: An AutoencoderKLWan with residual shortcuts and no patches.
        latents: `[batch, channels, latents, height, width]`, unnormalised.

    Returns:
        `[batch, 3, frames, 4 * height, 4 * width]`.
    """
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        start = x
        for resnet in block.resnets:
            x = resnet(x)
        if (up := block.upsampler) is not None:
            x = up(_in_time(up, x) if up.mode == "upsample3d" else x)
            x = x + block.avg_shortcut(start, first_chunk=True)
    return decoder.conv_out(F.silu(decoder.norm_out(x)))


def _in_time(up: Any, x: Tensor) -> Tensor:
    """Doubles the frames; the first stays one, and the convolution over time never sees it."""
    if x.shape[2] == 1:
        return x
    pairs = up.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))
    later = pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
    return torch.cat([x[:, :, :1], later], dim=2)
