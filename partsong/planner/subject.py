"""Describes the model that a plan is for: its parts, how it is called, and the sizes it makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partsong.errors import ArgumentError
from partsong.planner.calls import Size

__all__ = ["Autoencoder", "Encoder", "Subject"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Describes a text encoder.

    Attributes:
        name: what people call it.
        parameters: how many it has.
        tokens: of a prompt.
    """

    name: str
    parameters: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Autoencoder:
    """Describes an autoencoder.

    Attributes:
        build: makes it; the shapes of its weights are used only.
        channels: of the latents that it decodes.
        clip: latent frames of a short clip; None where it decodes pictures.
    """

    build: Callable[[], nn.Module]
    channels: int
    clip: int | None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Describes the model that a plan is made for.

    Attributes:
        name: what answers call it.
        build: makes its denoiser, when that is first needed; the shapes of its weights are used only.
        call: makes the arguments of one call for a size, without values.
        steps: of a generation where nothing else is asked.
        height: pixels where nothing else is asked.
        width: pixels where nothing else is asked.
        frames: of a video; 1 for pictures.
        multiple: pixels of which height and width are multiples.
        frame_multiple: a video has a multiple of this many frames, plus one.
        branches: samples of a step that guidance asks for.
        joined: whether the branches are one call.
        coder: its autoencoder; None where there is none.
        encoders: its text encoders.
        dtype: of weights and latents.
        settings: all that its denoiser was built from; None where it may have been changed since.
        uniform: whether one block is known to stand for all equal ones; otherwise the planner finds out.
        published: its name among the published models; None where it is none, or with settings of its own.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[Size], dict[str, Any]]
    steps: int
    height: int
    width: int
    frames: int = 1
    multiple: int = 8
    frame_multiple: int = 1
    branches: int = 1
    joined: bool = True
    coder: Autoencoder | None = None
    encoders: tuple[Encoder, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    settings: str | None = None
    uniform: bool = False
    published: str | None = None

    @functools.cached_property
    def denoiser(self) -> nn.Module:
        """Returns the denoiser."""
        return self.build()

    def sized(self, height: int | None, width: int | None, frames: int | None, batch: int) -> Size:
        """Returns the size asked for, with the model's own values for what is left open.

        Raises:
            ArgumentError: the model cannot make it; says which sizes are near.
        """
        size = Size(
            height=height or self.height,
            width=width or self.width,
            frames=frames or self.frames,
            batch=batch,
            dtype=self.dtype,
        )
        for side, pixels in (("height", size.height), ("width", size.width)):
            if pixels % self.multiple or pixels < self.multiple:
                near = max(1, round(pixels / self.multiple)) * self.multiple
                raise ArgumentError(
                    f"{side}={pixels}: {self.name} makes multiples of {self.multiple} pixels; the nearest is {near}"
                )
        if self.frames == 1 and size.frames != 1:
            raise ArgumentError(f"frames={size.frames}: {self.name} makes pictures; leave frames out")
        if (size.frames - 1) % self.frame_multiple or size.frames < 1:
            near = max(0, round((size.frames - 1) / self.frame_multiple)) * self.frame_multiple + 1
            raise ArgumentError(
                f"frames={size.frames}: {self.name} makes a multiple of {self.frame_multiple} frames plus one; the "
                f"nearest is {near}"
            )
        return size
