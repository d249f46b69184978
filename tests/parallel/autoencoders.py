"""Tiny random autoencoders of every supported class, and the pictures and latents to call them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    AutoencoderTiny,
)
from torch import Tensor

from tests.tiny_models.autoencoders import kl_settings
from tests.tiny_models.weights import KeepPrecision, randomized


def _kl(cls: type, **more: Any) -> Any:
    return cls(**kl_settings(3, block_out_channels=(4, 8, 8), **more))


def _attentive() -> AutoencoderKL:
    """With attention at the finer levels too."""
    return _kl(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
    )


def _deep(**more: Any) -> AutoencoderDC:
    settings = {
        "latent_channels": 4,
        "attention_head_dim": 4,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock", "EfficientViTBlock"),
        "encoder_block_out_channels": (8, 16, 16),
        "decoder_block_out_channels": (8, 16, 16),
        "encoder_layers_per_block": (1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1),
        "encoder_qkv_multiscales": ((), (5,), (5,)),
        "decoder_qkv_multiscales": ((), (5,), (5,)),
    }
    return AutoencoderDC(**settings | more)


def _tiny() -> AutoencoderTiny:
    blocks = {"encoder_block_out_channels": (4, 4, 4), "decoder_block_out_channels": (4, 4, 4)}
    return AutoencoderTiny(**blocks, num_encoder_blocks=(1, 1, 1), num_decoder_blocks=(1, 1, 1))


def _wan(**more: Any) -> AutoencoderKLWan:
    settings = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    return AutoencoderKLWan(**settings | {"temperal_downsample": [False, True]} | more)


def _wan22() -> AutoencoderKLWan:
    return _wan(is_residual=True, in_channels=12, out_channels=12, patch_size=2, decoder_base_dim=4)


def _qwen() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True]
    )


@dataclass(frozen=True)
class Vae:
    """How to build an autoencoder, and the sizes of the latents to decode and the pictures to encode."""

    build: Callable[[], Any]
    latents: tuple[tuple[int, int], ...]
    pictures: tuple[tuple[int, int], ...]
    frames: tuple[int, int] | None = None

    def make(self, dtype: torch.dtype) -> Any:
        vae = randomized(self.build(), torch.float32)
        if self.frames is not None:
            with torch.no_grad():  # these clamp their pictures; a clamped pixel would hide what is wrong with it
                vae.decoder.conv_out.weight *= 0.1
        return vae.to(dtype)

    def calls(self, vae: Any, batch: int) -> list[tuple[str, Tensor]]:
        """What to decode and encode, with the name of the method."""
        torch.manual_seed(5)
        found = []
        for name, sizes, channels in (("decode", self.latents, 4), ("encode", self.pictures, 3)):
            for size in sizes:
                middle = () if self.frames is None else (self.frames[name == "encode"],)
                found.append((name, torch.randn(batch, channels, *middle, *size).to(vae.dtype)))
        return found


def result(vae: Any, name: str, value: Tensor) -> Tensor:
    """What a method returns, as a tensor."""
    with torch.no_grad(), KeepPrecision():
        output = getattr(vae, name)(value, return_dict=False)[0]
    return output if isinstance(output, Tensor) else output.parameters


ODD, EVEN = ((7, 5), (9, 4)), ((33, 18), (28, 20))
VAES = {
    "KL": Vae(lambda: _kl(AutoencoderKL), ODD, EVEN),
    "KL plain": Vae(
        lambda: _kl(AutoencoderKL, mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False),
        ODD[:1],
        EVEN[:1],
    ),
    "KL with more attention": Vae(_attentive, ODD[:1], EVEN[:1]),
    "Flux2": Vae(lambda: _kl(AutoencoderKLFlux2, sample_size=32), ODD[:1], EVEN[:1]),
    "Tiny": Vae(_tiny, ODD, ((33, 18), (18, 20))),
    "DC": Vae(_deep, ((9, 6), (8, 5)), ((36, 24),)),
    "DC interpolating": Vae(
        lambda: _deep(upsample_block_type="interpolate", downsample_block_type="conv"), ((9, 6),), ((36, 24),)
    ),
    "QwenImage": Vae(_qwen, ODD, EVEN, (1, 1)),
    "Wan": Vae(_wan, ((7, 5),), ((33, 18),), (2, 5)),
    "Wan 2.2": Vae(_wan22, ((5, 4),), ((40, 16),), (2, 5)),
}
