"""Makes the arguments of a denoiser's call for a size, as tensors that have shapes and no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CALLS", "Call", "Config", "Size"]


#: The configuration of a denoiser, with the defaults of its class.
Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Describes what one call of a denoiser makes.

    Attributes:
        height: in pixels.
        width: in pixels.
        frames: of a video; 1 for a picture.
        batch: samples of the call, those of guidance included.
        dtype: of its numbers.
    """

    height: int
    width: int
    frames: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def pixels(self) -> int:
        """Returns the pixels of all frames of one sample."""
        return self.height * self.width * self.frames

    def latent(self, downscale: int = 8, step: int = 4) -> tuple[int, int, int]:
        """Returns frames, rows and columns of latents; each but the first latent frame stands for `step` frames."""
        return (self.frames - 1) // step + 1, self.height // downscale, self.width // downscale

    def real(self, *shape: int) -> Tensor:
        """Returns numbers for every sample."""
        return torch.empty((self.batch, *shape), dtype=self.dtype, device="meta")


#: Makes the arguments of a call for a size.
Call = Callable[[Size, Config], dict[str, Any]]


def _whole(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _single(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _sd(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of Stable Diffusion 1.5."""
    _, rows, columns = size.latent()
    return {
        "sample": size.real(config["in_channels"], rows, columns),
        "timestep": _single(),
        "encoder_hidden_states": size.real(77, config["cross_attention_dim"]),
    }


def _sdxl(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of Stable Diffusion XL."""
    _, rows, columns = size.latent()
    return {
        "sample": size.real(config["in_channels"], rows, columns),
        "timestep": _single(),
        "encoder_hidden_states": size.real(77, config["cross_attention_dim"]),
        "added_cond_kwargs": {"text_embeds": size.real(1280), "time_ids": size.real(6)},
    }


def _pixart(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of PixArt-Sigma."""
    _, rows, columns = size.latent()
    return {
        "hidden_states": size.real(config["in_channels"], rows, columns),
        "encoder_hidden_states": size.real(300, config["caption_channels"]),
        "encoder_attention_mask": _whole(size.batch, 300),
        "timestep": _whole(size.batch),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _sd3(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of Stable Diffusion 3 or 3.5."""
    _, rows, columns = size.latent()
    return {
        "hidden_states": size.real(config["in_channels"], rows, columns),
        "encoder_hidden_states": size.real(77 + 256, config["joint_attention_dim"]),
        "pooled_projections": size.real(config["pooled_projection_dim"]),
        "timestep": size.real(),
    }


def _sana(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of Sana."""
    _, rows, columns = size.latent(32)
    return {
        "hidden_states": size.real(config["in_channels"], rows, columns),
        "encoder_hidden_states": size.real(300, config["caption_channels"]),
        "encoder_attention_mask": _whole(size.batch, 300),
        "timestep": _whole(size.batch),
    }


def _packed(size: Size, config: Config, text: int, ids: int) -> dict[str, Any]:
    _, rows, columns = size.latent(16)
    tokens = rows * columns
    return {
        "hidden_states": size.real(tokens, config["in_channels"]),
        "encoder_hidden_states": size.real(text, config["joint_attention_dim"]),
        "timestep": size.real(),
        "img_ids": torch.empty(tokens, ids, dtype=size.dtype, device="meta"),
        "txt_ids": torch.empty(text, ids, dtype=size.dtype, device="meta"),
    }


def _flux(text: int) -> Call:
    """Returns what makes a call of FLUX.1 with a number of text tokens."""

    def call(size: Size, config: Config) -> dict[str, Any]:
        more = {"guidance": size.real()} if config["guidance_embeds"] else {}
        return (
            _packed(size, config, text, 3) | {"pooled_projections": size.real(config["pooled_projection_dim"])} | more
        )

    return call


def _flux2(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of FLUX.2."""
    return _packed(size, config, 512, 4) | {"guidance": size.real()}


def _qwen(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of Qwen-Image with a prompt of 100 tokens."""
    _, rows, columns = size.latent(16)
    return {
        "hidden_states": size.real(rows * columns, config["in_channels"]),
        "encoder_hidden_states": size.real(100, config["joint_attention_dim"]),
        "encoder_hidden_states_mask": _whole(size.batch, 100),
        "timestep": size.real(),
        "img_shapes": [[(1, rows, columns)]] * size.batch,
    }


def _z_image(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of Z-Image with a prompt of 100 tokens."""
    _, rows, columns = size.latent()
    one = Size(height=size.height, width=size.width, dtype=size.dtype)
    return {
        "x": [one.real(1, rows, columns).expand(config["in_channels"], -1, -1, -1) for _ in range(size.batch)],
        "t": size.real(),
        "cap_feats": [one.real(config["cap_feat_dim"]).expand(100, -1) for _ in range(size.batch)],
    }


def _wan(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of Wan 2.1."""
    return {
        "hidden_states": size.real(config["in_channels"], *size.latent()),
        "timestep": _whole(size.batch),
        "encoder_hidden_states": size.real(512, config["text_dim"]),
    }


def _hunyuan_video(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of HunyuanVideo, whose prompt fills all 256 tokens."""
    return {
        "hidden_states": size.real(config["in_channels"], *size.latent()),
        "timestep": _whole(size.batch),
        "encoder_hidden_states": size.real(256, config["text_embed_dim"]),
        "encoder_attention_mask": torch.ones(size.batch, 256, dtype=torch.bool),
        "pooled_projections": size.real(config["pooled_projection_dim"]),
        "guidance": size.real(),
    }


def _cogvideox(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of CogVideoX."""
    frames, rows, columns = size.latent()
    tokens = frames * (rows // 2) * (columns // 2)
    return {
        "hidden_states": size.real(frames, config["in_channels"], rows, columns),
        "encoder_hidden_states": size.real(226, config["text_embed_dim"]),
        "timestep": _whole(size.batch),
        "image_rotary_emb": (_single(tokens, 64), _single(tokens, 64)),
    }


def _ltx(size: Size, config: Config) -> dict[str, Any]:
    """Makes a call of LTX-Video."""
    frames, rows, columns = size.latent(32, 8)
    return {
        "hidden_states": size.real(frames * rows * columns, config["in_channels"]),
        "encoder_hidden_states": size.real(256, config["caption_channels"]),
        "encoder_attention_mask": _whole(size.batch, 256),
        "timestep": size.real(),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


#: What makes the calls of a published model, by the name that its row gives.
CALLS: Mapping[str, Call] = {
    "sd": _sd,
    "sdxl": _sdxl,
    "pixart": _pixart,
    "sd3": _sd3,
    "sana": _sana,
    "flux": _flux(512),
    "flux-schnell": _flux(256),
    "flux2": _flux2,
    "qwen": _qwen,
    "z-image": _z_image,
    "cogvideox": _cogvideox,
    "ltx": _ltx,
    "wan": _wan,
    "hunyuan-video": _hunyuan_video,
}
