"""Chooses strategies where nobody names any; on a machine that was not measured without loading the planner."""

from __future__ import annotations

from typing import Any

from partsong.calibration_files import any_calibration, not_measured
from partsong.errors import ArgumentError
from partsong.fork_server import has_gpu_files
from partsong.jobs.pipeline_source import PipelineSource

__all__ = ["usual_size", "usual_strategy"]


def usual_strategy(
    source: PipelineSource, nproc: int, *, fewer: bool = False, **asked: Any
) -> tuple[tuple[str, ...], int, str]:
    """Returns what the planner recommends on this machine, on how many ranks, and why; a usual choice if not measured.

    Args:
        source: the model.
        nproc: number of ranks.
        fewer: whether to take fewer ranks where these are faster.
        **asked: sizes, steps and batch to plan for, as `advise` takes them; None where the model's own counts.
    """
    if nproc == 1:
        return (), 1, "one rank has nobody to share with"
    usual = "ulysses, which is exact and suits most models"
    if not (any_calibration() or has_gpu_files()):  # the planner, which takes seconds to load, would find the same
        return ("ulysses",), nproc, f"{usual}: {not_measured(nproc)}"
    from partsong.jobs.planning import machine_here, subject_for
    from partsong.planner.recommend import advise, advise_number

    try:
        machine = machine_here(nproc)
    except ArgumentError as error:
        return ("ulysses",), nproc, f"{usual}: {error}"
    subject, _ = subject_for(str(source.folder))
    advice = (advise_number if fewer else advise)(subject, machine, **asked)
    if not advice.choice.strategies:
        return (), 1, advice.sentence
    return tuple(advice.choice.strategy.split()), advice.machine.ranks, advice.sentence


def usual_size(source: PipelineSource) -> dict[str, Any]:
    """Returns the size and the steps that a model is usually asked for."""
    known = source.defaults
    return {"height": known.get("height"), "width": known.get("width"), "steps": known.get("num_inference_steps")}
