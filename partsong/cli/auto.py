"""Replaces ``--strategy auto`` by the mix that the planner recommends for this machine."""

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
    """Returns options that name their strategies, and the planner's sentence.

    Args:
        options: of an image or a video; returned as they are where they do not ask for ``auto``.
        **size: the part of the request that images and videos do not share, such as the batch or the frames.

    Raises:
        ArgumentError: ``auto`` is given with others, under torchrun, or on a machine that was not measured.
    """
    if AUTO not in options.strategy:
        return options, None
    if len(options.strategy) > 1:
        raise ArgumentError("--strategy auto chooses all strategies; leave the others out")
    if under_torchrun():
        raise ArgumentError("--strategy auto starts its own ranks; under torchrun give what partsong plan prints")
    nproc = num_ranks(options.nproc)
    from partsong.jobs.pipeline_source import find_pipeline
    from partsong.jobs.planning import machine_here, subject_for
    from partsong.planner.recommend import advise

    subject, _ = subject_for(str(find_pipeline(options.model).folder))
    asked = {"height": options.height, "width": options.width, "steps": options.steps, **size}
    advice = advise(subject, machine_here(nproc), **asked)
    chosen = tuple(advice.choice.strategy.split()) if advice.choice.strategies else ()
    return replace(options, strategy=chosen, nproc=nproc if chosen else 1), advice.sentence
