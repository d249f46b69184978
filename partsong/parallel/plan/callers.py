"""Says whose generation a call of a model belongs to, where several pipelines or loops call one model under a plan."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from partsong.parallel.hooks.clock import StepClock

__all__ = ["Callers"]


class Callers:
    """Compares who calls the model with who began the generation that the clock counts.

    A pipeline's scheduler drives the clock. Another pipeline around the same model has a scheduler that nobody follows,
    and so may a user's own loop: their calls are no further branches of a step that ended long ago.

    Args:
        pipe: the pipeline under the plan.
        clock: counts the steps of its generation.
        on_other: is called with the pipeline when another one begins a generation.
    """

    def __init__(self, pipe: Any, clock: StepClock, on_other: Callable[[Any], None]) -> None:
        self._pipe, self._clock, self._on_other = pipe, clock, on_other
        # Whose generation it is; a dead reference where a loop outside of any pipeline has begun it, None for none yet.
        self._began: Callable[[], Any] | None = None
        clock.on_begin(self._begin)

    def _begin(self) -> None:
        caller = self.now()
        self._began = _nobody if caller is None else weakref.ref(caller)
        if caller is not None and caller is not self._pipe:
            self._on_other(caller)

    def now(self) -> Any:
        """Returns the pipeline in whose call this is called: the innermost one, or None."""
        innermost = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "__call__":  # the locals of a frame are copied when they are read
                owner = frame.f_locals.get("self")
                if owner is self._pipe and any(innermost is part for part in (None, *vars(owner).values())):
                    return owner  # in its own call, or in that of a pipeline that it is made of
                innermost = owner if innermost is None and hasattr(type(owner), "components") else innermost
            frame = frame.f_back
        return innermost

    def are_led(self) -> bool:
        """Says whether the current call of the model belongs to a generation that the pipeline's scheduler drives."""
        clock, caller, is_own = self._clock, self.now(), self._starter() is self._pipe
        if self._began is None or clock.is_over:
            return caller is self._pipe and (self._began is None or is_own)
        if clock.is_followed:
            return False
        if caller is None and not is_own:  # a loop of the user's that steps the scheduler, or copies of it
            return clock.num_steps is None or clock.step < clock.num_steps
        return caller is self._starter()

    def follow(self, timestep: Any) -> bool:
        """Places a call that is not led by its timestep; says whether it begins a generation."""
        return self._clock.follow(timestep, is_fresh=self.now() is not self._starter())

    def _starter(self) -> Any:
        return None if self._began is None else self._began()


def _nobody() -> None:
    return None
