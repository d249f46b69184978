"""Brings what the planner must know of a model together, for one known by name and for a pipeline at hand."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partsong.errors import ArgumentError, UnsupportedError
from partsong.model_folders import DENOISERS, read_settings, text_encoders
from partsong.parallel.plan.dry_run import DryRun
from partsong.planner.calls import Size
from partsong.planner.decoding import DecoderCost, decoding_of
from partsong.planner.models import MODELS, Encoder, ModelRow, model_named
from partsong.samplers.pipeline.paused import Denoise, PausedCall

__all__ = ["Subject", "default_sizes", "downscale_of", "subject_in", "subject_named", "subject_of"]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Describes the model that a plan is made for.

    Attributes:
        name: what answers call it.
        denoiser: the shapes of its weights are used only.
        call: makes the arguments of one call for a size, without values.
        steps: of a generation where nothing else is asked.
        height: pixels where nothing else is asked.
        width: pixels where nothing else is asked.
        frames: of a video; 1 for pictures.
        multiple: pixels of which height and width are multiples.
        frame_multiple: a video has a multiple of so many frames, and one more.
        branches: samples of a step that guidance asks for.
        joined: whether the branches are one call.
        decoding: what decoding takes; None where there is no autoencoder.
        encoders: its text encoders.
        dtype: of weights and latents.
        uniform: whether it is known that one block may stand for its equals; otherwise the planner finds out.
    """

    name: str
    denoiser: nn.Module
    call: Callable[[Size], dict[str, Any]]
    steps: int
    height: int
    width: int
    frames: int = 1
    multiple: int = 8
    frame_multiple: int = 1
    branches: int = 1
    joined: bool = True
    decoding: DecoderCost | None = None
    encoders: tuple[Encoder, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    uniform: bool = False

    def check(self, height: int, width: int, frames: int) -> None:
        """Refuses sizes that the model cannot make.

        Raises:
            ArgumentError: says which sizes are near.
        """
        for side, pixels in (("height", height), ("width", width)):
            if pixels % self.multiple or pixels < self.multiple:
                near = max(1, round(pixels / self.multiple)) * self.multiple
                raise ArgumentError(
                    f"{side}={pixels}: {self.name} makes multiples of {self.multiple} pixels; the nearest is {near}"
                )
        if self.frames == 1 and frames != 1:
            raise ArgumentError(f"frames={frames}: {self.name} makes pictures; leave frames out")
        if (frames - 1) % self.frame_multiple or frames < 1:
            near = max(0, round((frames - 1) / self.frame_multiple)) * self.frame_multiple + 1
            raise ArgumentError(
                f"frames={frames}: {self.name} makes a multiple of {self.frame_multiple} frames and one; the nearest "
                f"is {near}"
            )


@functools.lru_cache(maxsize=4)
def subject_named(name: str) -> Subject:
    """Builds a published model without weights, in half precision.

    Raises:
        ArgumentError: an unknown name; lists the known ones.
    """
    row = model_named(name)
    return _subject(row, _empty(row.denoiser, row.config), _empty(row.coder, row.coder_config))


def _subject(row: ModelRow, denoiser: nn.Module, coder: nn.Module) -> Subject:
    config: Any = denoiser.config
    return Subject(
        name=row.name,
        denoiser=denoiser,
        call=lambda size: row.call(size, config),
        steps=row.steps,
        height=row.height,
        width=row.width,
        frames=row.frames,
        multiple=row.multiple,
        frame_multiple=row.frame_multiple,
        branches=row.branches,
        joined=row.joined,
        decoding=decoding_of(coder, row.latent_channels, row.clip),
        encoders=row.encoders,
        uniform=True,  # tests trace every row both ways
    )


def _empty(kind: str, config: Any) -> nn.Module:
    import diffusers  # takes seconds

    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)
    return model.eval()


def subject_in(folder: Path, pipeline: str) -> Subject:
    """Builds the model of a folder without its weights, in half precision.

    Args:
        folder: of a diffusers pipeline.
        pipeline: its class, one of those of `partsong.planner.models`.
    """
    row = next(row for row in MODELS.values() if row.pipeline == pipeline)
    part = "unet" if (folder / "unet").is_dir() else "transformer"
    config, coder = (read_settings(folder / name) for name in (part, "vae"))
    own = replace(row, name=folder.name, denoiser=config["_class_name"], coder=coder["_class_name"])
    return _subject(own, _empty(own.denoiser, _plain(config)), _empty(own.coder, _plain(coder)))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def subject_of(pipe: Any, **arguments: Any) -> Subject:
    """Reads what the planner must know off a pipeline, whose call is begun and broken off after its first step.

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
        denoiser=denoiser,
        call=first.call,
        steps=arguments.get("num_inference_steps", 50),
        height=height,
        width=width,
        frames=frames,
        multiple=first.downscale,
        branches=samples if len(calls) == 1 else len(calls),
        joined=len(calls) == 1,
        decoding=None if coder is None else decoding_of(coder, coder.config.latent_channels, clip),
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
    encoders = []
    for name in text_encoders(pipe.components):
        part = getattr(pipe, name)
        if not isinstance(part, nn.Module):
            continue
        tokenizer = getattr(pipe, name.replace("text_encoder", "tokenizer"), None)
        tokens = min(512, getattr(tokenizer, "model_max_length", 512))
        encoders.append(Encoder(name=name, parameters=sum(w.numel() for w in part.parameters()), tokens=tokens))
    return tuple(encoders)
