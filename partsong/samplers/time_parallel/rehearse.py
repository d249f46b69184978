"""Runs a pipeline's loop once without its model, to learn every step's effect on latents and predictions.

A step of most pipelines is two sums and a scheduler: the model's input is the latents times a number, beside constant
arguments; the prediction is a weighted sum of the model's outputs, as in guidance; and the scheduler makes the next
latents from both. Here the sums are determined on random numbers, and anything but a sum is refused. So a
solver can take any step at any time, with the pipeline's own scheduler, guidance and noise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.parallel.hooks.samples import map_sample, sample_of, samples_of
from partsong.samplers.pipeline.paused import Denoise, Event, Finished, PausedCall, Stepped
from partsong.samplers.time_parallel.rehearsal import (
    ADVICE,
    ModelCall,
    Rehearsal,
    RehearsedStep,
    copies_of,
    place_of,
    stacked,
)
from partsong.samplers.time_parallel.scheduled import ScheduledStep, StepCall, copy_of
from partsong.samplers.time_parallel.sums import close, fitted

__all__ = ["rehearse"]


def rehearse(
    call: PausedCall,
    key: str,
    evaluate: Callable[[dict[str, Any]], Any],
    *,
    seed: int = 0,
    num_steps: int | None = None,
) -> Rehearsal:
    """Runs a pipeline's loop without its model up to the end of its last step.

    Args:
        call: a call of the pipeline that is not begun.
        key: the argument of the model that holds the latents.
        evaluate: the model; it is called only in the first step.
        seed: of the random numbers on which steps are tried.
        num_steps: how many steps the pipeline makes. Default: those that its scheduler has from the first one on.

    Raises:
        UnsupportedError: a step is not a sum, or the scheduler's step cannot be repeated.
    """
    return _Rehearsing(call, key, evaluate, seed, num_steps).run()


class _Rehearsing:
    def __init__(
        self, call: PausedCall, key: str, evaluate: Callable[[dict[str, Any]], Any], seed: int, num_steps: int | None
    ) -> None:
        self.call, self.key, self.evaluate, self.num_steps = call, key, evaluate, num_steps
        self.name = type(call.pipe).__name__
        self.draw = torch.Generator().manual_seed(seed)
        self.given: StepCall | None = None
        #: The scheduler before its first step.
        self.begin: Any = None
        # Of the calls of the first step.
        self.outputs, self.shapes = list[Any](), list[torch.Size]()
        replace_method(call.pipe.scheduler, "step", self._noting)

    def run(self) -> Rehearsal:
        """Goes from step to step."""
        event, sent = self.call.send(), None
        rehearsal: Rehearsal | None = None
        while not isinstance(event, Finished):
            calls, answers, event = self._calls(event)
            given = self.given
            if not isinstance(event, Stepped) or given is None or not calls:
                raise UnsupportedError(f"{self.name} calls its model and its scheduler in another order; {ADVICE}")
            if given.time is None or given.sample.shape[:1] != event.latents.shape[:1]:
                raise UnsupportedError(f"{self.name}: its scheduler is given more than a sample and a time; {ADVICE}")
            if rehearsal is None:
                rehearsal = Rehearsal(self.call, self.key, given.sample.clone(), self.outputs)
                self.num_steps = self.num_steps or _steps_from(self.begin, given.time)
            elif sent is not None and not (given.sample.shape == sent.shape and torch.equal(given.sample, sent)):
                raise UnsupportedError(f"{self.name} changes the latents between its steps; {ADVICE}")
            step = ScheduledStep(given, self.begin)
            rehearsal.steps.append(RehearsedStep(*self._model_calls(calls, answers, given), step))
            if len(rehearsal.steps) == self.num_steps:
                break
            sent = self._random(event.latents)
            event = self.call.send(sent.clone())
        if rehearsal is None:
            raise UnsupportedError(f"{self.name} did not call its model; {ADVICE}")
        rehearsal.is_over = isinstance(event, Finished)
        return rehearsal

    def _calls(self, event: Event) -> tuple[list[dict[str, Any]], list[Any], Event]:
        """Answers the calls of a step with random numbers."""
        calls, answers = list[dict[str, Any]](), list[Any]()
        while isinstance(event, Denoise):
            if not isinstance(event.arguments[self.key], Tensor):
                raise UnsupportedError(f"{self.name} gives its model a list of latents; {ADVICE}")
            given = event.arguments[self.key].shape
            if len(calls) == len(self.outputs):
                self.shapes.append(given)
                self.outputs.append(_with_sample(self.evaluate(event.arguments), self.name))
            elif given != self.shapes[len(calls)]:
                raise UnsupportedError(f"{self.name} changes the shape of its latents between its steps; {ADVICE}")
            # A copy, since the pipeline may change it in place later.
            calls.append({**event.arguments, self.key: event.arguments[self.key].clone()})
            answers.append(map_sample(self.outputs[len(answers)], self._random))
            event = self.call.send(answers[-1])
        return calls, answers, event

    def _model_calls(
        self, calls: Sequence[dict[str, Any]], answers: Sequence[Any], given: StepCall
    ) -> tuple[tuple[ModelCall, ...], float]:
        """Determines how a step's model calls depend on its latents, and its prediction on latents and answers."""
        parts = [copies_of(sample_of(answer), given.sample) for answer in answers]
        first, *others = self._weights(given.sample, [part for each in parts for part in each], given.prediction)
        weights = iter(others)
        return tuple(
            ModelCall(named, self._factor(named[self.key], given.sample), tuple(next(weights) for _ in each))
            for named, each in zip(calls, parts, strict=True)
        ), first

    def _factor(self, sample: Tensor, latents: Tensor) -> float:
        """Returns the factor of the latents in a model's input, and puts zeros there."""
        place = place_of(latents, sample) if sample.ndim == latents.ndim else sample
        wanted = stacked(latents, len(sample)).double()
        if place.shape == wanted.shape:
            factor = float((wanted * place.double()).sum() / wanted.square().sum())
            if close(place, wanted * factor, sample):
                place.zero_()
                return factor
        raise UnsupportedError(
            f"{self.name}: what its model is given, {tuple(sample.shape)}, is not its latents, {tuple(latents.shape)}, "
            f"times a number; {ADVICE}"
        )

    def _weights(self, latents: Tensor, parts: Sequence[Tensor], prediction: Tensor) -> list[float]:
        """Returns the weights of latents and outputs in the prediction."""
        if all(part.shape == prediction.shape for part in (latents, *parts)):
            # Most predictions depend only on outputs.
            for every in (parts, (latents, *parts)):
                weights = fitted([part.double() for part in every], prediction.double())
                total = sum((w * part.double() for w, part in zip(weights, every, strict=True)), torch.zeros(()))
                if close(torch.as_tensor(total), prediction, prediction):
                    return [0.0] * (len(parts) + 1 - len(every)) + weights
        raise UnsupportedError(
            f"{self.name}: its prediction is not a weighted sum of its model's outputs, as where guidance keeps a "
            f"norm or parts of the picture are given; {ADVICE}"
        )

    def _check_repeats(self, given: StepCall) -> None:
        """Refuses a scheduler whose first step gives different results each time."""
        one, other = (given.repeat(copy_of(self.begin), given.prediction, given.sample)[0] for _ in range(2))
        if not torch.equal(one, other):
            raise UnsupportedError(
                f"{type(self.begin).__name__}: the same step comes out differently each time; give the pipeline a "
                f"generator, use another scheduler, or {ADVICE}"
            )

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.draw).to(like)

    def _noting(self, step: Method) -> Method:
        def note(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **named: Any) -> Any:
            names = list(inspect.signature(type(self.call.pipe.scheduler).step).parameters)[4:]
            given = {**dict(zip(names, args, strict=False)), **named}
            self.given = StepCall.of(model_output, timestep, sample, given)
            if self.begin is None:
                self.begin = copy.deepcopy(self.call.pipe.scheduler)
                self._check_repeats(self.given)
            return step(model_output, timestep, sample, *args, **named)

        return note


def _with_sample(output: Any, name: str) -> Any:
    try:
        num = len(samples_of(output))
        map_sample(output, torch.clone)
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        raise UnsupportedError(f"{name}: its model returns something other than a sample; {ADVICE}") from error
    if num != 1:
        raise UnsupportedError(f"{name}: its model returns {num} samples, and one is solved for here; {ADVICE}")
    return output


def _steps_from(scheduler: Any, time: Any) -> int:
    """Counts the steps of a scheduler from the one at a time on; some pipelines give a time for each sample."""
    times = [float(each) for each in scheduler.timesteps]
    return len(times) - times.index(float(time.flatten()[0] if isinstance(time, Tensor) else time))
