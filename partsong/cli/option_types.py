"""Names the types of options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from partsong.knobs import Number, Whole

__all__ = ["Calling", "Common", "Count", "Path", "Positive", "Question", "Seed", "Temperature", "Words"]

Path = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
#: A number that may be left out. `partsong.cli.bounds` checks the bounds in these annotations.
Count = Annotated[int | None, Whole(1), tyro.conf.arg(metavar="N")]
#: A number that has a default.
Positive = Annotated[int, Whole(1), tyro.conf.arg(metavar="N")]
#: A question that may come from a file or from standard input instead.
Question = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTION", help_behavior_hint="")]
Seed = Annotated[int, tyro.conf.arg(metavar="N")]
Temperature = Annotated[float, Number(0.0)]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Common:
    """Holds the options that every command has."""

    json: Path = None
    """Write the result to this file as JSON."""
    debug: bool = False
    """Show the traceback of an error instead of one line."""


@dataclass(frozen=True, kw_only=True)
class Calling(Common):
    """Holds the options of commands that call a pipeline of pictures or videos on ranks."""

    nproc: Count = None
    """How many ranks to start; 1 if not given. Leave it out under torchrun, which has started them."""
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
    seed: Seed = 0
    """Seed of the noise."""
    threads: Count = None
    """Threads per rank; if not given, 1 for several ranks or a zoo model, and torch's own choice otherwise."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Type of weights and arithmetic; if not given, float32 on a CPU and the checkpoint's own type on a GPU."""
