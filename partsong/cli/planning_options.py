"""Declares the options of the commands that predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from partsong.cli.option_types import Common, Count, Path, Positive
from partsong.knobs import Number

__all__ = ["Calibrating", "PlannerEval", "Planning"]


@dataclass(frozen=True, kw_only=True)
class Planning(Common):
    """Predict time, memory and bytes of every legal mix of strategies, and say which one to use."""

    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """A published model such as flux-dev (an unknown name lists them), a zoo name, or a folder: of diffusers, or of a
    language model, of which config.json is enough. If not given, all published models are planned, which takes minutes
    the first time where no traces of them come with the package."""
    gpus: Annotated[str | None, tyro.conf.arg(metavar="NxNAME")] = None
    """How many devices of which kind, such as 4x4090; if not given, this machine as `partsong calibrate` has
    measured it."""
    nproc: Count = None
    """How many ranks of this machine to plan for, where no devices are named; 2 if not given."""
    link: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What connects the devices, such as pcie4 or nvlink."""
    per_node: Count = None
    """Devices of a machine, where there are several machines."""
    across: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What connects machines, such as 100gbit."""
    memory: Annotated[float | None, Number(0.0, above=True), tyro.conf.arg(metavar="GB")] = None
    """Gigabytes of a device; what the device has if not given."""
    height: Count = None
    """Height in pixels; the model's own if not given."""
    width: Count = None
    """Width in pixels; the model's own if not given."""
    frames: Count = None
    """Frames of a video; the model's own if not given."""
    steps: Count = None
    """Denoising steps; what the model's authors advise if not given."""
    prompt: Count = None
    """Tokens of a language model's prompt; 1024 if not given, or what fits its context."""
    batch: Positive = 1
    """Pictures, videos or texts that are made at once."""
    max_drift: Annotated[float, Number(0.0), tyro.conf.arg(metavar="RMS")] = 0.0
    """How far pictures may be from those of one device, as a root mean square of pixels in [0, 1]; 0 allows exact
    strategies only, 0.01 is 40 dB."""
    top: Positive = 8
    """How many mixes to show."""
    plot: Path = None
    """Draw time against the number of devices, and against drift, into this file (.png or .svg)."""


@dataclass(frozen=True, kw_only=True)
class Calibrating(Common):
    """Measure this machine for less than a minute, so that plans for it use its own numbers."""

    nproc: Count = None
    """How many ranks to start; 2 if not given. Leave it out under torchrun, which has started them."""
    threads: Count = None
    """Threads per rank; 1 if not given."""
    out: Path = None
    """Write the measurement here instead of where plans look for it."""


@dataclass(frozen=True, kw_only=True)
class PlannerEval(Common):
    """Compare predictions with published latencies."""

    data: Path = None
    """Rows to predict, as JSON; those that come with partsong if not given."""
