"""Makes paused calls of a plan's pipeline for the loops of strategies, and counts their progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partsong.errors import UnsupportedError
from partsong.parallel import Plan
from partsong.samplers.pipeline.paused import Denoise, Event, PausedCall, Stepped

__all__ = ["CallTrack", "call_pipeline", "refuse_arguments"]


@dataclass(slots=True)
class CallTrack:
    """Counts the progress of a paused call: its next call of the denoiser is call `branch` of step `step`."""

    call: PausedCall
    step: int = 0
    branch: int = 0

    def send(self, answer: Any) -> Event:
        """Answers the call, lets it run to its next event and returns that."""
        was_asked = isinstance(self.call.event, Denoise)
        event = self.call.send(answer)
        if isinstance(event, Stepped):
            self.step, self.branch = self.step + 1, 0
        elif was_asked:
            self.branch += 1
        return event


def call_pipeline(
    plan: Plan, arguments: Mapping[str, Any], *, decodes: bool = True, shows_progress: bool = True
) -> PausedCall:
    """Prepares a call of a plan's pipeline that pauses at its one denoiser, without starting it.

    Args:
        plan: strategies on a pipeline.
        arguments: of the pipeline's call.
        decodes: False ends the call before it decodes its latents.
        shows_progress: False hides its bar, where another call shows one already.
    """
    denoiser = plan.denoisers[0]
    name = next(name for name, part in plan.target.components.items() if part is denoiser.module)
    call = PausedCall(plan.target, name, arguments, decodes=decodes, note_positions=denoiser.note_positions)
    if not shows_progress and hasattr(call.pipe, "set_progress_bar_config"):
        call.pipe.set_progress_bar_config(disable=True)
    return call


def refuse_arguments(arguments: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuses arguments of a pipeline's call that a loop cannot honour.

    Args:
        arguments: of the pipeline's call.
        reasons: for each argument that cannot be honoured, why, and what to do.

    Raises:
        UnsupportedError: one of them was given.
    """
    for name, reason in reasons.items():
        if arguments.get(name) is not None:
            raise UnsupportedError(f"{name} cannot be honoured: {reason}")
