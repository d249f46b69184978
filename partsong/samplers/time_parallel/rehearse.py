"""Runs a pipeline's loop once without its model, to learn what every step does with latents and predictions.

A step of most pipelines is three sums: the model's input is the latents times a number, beside what does not change;
the prediction is a weighted sum of the model's outputs, which is what guidance does; and the next latents are a
weighted sum of latents, prediction and noise. Here every step is tried out on random numbers, and refused if it does
something else. So a solver can take any step at any time, with the pipeline's own scheduler, guidance and noise.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.model_hooks import map_sample, sample_of, samples_of
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.samplers.denoising.fixed_point import StepRule
from partsong.samplers.pipeline.paused import Denoise, Event, Finished, PausedCall, Stepped
from partsong.samplers.pipeline.scheduler_checks import check_memoryless
from partsong.samplers.time_parallel.rehearsal import (
    ADVICE,
    ModelCall,
    Rehearsal,
    RehearsedStep,
    copies_of,
    place_of,
    stacked,
)
from partsong.samplers.time_parallel.sums import close, fitted

__all__ = ["rehearse"]


def rehearse(
    call: PausedCall,
    key: str,
    evaluate: Callable[[dict[str, Any]], Any],
    *,
    seed: int = 0,
    num_steps: int | None = None,
    rules: Sequence[StepRule] = (),
) -> Rehearsal:
    """Runs a pipeline's loop without its model up to the end of its last step.

    Args:
        call: a call of the pipeline that is not begun.
        key: the argument of the model that holds the latents.
        evaluate: the model; it is called in the first step alone.
        seed: of the random numbers that steps are tried out on.
        num_steps: how many steps the pipeline makes. Default: those that its scheduler has from the first one on.
        rules: those of the steps, where they are known. Default: the scheduler is tried out.

    Raises:
        UnsupportedError: a step does something that is not a sum, or the scheduler remembers earlier steps.
    """
    return _Rehearsing(call, key, evaluate, seed, num_steps, rules).run()


@dataclass(frozen=True, slots=True)
class _StepCall:
    """Holds what a pipeline gave its scheduler, and the states of generators at that time."""

    prediction: Tensor
    time: Any
    sample: Tensor
    named: dict[str, Any]
    random: tuple[Tensor, Tensor | None]


class _Rehearsing:
    def __init__(
        self,
        call: PausedCall,
        key: str,
        evaluate: Callable[[dict[str, Any]], Any],
        seed: int,
        num_steps: int | None,
        rules: Sequence[StepRule],
    ) -> None:
        self.call, self.key, self.evaluate, self.num_steps, self.rules = call, key, evaluate, num_steps, rules
        self.name = type(call.pipe).__name__
        self.draw = torch.Generator().manual_seed(seed)
        self.given: _StepCall | None = None
        # Of the calls of the first step.
        self.outputs, self.shapes = list[Any](), list[torch.Size]()
        replace_method(call.pipe.scheduler, "step", self._noting)

    def run(self) -> Rehearsal:
        """Goes from step to step."""
        event, sent = self.call.send(), None
        rehearsal: Rehearsal | None = None
        noises = list[Tensor | None]()
        while not isinstance(event, Finished):
            # A copy from before the step, to try it out.
            scheduler = self.call.pipe.scheduler if self.rules else copy.deepcopy(self.call.pipe.scheduler)
            calls, answers, event = self._calls(event)
            given = self.given
            if not isinstance(event, Stepped) or given is None or not calls:
                raise UnsupportedError(f"{self.name} calls its model and its scheduler in another order; {ADVICE}")
            if rehearsal is None:
                rehearsal = Rehearsal(self.call, self.key, given.sample.clone(), self.outputs)
                self.num_steps = self.num_steps or _steps_from(scheduler, given.time)
            elif sent is not None and not (given.sample.shape == sent.shape and torch.equal(given.sample, sent)):
                raise UnsupportedError(f"{self.name} changes the latents between its steps; {ADVICE}")
            number = len(rehearsal.steps)
            known = self.rules[number] if number < len(self.rules) else None
            rule, noise = self._rule(scheduler, given) if known is None else (known, None)
            rehearsal.steps.append(RehearsedStep(*self._model_calls(calls, answers, given), rule))
            noises.append(noise)
            if len(rehearsal.steps) == self.num_steps:
                rehearsal.last = functools.partial(_finished, scheduler, given)
                break
            sent = self._random(event.latents)
            event = self.call.send(sent.clone())
        if rehearsal is None:
            raise UnsupportedError(f"{self.name} did not call its model; {ADVICE}")
        rehearsal.is_over = isinstance(event, Finished)
        if any(noise is not None for noise in noises):
            rehearsal.noise = torch.stack([torch.zeros_like(rehearsal.start) if x is None else x for x in noises])
        return rehearsal

    def _calls(self, event: Event) -> tuple[list[dict[str, Any]], list[Any], Event]:
        """Answers the calls of a step with random numbers."""
        calls, answers = list[dict[str, Any]](), list[Any]()
        while isinstance(event, Denoise):
            if not isinstance(event.arguments[self.key], Tensor):
                raise UnsupportedError(f"{self.name} gives its model a list of latents; {ADVICE}")
            given = event.arguments[self.key].shape
            if len(calls) == len(self.outputs):
                if not self.outputs and not self.rules:  # before the model computes anything
                    _check_scheduler(self.call.pipe.scheduler, event.arguments[self.key])
                self.shapes.append(given)
                self.outputs.append(_with_sample(self.evaluate(event.arguments), self.name))
            elif given != self.shapes[len(calls)]:
                raise UnsupportedError(f"{self.name} changes the shape of its latents between its steps; {ADVICE}")
            # What a pipeline changes in place afterwards is not to change here.
            calls.append({**event.arguments, self.key: event.arguments[self.key].clone()})
            answers.append(map_sample(self.outputs[len(answers)], self._random))
            event = self.call.send(answers[-1])
        return calls, answers, event

    def _model_calls(
        self, calls: Sequence[dict[str, Any]], answers: Sequence[Any], given: _StepCall
    ) -> tuple[tuple[ModelCall, ...], float]:
        """Finds out how a step's model calls come of its latents, and its prediction of these and the answers."""
        parts = [copies_of(sample_of(answer), given.sample) for answer in answers]
        first, *others = self._weights(given.sample, [part for each in parts for part in each], given.prediction)
        weights = iter(others)
        return tuple(
            ModelCall(named, self._factor(named[self.key], given.sample), tuple(next(weights) for _ in each))
            for named, each in zip(calls, parts, strict=True)
        ), first

    def _factor(self, sample: Tensor, latents: Tensor) -> float:
        """Returns what the latents are multiplied by in a model's input, and puts zeros there."""
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
            # Most predictions are made of outputs alone.
            for every in (parts, (latents, *parts)):
                weights = fitted([part.double() for part in every], prediction.double())
                total = sum((w * part.double() for w, part in zip(weights, every, strict=True)), torch.zeros(()))
                if close(torch.as_tensor(total), prediction, prediction):
                    return [0.0] * (len(parts) + 1 - len(every)) + weights
        raise UnsupportedError(
            f"{self.name}: its prediction is not a weighted sum of its model's outputs, as where guidance keeps a "
            f"norm or parts of the picture are given; {ADVICE}"
        )

    def _rule(self, scheduler: Any, given: _StepCall) -> tuple[StepRule, Tensor | None]:
        """Finds out what the scheduler does, and what noise it has added."""
        zero, one = torch.zeros_like(given.sample), torch.ones_like(given.sample)
        nothing = _stepped(scheduler, given, zero, zero)
        keep = float((_stepped(scheduler, given, one, zero) - nothing).double().mean())
        output = float((_stepped(scheduler, given, zero, one) - nothing).double().mean())
        x, prediction = self._random(zero), self._random(zero)
        wanted = _stepped(scheduler, given, x, prediction)
        if not close(keep * x + output * prediction + nothing, wanted, wanted):
            raise UnsupportedError(
                f"{type(scheduler).__name__}: its step is no sum of latents, prediction and noise, as where it clips "
                f"or thresholds samples; switch that off, use another scheduler, or {ADVICE}"
            )
        if not nothing.any():
            return StepRule(keep, output), None
        return StepRule(keep, output, noise=1.0), _finished(copy.deepcopy(scheduler), given, zero, zero)[0]

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.draw).to(like)

    def _noting(self, step: Method) -> Method:
        def note(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **named: Any) -> Any:
            names = list(inspect.signature(type(self.call.pipe.scheduler).step).parameters)[4:]
            given = {**dict(zip(names, args, strict=False)), **named}
            given.pop("return_dict", None)
            given = {key: _copied(value) for key, value in given.items()}
            self.given = _StepCall(model_output.clone(), timestep, sample.clone(), given, _random_state(sample))
            return step(model_output, timestep, sample, *args, **named)

        return note


