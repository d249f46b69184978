"""Reads from a pipeline at hand what the planner must know."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partsong.errors import UnsupportedError
from partsong.model_folders import DENOISERS
from partsong.parallel.plan.dry_run import DryRun
from partsong.planner.calls import Size
from partsong.planner.subject import Autoencoder, Encoder, Subject
from partsong.samplers.long_video.frame_counts import temporal_factor
from partsong.samplers.pipeline.paused import Denoise, PausedCall

__all__ = ["default_sizes", "downscale_of", "subject_of"]


def subject_of(pipe: Any, **arguments: Any) -> Subject:
    """Reads from a pipeline what the planner must know: begins a call of it and breaks it off after the first step.

    The text encoders run; the denoiser does not.

    Args:
        pipe: a diffusers pipeline.
        **arguments: of its call, such as ``prompt``, ``guidance_scale`` and sizes.

    Raises:
        UnsupportedError: it has no denoiser, or its call never reaches it.
    """
    part = next((name for name in DENOISERS if isinstance(getattr(pipe, name, None), nn.Module)), None)
    if part is None:
        raise UnsupportedError(f"{type(pipe).__name__} has no denoiser to plan for")
    first = _PipelineCalls(pipe, part, arguments)
    calls = first.of({})
    denoiser: nn.Module = getattr(pipe, part)
    dtype = next(denoiser.parameters()).dtype
    height, width, frames = (arguments.get(name, default) for name, default in default_sizes(pipe).items())
    samples = max((len(leaf) for leaf in tree_leaves(calls[0]) if isinstance(leaf, Tensor) and leaf.ndim), default=1)
    coder = getattr(pipe, "vae", None)
    clip = 3 if frames > 1 else None
    return Subject(
        name=type(pipe).__name__,
        build=lambda: denoiser,
        call=first.call,
        steps=arguments.get("num_inference_steps", 50),
        height=height,
        width=width,
        frames=frames,
        multiple=first.downscale,
        branches=samples if len(calls) == 1 else len(calls),
        joined=len(calls) == 1,
        frame_multiple=temporal_factor(pipe) or 1,
        coder=None if coder is None else Autoencoder(lambda: coder, _channels(coder), clip),
        encoders=_encoders(pipe),
        dtype=dtype,
    )


def default_sizes(pipe: Any) -> dict[str, int]:
    """Returns the height, width and num_frames that a pipeline makes where nothing else is asked."""
    side = getattr(pipe, "default_sample_size", 64) * downscale_of(pipe)
    takes = inspect.signature(pipe.__call__).parameters
    known = {name: takes[name].default for name in ("height", "width", "num_frames") if name in takes}
    return {
        "height": known.get("height") or side,
        "width": known.get("width") or side,
        "num_frames": known.get("num_frames") or 1,
    }


def downscale_of(pipe: Any) -> int:
    """Returns the pixels of a row or column for each one of the latents."""
    names = ("vae_scale_factor_spatial", "vae_scale_factor")
    return next((int(scale) for name in names if (scale := getattr(pipe, name, None))), 8)


def _channels(coder: nn.Module) -> int:
    """Returns the channels of an autoencoder's latents, which those of Wan and its kin call z_dim."""
    settings: Mapping[str, Any] = coder.config  # type: ignore[assignment]
    return int(settings.get("latent_channels") or settings["z_dim"])


class _PipelineCalls:
    """Makes the arguments of a pipeline's denoiser calls for any size, by beginning the pipeline's own call."""

    def __init__(self, pipe: Any, part: str, arguments: Mapping[str, Any]) -> None:
        self.pipe, self.part, self.arguments = pipe, part, {"prompt": "a", **arguments}
        self._seen: dict[Size, dict[str, Any]] = {}
        self.downscale = downscale_of(pipe)

    def call(self, size: Size) -> dict[str, Any]:
        """Returns the arguments of the first call of a step."""
        if size in self._seen:
            return self._seen[size]
        takes = inspect.signature(self.pipe.__call__).parameters
        asked = {"height": size.height, "width": size.width, "num_frames": size.frames}
        self._seen[size] = self.of({name: value for name, value in asked.items() if name in takes})[0]
        return self._seen[size]

    def of(self, more: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the arguments of all calls of the first step."""
        denoiser, calls = getattr(self.pipe, self.part), []
        with PausedCall(self.pipe, self.part, {**self.arguments, **more}, decodes=False) as call, torch.no_grad():
            event = call.send()
            while isinstance(event, Denoise):
                calls.append(event.arguments)
                event = call.send(_zeros(denoiser, event.arguments))
        if not calls:
            raise UnsupportedError(f"{type(self.pipe).__name__} never calls its {self.part}")
        return calls


def _zeros(denoiser: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Returns what a denoiser returns, with zeros for all numbers."""
    device = next(denoiser.parameters()).device
    with DryRun(denoiser, [], 1, arguments) as run:
        return tree_map(
            lambda leaf: torch.zeros_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf, run.call()
        )


def _encoders(pipe: Any) -> tuple[Encoder, ...]:
    encoders: list[Encoder] = []
    for name, part in pipe.components.items():
        if name.startswith("text_encoder") and isinstance(part, nn.Module):
            tokenizer = getattr(pipe, name.replace("text_encoder", "tokenizer"), None)
            tokens = min(512, getattr(tokenizer, "model_max_length", 512))
            encoders += [Encoder(name=name, parameters=sum(w.numel() for w in part.parameters()), tokens=tokens)]
    return tuple(encoders)
