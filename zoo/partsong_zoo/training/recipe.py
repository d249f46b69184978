"""Begins and ends a recipe alike: knobs from the command line, a log with times, ranks, and a report in a file."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from partsong_zoo.training.common import World

__all__ = ["file_report", "recipe_config", "run_recipe"]

Config = TypeVar("Config")


def recipe_config(kind: type[Config], text: str | None) -> Config:
    """Reads a recipe's knobs from the command line, and begins its log.

    Args:
        kind: the dataclass of its knobs.
        text: the recipe's docstring, whose first line the help shows.
    """
    config = tyro.cli(kind, description=(text or "").splitlines()[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    return config


def run_recipe(kind: type[Config], text: str | None, run: Callable[[Config, World], None], device: str = "") -> None:
    """Runs a recipe with the knobs of the command line, on the ranks that torchrun started, if any.

    Args:
        kind: the dataclass of its knobs.
        text: the recipe's docstring, whose first line the help shows.
        run: what it does.
        device: where it runs if it has no knob for that.
    """
    config: Any = recipe_config(kind, text)
    run(config, World(device or config.device))


def file_report(path: Path, report: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes what a recipe measured as JSON, to a file and in one line to standard output."""
    path.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(json.dumps(report) + "\n")
