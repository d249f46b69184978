"""Chooses strategies where a command names none, or ``auto``: those that the planner recommends for this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from partsong.cli.ranks import num_ranks, under_torchrun
from partsong.errors import ArgumentError

if TYPE_CHECKING:
    from partsong.cli.options import Image, Video

__all__ = ["AUTO", "settle_auto"]

AUTO = "auto"

_Options = TypeVar("_Options", "Image", "Video")


def settle_auto(options: _Options, **size: Any) -> tuple[_Options, str | None]:
    """Returns options that name their strategies, and a sentence that says why.

    On a machine that was not measured a usual one is taken.

    Args:
        options: of an image or a video; returned as they are where they name strategies, or there is one rank.
        **size: the part of the request that images and videos do not share, such as the batch or the frames.

    Raises:
        ArgumentError: ``auto`` is given with others or under torchrun.
    """
    asks_nothing = not options.strategy and num_ranks(options.nproc) > 1 and not under_torchrun()
    if AUTO not in options.strategy and not asks_nothing:
        return options, None
    if len(options.strategy) > 1:
        raise ArgumentError("--strategy auto chooses all strategies; leave the others out")
    if under_torchrun():
        raise ArgumentError("--strategy auto starts its own ranks; under torchrun give what partsong plan prints")
    from partsong.jobs.pipeline_source import find_pipeline
    from partsong.jobs.usual_strategy import usual_strategy

    asked = {"height": options.height, "width": options.width, "steps": options.steps, **size}
    chosen, ranks, sentence = usual_strategy(
        find_pipeline(options.model), num_ranks(options.nproc), fewer=True, **asked
    )
    return replace(options, strategy=chosen, nproc=ranks), sentence