def _check_scheduler(scheduler: Any, latents: Tensor) -> None:
    try:
        check_memoryless(scheduler, latents)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(
            f"{type(scheduler).__name__}: it could not be shown that its steps do not depend on earlier ones "
            f"({error}); use a scheduler such as DDIM, Euler or flow matching, or {ADVICE}"
        ) from error


def _with_sample(output: Any, name: str) -> Any:
    try:
        num = len(samples_of(output))
        map_sample(output, torch.clone)
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        raise UnsupportedError(f"{name}: its model returns something other than a sample; {ADVICE}") from error
    if num != 1:
        raise UnsupportedError(f"{name}: its model returns {num} samples, and one is solved for here; {ADVICE}")
    return output


def _finished(scheduler: Any, given: _StepCall, prediction: Tensor, latents: Tensor) -> tuple[Any, ...]:
    """Returns what a scheduler makes of a prediction and latents, with the step's own noise, and what goes with it."""
    named = {key: _copied(value) for key, value in given.named.items()}
    with torch.random.fork_rng([latents.device] if latents.is_cuda else []):
        torch.set_rng_state(given.random[0])
        if given.random[1] is not None:
            torch.cuda.set_rng_state(given.random[1], latents.device)
        return tuple(scheduler.step(prediction, given.time, latents, **named, return_dict=False))


def _random_state(latents: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the states of the default generators that noise for some latents may come from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(latents.device) if latents.is_cuda else None


def _copied(value: Any) -> Any:
    """Copies generators, which draw on."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone_state() if isinstance(value, torch.Generator) else value


def _steps_from(scheduler: Any, time: Any) -> int:
    """Counts the steps of a scheduler from the one at a time on."""
    times = [float(each) for each in scheduler.timesteps]
    return len(times) - times.index(float(time))


def _stepped(scheduler: Any, given: _StepCall, sample: Tensor, prediction: Tensor) -> Tensor:
    """Returns what a copy of a scheduler makes of other numbers, always with the same noise."""
    twin, named = copy.deepcopy(scheduler), dict(given.named)
    if "generator" in named:
        named["generator"] = torch.Generator(sample.device).manual_seed(1)
    with torch.random.fork_rng([sample.device] if sample.is_cuda else []):
        torch.manual_seed(1)
        return twin.step(prediction, given.time, sample, **named, return_dict=False)[0]
