"""Declares the options of the commands that compare serial and parallel pictures and videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from partsong.cli.option_types import Calling, Count, Path, Positive, Words

__all__ = ["PictureEval", "VideoEval"]

_Folder = Annotated[str | None, tyro.conf.arg(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class _Comparing(Calling):
    """Holds the options that both share."""

    prompts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")] = ()
    """What to draw: a text file with a prompt on each line, JSON lines with a field prompt (GenEval), or a folder of
    .txt files (DPG-Bench). If not given, captions of the zoo model."""
    strategies: Words = ()
    """What to compare with serial sampling, NAME[:KEY=VALUE,...] each, with + between those that work together (see
    `partsong list strategies`)."""
    num: Count = None
    """How many samples; if not given, one for each prompt, or 20 captions. Prompts are used again in turn."""
    clip: _Folder = None
    """A CLIP model, as a folder of transformers or a hub id, for the metrics that need its features."""
    lpips: Path = None
    """torchvision's weights of AlexNet (.pth or .safetensors), for LPIPS."""
    shown: Positive = 8
    """How many prompts the sheet shows."""


@dataclass(frozen=True, kw_only=True)
class PictureEval(_Comparing):
    """Compare serial and parallel pictures of a model and prompts of yours."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "shapes"
    """A zoo name (see `partsong list models`), a local diffusers folder, or a hub id."""
    aesthetic: Path = None
    """A linear or MLP head on features of the CLIP model, with LAION's names layers.N.weight."""
    reference: _Folder = None
    """Pictures to take the FID to, on features of the CLIP model; if not given, the serial ones."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "partsong-images"
    """Folder for the samples and the sheet. With the same settings, what it holds is not sampled again."""


@dataclass(frozen=True, kw_only=True)
class VideoEval(_Comparing):
    """Compare serial and parallel videos of a model and prompts of yours."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "motion"
    """A zoo name, a local diffusers folder, or a hub id."""
    frames: Count = None
    """Frames of a video; the model's own default if not given."""
    fps: Annotated[float, tyro.conf.arg(metavar="N")] = 16.0
    """Frames per second of the videos that are written."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "partsong-videos"
    """Folder for the samples and the sheet. With the same settings, what it holds is not sampled again."""
