"""Tells which step and which guidance branch of a generation a denoiser call belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["SideClock", "StepClock"]


class StepClock:
    """Counts steps, and calls within a step.

    A pipeline drives it through its scheduler: ``set_timesteps`` begins a generation, and ``step`` ends a step, also
    for schedulers of higher order. For a bare module, and for calls that belong to no generation of the scheduler, the
    timesteps of the calls drive it. A smaller timestep is the next step, an equal one the next branch of the same step,
    and a larger one a new generation.

    Attributes:
        step: index of the current step.
        branch: index of the current call within the step.
        num_steps: steps of this generation where known.
        steps_before: number of steps in the previous generation.
        passed_over: announced steps that image-to-image pipelines do not make.
        driven: whether a scheduler drives it.
        is_followed: whether this generation follows the timesteps of its calls, although a scheduler drives the clock.
        is_over: whether the pipeline's call has returned; it may have made fewer steps than were announced.
    """

    #: How far a forecast may reach, in units of the last step; beyond that a straight line is a bad guess.
    MAX_RATIO = 2.0
    #: Most branches of a step that is known by its timestep. More are generations of one step, and they keep nothing.
    MAX_BRANCHES = 64

    def __init__(self) -> None:
        self.step, self.branch, self.steps_before = 0, 0, 0
        self.num_steps: int | None = None
        self.passed_over = 0
        self.driven, self.is_followed, self.is_over = False, False, False
        self._calls = 0
        self._times: list[float] = []
        self._levels: list[float] = []
        self._noise: list[float] = []
        self._left_out: dict[int, set[int]] = {}
        self._on_begin: list[Callable[[], None]] = []
        self._on_change: list[Callable[[int], None]] = []
        self._on_end: list[Callable[[], None]] = []

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Calls `callback` whenever a generation begins."""
        self._on_begin.append(callback)

    def on_change(self, callback: Callable[[int], None]) -> None:
        """Calls `callback` with the number of a branch whenever the shape of its calls changes in mid-generation."""
        self._on_change.append(callback)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when a generation is over whose end is noticed: what steps keep for later ones can go."""
        self._on_end.append(callback)

    def forget_callbacks(self) -> None:
        """Forgets all callbacks."""
        self._on_begin.clear()
        self._on_change.clear()
        self._on_end.clear()

    def end(self) -> None:
        """Notes that no call of this generation follows."""
        for callback in self._on_end:
            callback()

    def change(self, branch: int) -> None:
        """Notes that the shape of a branch's calls has changed, so nothing kept from earlier steps fits."""
        for callback in self._on_change:
            callback(branch)

    def begin(
        self,
        times: Sequence[float] | None = None,
        levels: Sequence[float] | None = None,
        noise: Sequence[float] | None = None,
    ) -> None:
        """Starts a generation.

        Args:
            times: the timestep of every step, where that is known beforehand.
            levels: the noise level of every step and perhaps of the end; None takes the timesteps.
            noise: noise over clean sample in the model's input in every step; None where unknown.
        """
        self.steps_before, self.step, self.branch, self._calls = self.step, 0, 0, 0
        self.num_steps, self.passed_over = None if times is None else len(times), 0
        self._times = list(times or ())
        self._levels = [] if levels is None or len(levels) < len(self._times) else list(levels)
        self._noise, self._left_out, self.is_followed = list(noise or ()), {}, False
        for callback in self._on_begin:
            callback()

    def begun_at(self, timestep: Any) -> None:
        """Notes the timestep of the first step, since image-to-image pipelines skip earlier ones."""
        now = _first(timestep)
        if now in self._times:
            self.passed_over = self._times.index(now)
            self._times, self._levels = self._times[self.passed_over :], self._levels[self.passed_over :]
            self._noise, self.num_steps = self._noise[self.passed_over :], len(self._times)

    def advance(self) -> None:
        """Ends a step."""
        self.step, self._calls = self.step + 1, 0

    @property
    def steps_made(self) -> int | None:
        """Returns the steps of this generation, made or announced; None where unknown."""
        return self.step if self.is_over else self.num_steps

    def enter(self, timestep: Any) -> None:
        """Notes a call of the denoiser."""
        if not self.driven:
            self.follow(timestep)
        self.branch = self._calls
        self._calls += 1

    @property
    def is_called(self) -> bool:
        """Says whether the denoiser was called in this step."""
        return self._calls > 0

    def follow(self, timestep: Any, *, is_fresh: bool = False) -> bool:
        """Places a call by its timestep, before `enter`; says whether it begins a generation.

        Args:
            timestep: of the call.
            is_fresh: it begins one whatever its timestep is.
        """
        now, is_full = _first(timestep), self._calls >= self.MAX_BRANCHES
        is_fresh = is_fresh or (self.driven and (self.is_over or not self.is_followed))
        if is_fresh or is_full or not self._times or now > self._times[-1]:
            self.begin()
            self._times, self.is_followed = [now], True
            return True
        if now < self._times[-1]:
            self.advance()
            self._times.append(now)
        return False

    def leave_out(self) -> None:
        """Notes that the blocks of the current call are left out, so this step leaves nothing for later ones."""
        self._left_out.setdefault(self.branch, set()).add(self.step)

    @property
    def step_ratio(self) -> float | None:
        """Returns the interval from the last step to this one over the interval before it; None where unknown.

        Steps in which the blocks of this branch were left out do not count.
        """
        left_out = self._left_out.get(self.branch, ())
        full = (step for step in reversed(range(self.step)) if step not in left_out)
        last, before = next(full, None), next(full, None)
        return None if last is None or before is None else self.reach(before, last)

    def reach(self, before: int, last: int, to: int | None = None) -> float | None:
        """Returns the interval from step `last` to another over that from `before` to `last`; None where unknown.

        Args:
            before: the earliest step.
            last: a later one.
            to: a step after it; None takes this one.
        """
        to = self.step if to is None else to
        if not 0 <= before < last < to < len(self._times):
            return None
        first, second, third = self._times[before], self._times[last], self._times[to]
        return None if first == second else min((third - second) / (second - first), self.MAX_RATIO)

    def level(self, step: int) -> float:
        """Returns the noise level of a step: the scheduler's sigma, else the timestep, else a falling number.

        A step's level is final only when the step has ended: image-to-image pipelines begin in mid-schedule.
        """
        known = self._levels or self._times
        return known[step] if step < len(known) else -float(step)

    def noise_ratio(self, step: int) -> float | None:
        """Returns noise over clean sample in a step, final when the step has ended; None where no scheduler says."""
        return self._noise[step] if step < len(self._noise) else None

    @property
    def is_last_step(self) -> bool:
        """Says whether no further step follows; False where the number of steps is unknown."""
        return self.num_steps is not None and self.step >= self.num_steps - 1


class SideClock(StepClock):
    """Follows the steps of a denoiser's clock for a model that is called beside the denoiser.

    Its branches are the calls of that model within a step, and the denoiser's are not counted.

    Args:
        main: the denoiser's clock.
    """

    def __init__(self, main: StepClock) -> None:
        super().__init__()
        self.driven, self._main = True, main
        main.on_begin(self.begin)
        main.on_end(self.end)

    def enter(self, timestep: Any = None) -> None:
        """Notes a call of the model; the step is the main clock's, whatever the timestep."""
        if self.step != self._main.step:
            self._calls = 0
        self.step, self.num_steps = self._main.step, self._main.num_steps
        self._times, self._levels = self._main._times, self._main._levels
        super().enter(timestep)


def _first(timestep: Any) -> float:
    """Returns the timestep of the first sample; of times per token the latest, as a given picture's may be zero."""
    if not isinstance(timestep, Tensor):
        return float(timestep)
    return float(timestep[0].max() if timestep.ndim > 1 else timestep.flatten()[0])
