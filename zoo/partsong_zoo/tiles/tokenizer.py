"""Turns pictures into tokens and back: a grid of 8 x 8 tokens, each a point of a small lattice.

Finite scalar quantization, arXiv 2309.15505: every channel of a token is rounded to one of a few levels, and all
combinations of levels are the codes. Nothing is learned about the codes, so none can die. The model is a stock
`VQModel` of diffusers: its nearest code *is* the rounded one, because its codebook is the lattice. It sees a picture
of 64 x 64 as 16 x 16 blocks of 4 x 4 pixels. Importing this module loads torch.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import VQModel
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle, relu

__all__ = ["GRID", "LEVELS", "NUM_CODES", "build_tokenizer", "decode", "encode", "rounded", "tokenizer_loss"]

#: Tokens along a side of a picture.
GRID = 8
#: Levels of each channel of a token, all odd: from -2 to 2.
LEVELS = (5, 5, 5, 5)
NUM_CODES = 625
_BLOCK = 4


def lattice() -> Tensor:
    """Lists the points of all codes, `[625, 4]`: the number of a code in base 5, first digit first, each less 2."""
    digits = [torch.arange(levels) - levels // 2 for levels in LEVELS]
    return torch.cartesian_prod(*digits).float()


def build_tokenizer(widths: tuple[int, int] = (48, 96), layers: int = 1) -> Any:
    """Builds a stock `VQModel` of random weights whose codebook is the lattice.

    Args:
        widths: channels at 16 x 16 and at 8 x 8.
        layers: blocks at each size.
    """
    # The signature names tuples of one, but any length works.
    down: Any = ("DownEncoderBlock2D",) * 2
    up: Any = ("UpDecoderBlock2D",) * 2
    model = VQModel(
        in_channels=3 * _BLOCK**2,
        out_channels=3 * _BLOCK**2,
        down_block_types=down,
        up_block_types=up,
        block_out_channels=widths,  # pyright: ignore[reportArgumentType]
        layers_per_block=layers,
        latent_channels=len(LEVELS),
        vq_embed_dim=len(LEVELS),
        num_vq_embeddings=NUM_CODES,
        norm_num_groups=8,
        sample_size=16,
        lookup_from_codebook=True,
    )
    model.quantize.embedding.weight.data.copy_(lattice())
    model.quantize.embedding.requires_grad_(False)
    return model


def rounded(latents: Tensor) -> Tensor:
    """Rounds every channel to its nearest level, with the gradient of the identity."""
    return latents + (latents.detach().clamp(-2.0, 2.0).round() - latents.detach())


def tokenizer_loss(model: Any, images: Tensor) -> tuple[Tensor, float]:
    """Computes the loss of reconstruction, and the mean square error for the log.

    Args:
        model: of `build_tokenizer`.
        images: `[B, 3, 64, 64]` in [-1, 1].
    """
    latents = model.quant_conv(model.encoder(pixel_unshuffle(images, _BLOCK))).float()
    again = model.decoder(model.post_quant_conv(rounded(latents)))
    error = pixel_shuffle(again.float(), _BLOCK) - images
    mse = error.square().mean()
    # Beyond the last level rounding has no effect, so latents are pulled back to it.
    outside = relu(latents.abs() - 2.0).square().mean()
    return error.abs().mean() + 2.0 * mse + 0.1 * outside, float(mse.detach())


@torch.no_grad()
def encode(model: Any, images: Tensor) -> Tensor:
    """Returns the codes of pictures, int64 `[B, 64]`, row after row.

    Args:
        model: a `VQModel` of `build_tokenizer`.
        images: `[B, 3, 64, 64]` in [-1, 1].
    """
    latents = model.encode(pixel_unshuffle(images, _BLOCK)).latents
    codes = torch.zeros_like(latents[:, 0], dtype=torch.int64)
    for channel, levels in enumerate(LEVELS):
        codes = codes * levels + latents[:, channel].clamp(-2.0, 2.0).round().long() + levels // 2
    return codes.flatten(1)


@torch.no_grad()
def decode(model: Any, codes: Tensor) -> Tensor:
    """Returns pictures `[B, 3, 64, 64]` in [-1, 1] from codes, int64 `[B, 64]`."""
    shape = (len(codes), GRID, GRID, len(LEVELS))
    blocks = model.decode(codes.flatten(), force_not_quantize=True, shape=shape).sample
    return pixel_shuffle(blocks, _BLOCK)
