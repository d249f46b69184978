"""Lists the commands and the classes of their options."""

from __future__ import annotations

from typing import Annotated, Any, Union

import tyro

from partsong.cli.options import (
    Bench,
    Calibrating,
    Demo,
    Env,
    Image,
    List,
    Planning,
    ServeCheck,
    Serving,
    Text,
    Think,
    Video,
)
from partsong.cli.suites.options import EvalSuite

__all__ = ["COMMANDS", "Command"]

#: The commands by name.
COMMANDS: dict[str, Any] = {
    "image": Image,
    "video": Video,
    "text": Text,
    "think": Think,
    "eval": EvalSuite,
    "bench": Bench,
    "plan": Planning,
    "calibrate": Calibrating,
    "serve": Serving,
    "serve check": ServeCheck,
    "env": Env,
    "list": List,
    "demo": Demo,
}
Command: Any = Union[tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())]  # noqa: UP007
