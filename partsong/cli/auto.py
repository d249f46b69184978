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
        ArgumentError: ``auto`` is given with others or under torchrun, or no usual strategy has a form on the model.
    """
    asks_nothing = not options.strategy and num_ranks(options.nproc) > 1 and not under_torchrun()
    if AUTO not in options.strategy and not asks_nothing:
        return options, None
    if len(options.strategy) > 1:
        raise ArgumentError("--strategy auto chooses all strategies; leave the others out")
    if under_torchrun():
        raise ArgumentError("--strategy auto starts its own ranks; under torchrun give what partsong plan prints")
    nproc = num_ranks(options.nproc)
    from partsong.jobs.pipeline_source import find_pipeline
    from partsong.jobs.planning import machine_here, subject_for, usual_strategy
    from partsong.planner.recommend import advise

    source = find_pipeline(options.model)
    try:
        machine = machine_here(nproc)
    except ArgumentError:
        name, sentence = usual_strategy(source.denoisers, nproc)
        return replace(options, strategy=(name,), nproc=nproc), sentence
    subject, _ = subject_for(str(source.folder))
    asked = {"height": options.height, "width": options.width, "steps": options.steps, **size}
    advice = advise(subject, machine, **asked)
    chosen = tuple(advice.choice.strategy.split()) if advice.choice.strategies else ()
    return replace(options, strategy=chosen, nproc=nproc if chosen else 1), advice.sentence
