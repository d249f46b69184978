"""The commands and their options, as data; tyro makes the parser and the help from this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

__all__ = ["Bench", "Command", "Demo", "Env", "Image", "List", "Sampling", "Video"]

Path = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int | None, tyro.conf.arg(metavar="N")]


@dataclass(frozen=True, kw_only=True)
class _Common:
    json: Path = None
    """Write the result to this file as JSON."""
    debug: bool = False
    """Show the traceback of an error instead of one line."""


@dataclass(frozen=True, kw_only=True)
class Sampling(_Common):
    """What image and video have in common."""

    nproc: Count = None
    """Ranks to start here; 1 if not given. Under torchrun the ranks are there already."""
    strategy: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]", help_behavior_hint="")
    ] = ()
    """How the ranks share the work (see `partsong list strategies`); repeat it to combine several."""
    steps: Count = None
    """Denoising steps; the model's own default if not given."""
    guidance: Annotated[float | None, tyro.conf.arg(metavar="SCALE")] = None
    """Guidance scale; the model's own default if not given."""
    height: Count = None
    """Height in pixels."""
    width: Count = None
    """Width in pixels."""
    negative_prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """What not to draw."""
    set: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE", help_behavior_hint="")
    ] = ()
    """Any other argument of the pipeline's call, such as true_cfg_scale=4; repeat it for several."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Seed of the noise."""
    compare: bool = False
    """Also run the serial twin on one rank; reports speed-up and drift."""
    threads: Count = None
    """Threads per rank; 1 for several ranks or a zoo model, else what torch chooses."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Type of weights and arithmetic."""
    ledger: Path = None
    """Append one JSON line per rank and step to this file: computed, moved, waited."""


@dataclass(frozen=True, kw_only=True)
class Image(Sampling):
    """Sample an image from a text, on one or several ranks."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
    """What to draw; for class-conditional pipelines the name or number of a class."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "shapes"
    """A zoo name (see `partsong list models`), a local diffusers folder, or a hub id."""
    num_images: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Images of the prompt; image i looks the same in any number and on any number of ranks."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong.png"
    """PNG to write; several images are numbered."""


@dataclass(frozen=True, kw_only=True)
class Video(Sampling):
    """Sample a video from a text, on one or several ranks; frames are written as they are done."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT", help_behavior_hint="")] = ""
    """What to show; not needed with --resume."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = ""
    """A zoo name, a local diffusers folder, or a hub id; if not given, the zoo's motion, or motion-causal for
    timestep-pipeline."""
    frames: Count = None
    """Frames of the video; the model's own default if not given."""
    fps: Annotated[float, tyro.conf.arg(metavar="N")] = 16.0
    """Frames per second of the film."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong.mp4"
    """Film to write, .mp4 or .gif; a name without ending is a folder of PNG files."""
    journal: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep the run's progress in this folder (dual-parallel and timestep-pipeline), for --resume."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Go on with the run of this journal, as it was called; --nproc, --out and --json may differ."""


@dataclass(frozen=True, kw_only=True)
class Bench(_Common):
    """Measure strategies against one process, or kernels against each other, interleaved in one run."""

    name: Annotated[Literal["image", "kernels"], tyro.conf.Positional]
    """What to measure."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Timed runs of each case; the median counts."""
    tokens: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = ()
    """Tokens, one table section each; default 1024 and 4096 for image, 1k to 64k for kernels (1k on a CPU)."""
    nproc: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """image: ranks, one thread each; default 2."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """image: models to measure; all if not given."""
    tune: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """kernels: also find the best tile sizes and backends for this GPU and merge them into FILE."""


@dataclass(frozen=True, kw_only=True)
class Env(_Common):
    """Show versions, devices, cores and attention backends."""


@dataclass(frozen=True, kw_only=True)
class List(_Common):
    """List what there is to choose from."""

    what: Annotated[Literal["models", "strategies", "support", "rules", "suites"], tyro.conf.Positional]
    """What to list."""


@dataclass(frozen=True, kw_only=True)
class Demo(_Common):
    """Sample a few captions serially and with each strategy, and write a page that shows them side by side."""

    nproc: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    """Ranks to start, at least 2."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 7
    """Seed of the noise."""
    steps: Count = None
    """Denoising steps; the model's own default if not given."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """Timed runs of each method; the median counts."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong-demo.html"
    """HTML page to write."""
    picture: Path = None
    """Also write the pictures side by side as one PNG."""


Command = (
    Annotated[Image, tyro.conf.subcommand("image")]
    | Annotated[Video, tyro.conf.subcommand("video")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Env, tyro.conf.subcommand("env")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)
