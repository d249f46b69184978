"""Turns PNG files into ComfyUI's tensors and back."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image, ImageChops

__all__ = ["decode", "encode", "encode_mask", "stack", "unpack"]


def decode(content: bytes) -> Image.Image:
    """Returns a PNG as an RGB picture."""
    with Image.open(io.BytesIO(content)) as picture:
        return picture.convert("RGB")


def unpack(text: str) -> bytes:
    """Returns the file that base64 text stands for."""
    return base64.b64decode(text, validate=True)


def stack(contents: list[bytes]) -> torch.Tensor:
    """Returns PNG files of one size as `[B, H, W, 3]` in 0..1."""
    arrays = [np.asarray(decode(content), dtype=np.float32) / 255.0 for content in contents]
    return torch.from_numpy(np.stack(arrays))


def encode(image: torch.Tensor) -> bytes:
    """Returns the first picture of `[B, H, W, C]` in 0..1 as a PNG."""
    return _png(Image.fromarray(_levels(image[0, :, :, :3])))


def encode_mask(mask: torch.Tensor, size: tuple[int, int]) -> bytes:
    """Returns a mask as a PNG that is white and transparent where the picture is made anew, and black elsewhere.

    The colour is what diffusers reads and the transparency what clients of the OpenAI API send, so both agree.

    Args:
        mask: `[B, H, W]` or `[H, W]`, 1 where the picture is made anew. The first is taken.
        size: width and height of the picture, to which the mask is brought.
    """
    first = mask[0] if mask.ndim == 3 else mask
    anew = Image.fromarray(_levels(first)).resize(size, Image.Resampling.BILINEAR)
    picture = anew.convert("RGB")
    picture.putalpha(ImageChops.invert(anew))
    return _png(picture)


def _levels(values: torch.Tensor) -> np.ndarray:
    return (values.detach().cpu().float().clamp(0, 1).numpy() * 255.0).round().astype(np.uint8)


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
