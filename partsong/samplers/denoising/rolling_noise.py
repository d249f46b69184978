"""Makes an endless video from a model of a few frames, in a queue of frames, each noisier than the one before.

Every iteration makes one denoising step on all frames of the queue, takes the clean one off its head and adds one of
pure noise at its tail. The model sees windows of the queue that overlap by half, and only their noisier halves are
kept: each of these frames has seen equally many cleaner ones. The windows of an iteration are independent and form
one batch, so any strategy that splits samples or tokens speeds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from partsong.errors import ArgumentError

__all__ = ["flow_blend", "rolling_noise"]

#: Maps latents `[N, C, F, H, W]` and their noise levels `[N, F]` to an estimate of the clean latents.
Denoise = Callable[[Tensor, Tensor], Tensor]


def flow_blend(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Returns latents at noise level `sigma` of rectified flow, ``(1 - sigma) clean + sigma noise``."""
    return (1 - sigma) * clean + sigma * noise


def rolling_noise(
    denoise: Denoise,
    first: Tensor,
    sigmas: Tensor,
    noise: Callable[[int], Tensor],
    *,
    num_frames: int,
    window: int,
    blend: Callable[[Tensor, Tensor, Tensor], Tensor] = flow_blend,
) -> Iterator[Tensor]:
    """Samples a video frame by frame, in memory that does not depend on its length.

    The queue has a frame for every noise level. It begins with `first` at these levels, its last frame repeated, and
    each frame goes on by Euler steps, which are the same for rectified flow and for variance-exploding models:
    ``x + (sigma' - sigma) (x - x0) / sigma``.

    Args:
        denoise: estimates clean latents from latents `[N, C, window, H, W]` and noise levels `[N, window]`; N is the
            batch times the number of windows.
        first: the first frames `[B, C, F, H, W]`, clean, F at least 1; made by the model's usual sampling.
        sigmas: noise levels `[Q]`, rising, all above 0; Q must be a multiple of half the window.
        noise: maps a frame number to its noise `[B, C, 1, H, W]`; numbers count from 0 and continue beyond
            `num_frames`.
        num_frames: frames to make.
        window: frames that the model sees at once, even.
        blend: maps clean latents, noise and level to noisy latents.

    Yields:
        Clean frames `[B, C, 1, H, W]`, the first of them made again from `first`.

    Raises:
        ArgumentError: the levels do not rise from above 0, the window is odd, or half of it does not divide them.

    Source: FIFO-Diffusion with lookahead denoising, arXiv 2405.11473.

    Example:
        >>> frames = rolling_noise(
        ...     lambda x, sigma: torch.zeros_like(x),
        ...     torch.zeros(1, 1, 2, 1, 1),
        ...     torch.linspace(0.25, 1, 4),
        ...     lambda frame: torch.ones(1, 1, 1, 1, 1),
        ...     num_frames=3,
        ...     window=4,
        ... )
        >>> [frame.item() for frame in frames]
        [0.0, 0.0, 0.0]
    """
    half = _check(first, sigmas, num_frames, window)

    def frames() -> Iterator[Tensor]:
        levels = sigmas.to(first)
        clean = [first[:, :, min(i, first.shape[2] - 1)][:, :, None] for i in range(len(levels))]
        queue = torch.cat([blend(frame, noise(i), levels[i]) for i, frame in enumerate(clean)], dim=2)
        # The last clean frames precede the queue, for its head to look back at.
        seen = first[:, :, :1].expand(-1, -1, half, -1, -1)
        steps = levels - torch.cat([levels.new_zeros(1), levels[:-1]])
        for number in range(num_frames):
            row = torch.cat([seen, queue], dim=2)
            estimates = _estimates(denoise, row, torch.cat([levels.new_zeros(half), levels]), half)
            queue = queue - (steps / levels).view(1, 1, -1, 1, 1) * (queue - estimates)
            head, queue = queue[:, :, :1], queue[:, :, 1:]
            yield head
            seen = torch.cat([seen[:, :, 1:], head], dim=2)
            fresh = blend(torch.zeros_like(head), noise(number + len(levels)), levels[-1])
            queue = torch.cat([queue, fresh], dim=2)

    return frames()


def _check(first: Tensor, sigmas: Tensor, num_frames: int, window: int) -> int:
    if window < 2 or window % 2:
        raise ArgumentError(f"window={window}; use an even number of frames, the kept half sees the other one")
    half = window // 2
    if sigmas.ndim != 1 or len(sigmas) == 0 or len(sigmas) % half:
        raise ArgumentError(f"{len(sigmas)} noise levels for a window of {window} frames; use a multiple of {half}")
    if not bool((sigmas > 0).all()) or not bool((sigmas.diff() > 0).all()):
        raise ArgumentError("sigmas must rise from above 0: the head of the queue is the cleanest frame")
    if first.ndim != 5 or first.shape[2] < 1:
        raise ArgumentError(f"first has shape {list(first.shape)}; give clean frames [B, C, F, H, W], at least one")
    if num_frames < 1:
        raise ArgumentError(f"num_frames={num_frames}; use 1 or more")
    return half


def _estimates(denoise: Denoise, row: Tensor, levels: Tensor, half: int) -> Tensor:
    """Returns clean estimates of all frames after the first `half`, each seen from the noisier half of a window."""
    starts = range(0, row.shape[2] - half, half)
    windows = torch.cat([row[:, :, start : start + 2 * half] for start in starts])
    sigma = torch.cat([levels[start : start + 2 * half].expand(len(row), -1) for start in starts])
    kept = denoise(windows, sigma)[:, :, half:]
    return torch.cat(kept.chunk(len(starts)), dim=2)
