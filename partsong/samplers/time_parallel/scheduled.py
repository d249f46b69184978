"""Takes steps with copies of a pipeline's own scheduler, which carry its state from step to step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.accelerator import forked_random, random_state, set_random_state

__all__ = ["ScheduledStep", "StepCall", "copy_of"]


@dataclass(frozen=True, slots=True)
class StepCall:
    """Holds the arguments of a scheduler's step, and the states of generators at that time.

    Attributes:
        prediction: what the step was made from,
        time: and when,
        sample: and the latents.
        named: its other arguments. Generators among them are copies.
        random: the states of the default generators that the step's noise may come from: the CPU's, and the GPU's.
    """

    prediction: Tensor
    time: Any
    sample: Tensor
    named: dict[str, Any]
    random: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, prediction: Tensor, time: Any, sample: Tensor, named: dict[str, Any]) -> StepCall:
        """Records a call that is about to be made."""
        random = torch.get_rng_state(), random_state(sample.device)
        given = {key: _copied(value) for key, value in named.items() if key != "return_dict"}
        return cls(prediction.clone(), time, sample.clone(), given, random)

    def repeat(self, scheduler: Any, prediction: Tensor, sample: Tensor) -> tuple[Any, ...]:
        """Repeats the call with other tensors and the same noise, and updates the scheduler."""
        named = {key: _copied(value) for key, value in self.named.items()}
        with forked_random(sample.device):
            torch.set_rng_state(self.random[0])
            set_random_state(self.random[1], sample.device)
            return tuple(scheduler.step(prediction, self.time, sample, **named, return_dict=False))


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Makes a step of a pipeline's scheduler, from any latents and any prediction; see `SolverStep`.

    It carries the scheduler in its state after the step. This state equals that of the pipeline's own scheduler, so
    multistep solvers and those with correctors or noise give the pipeline's results.

    Attributes:
        given: what the pipeline gives its scheduler in this step.
        begin: the scheduler before its first step.
    """

    given: StepCall
    begin: Any

    def __call__(self, point: Tensor, output: Tensor, carried: Any, noise: Tensor | None) -> tuple[Tensor, Any]:
        """Makes the step."""
        scheduler = copy_of(self.begin if carried is None else carried)
        shape = self.given.sample.shape  # a bundle has one dimension more
        new, *_ = self.given.repeat(scheduler, output.view(shape), point.view(shape))
        return new.view(point.shape), scheduler

    def results(self, point: Tensor, output: Tensor, carried: Any) -> tuple[Any, ...]:
        """Returns all that the scheduler returns."""
        return self.given.repeat(copy_of(self.begin if carried is None else carried), output, point)


def copy_of(scheduler: Any) -> Any:
    """Copies a scheduler with everything that its steps change, faster than a deep copy.

    Example:
        >>> from diffusers import UniPCMultistepScheduler
        >>> scheduler = UniPCMultistepScheduler()
        >>> scheduler.set_timesteps(4)
        >>> copied = copy_of(scheduler)
        >>> _ = copied.step(torch.ones(1, 4), copied.timesteps[0], torch.ones(1, 4))
        >>> scheduler.step_index is None and copied.step_index == 1
        True
    """
    copied = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        vars(copied)[name] = _own(value)
    # A replaced method belongs to the original object.
    vars(copied).pop("step", None)
    return copied


def _own(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is list:
        return [_own(each) for each in value]
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    return value


def _copied(value: Any) -> Any:
    """Copies generators, whose originals continue to draw."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone_state() if isinstance(value, torch.Generator) else value
