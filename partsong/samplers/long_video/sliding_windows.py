"""Makes a long video from a model of short ones: overlapping windows, averaged in every step, in one process.

This is the serial method for long videos, to which clip and block strategies are compared: the pipeline's own loop
covers all frames, and each call of its denoiser is answered by windows as long as the model's training videos.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.adapters import ADAPTERS, Frames
from partsong.parallel.hooks.arguments import AsCalled
from partsong.parallel.hooks.model_hooks import as_called
from partsong.samplers.long_video.frame_rotary import FrameRotary
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped

__all__ = ["sliding_windows"]


def sliding_windows(pipe: Any, *, window: int = 16, stride: int = 8, **arguments: Any) -> Any:
    """Samples a video that is longer than the model's training videos, and returns the pipeline's output.

    Where windows overlap their predictions are averaged, with weights that fall towards a window's ends.

    Args:
        pipe: a video pipeline whose model counts frames relatively; strategies on it work on each window.
        window: latent frames of a window, those of a training video.
        stride: latent frames from one window to the next, at most `window`; the last window ends with the video.
        **arguments: the pipeline's own.

    Raises:
        ArgumentError: the stride is longer than the window, or less than one frame.
        UnsupportedError: the pipeline has another model, or two.

    Source: MultiDiffusion, arXiv 2302.08113, along time; weights as in FreeNoise, arXiv 2310.15169.

    Example:
        >>> # video = sliding_windows(pipe, window=16, stride=8, prompt="a red circle moves right", num_frames=161)
    """
    if not 1 <= stride <= window:
        raise ArgumentError(f"window={window}, stride={stride}; windows must overlap or touch: 1 <= stride <= window")
    name, dim = _denoiser(pipe)
    module = getattr(pipe, name)
    FrameRotary(module, ADAPTERS[type(module).__name__])  # refuses a model without relative positions
    with PausedCall(pipe, name, arguments) as call, torch.no_grad():
        event = call.send()
        while not isinstance(event, Finished):
            if isinstance(event, Denoise):
                event = call.send(_answer(as_called(module, event.positions), event.arguments, dim, window, stride))
            else:
                assert isinstance(event, Stepped)
                event = call.send(event.latents)
        call.hand_back_random_state()
        return event.output


def _windowed(module: Any) -> Frames | None:
    """Returns the position of a model's frames if it can be called on any run of them; None otherwise."""
    row = ADAPTERS.get(type(module).__name__)
    frames = None if row is None else row.frames
    # Positions of frames that are given in the call would have to be given for every window.
    movable = frames is not None and frames.turns is not None and frames.argument is None and frames.positions is None
    return frames if movable else None


def _denoiser(pipe: Any) -> tuple[str, int]:
    """Returns the name of the pipeline's one denoiser, and the dim of frames in its latents."""
    denoisers = {name: frames for name, part in pipe.components.items() if (frames := _windowed(part)) is not None}
    if len(denoisers) != 1:
        raise UnsupportedError(
            f"{type(pipe).__name__} holds {len(denoisers)} denoisers whose frames can be cut into windows; use a "
            "pipeline with one, such as WanPipeline or SkyReelsV2Pipeline"
        )
    ((name, frames),) = denoisers.items()
    return name, frames.dim


def _answer(model: AsCalled, arguments: dict[str, Any], dim: int, window: int, stride: int) -> tuple[Tensor]:
    latents: Tensor = arguments["hidden_states"]
    total = latents.shape[dim]
    if total <= window:
        return model(**{**arguments, "return_dict": False})
    last = total - window
    sums = torch.zeros_like(latents, dtype=torch.promote_types(latents.dtype, torch.float32))
    weights = sums.new_zeros(total)
    shape = [1] * dim + [-1] + [1] * (latents.ndim - dim - 1)
    place = torch.arange(1, window + 1, device=latents.device)
    weight = torch.minimum(place, window + 1 - place).to(sums)
    for start in sorted({*range(0, last, stride), last}):
        part = latents.narrow(dim, start, window)
        seen = model(**{**arguments, "hidden_states": part, "return_dict": False})[0]
        sums.narrow(dim, start, window).add_(seen * weight.view(shape))
        weights[start : start + window] += weight
    return ((sums / weights.view(shape)).to(latents.dtype),)
