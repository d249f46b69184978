"""Names the types of options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from partsong.knobs import Number, Whole

__all__ = ["Common", "Count", "Path", "Positive", "Question", "Seed", "Temperature", "Words"]

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
