"""Counts frames: video frames per latent frame, and how many a pipeline must make to have enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partsong.errors import ArgumentError
from partsong.samplers.long_video.causal_block import causal_block

__all__ = ["check_whole_blocks", "frames_to_sample", "temporal_factor"]

#: Names of pipelines' attributes with the number of video frames per latent frame.
_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")


def temporal_factor(pipe: Any) -> int | None:
    """Returns how many frames of video a latent frame after the first stands for; None without time compression."""
    return next((int(getattr(pipe, name)) for name in _FACTORS if hasattr(pipe, name)), None)


def frames_to_sample(pipe: Any, frames: int, *, in_blocks: bool) -> int:
    """Returns the smallest number of frames, `frames` or more, that a pipeline can make.

    Args:
        pipe: a video pipeline of diffusers. Its autoencoder makes one frame from the first latent frame, and `factor`
            frames from each further one.
        frames: how many are wanted.
        in_blocks: whether a causal model makes whole blocks of latent frames, as with `TimestepPipeline`.

    >>> frames_to_sample(None, 96, in_blocks=False)
    96
    """
    factor = temporal_factor(pipe) or 1
    block = causal_block(pipe.transformer) if in_blocks and hasattr(pipe, "transformer") else 0
    latent = -(-(frames - 1) // factor) + 1
    latent = -(-latent // (block or 1)) * (block or 1)
    return (latent - 1) * factor + 1


def check_whole_blocks(sizes: Sequence[int], frames: int, factor: int) -> None:
    """Refuses a video that is not made of a causal model's whole blocks.

    Args:
        sizes: latent frames of its blocks.
        frames: of the model's blocks.
        factor: frames of video that a latent frame stands for.

    Raises:
        ArgumentError: names the nearest numbers of frames that are.

    >>> check_whole_blocks((2, 2, 2), 2, 4)
    """
    if sizes[-1] != frames:
        low = (len(sizes) - 1) * frames
        legal = [(count - 1) * factor + 1 for count in (low, low + frames) if count]
        raise ArgumentError(
            f"num_frames={(sum(sizes) - 1) * factor + 1} is {sum(sizes)} latent frames, but the model works in blocks "
            f"of {frames}; use {' or '.join(map(str, legal))}"
        )
