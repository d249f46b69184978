"""Describes what every step of a pipeline does with latents and predictions (see `rehearse`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.same_arguments import equal_arguments
from partsong.parallel.hooks.samples import sample_of
from partsong.samplers.pipeline.paused import Finished, PausedCall
from partsong.samplers.time_parallel.scheduled import ScheduledStep
from partsong.samplers.time_parallel.sums import weight_slack

__all__ = ["ADVICE", "Findings", "ModelCall", "Rehearsal", "RehearsedStep", "copies_of", "place_of", "stacked"]

#: What to do instead, for the end of a refusal.
ADVICE = "use Ulysses or another strategy that keeps the pipeline's own loop"


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Describes one call of the model in a step.

    Attributes:
        arguments: of the call; its sample holds zeros where the latents belong.
        factor: what latents are multiplied by.
        weights: those of the output's parts in the prediction, one for each copy of the batch in the call.
    """

    arguments: dict[str, Any]
    factor: float
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RehearsedStep:
    """Describes one step of a pipeline.

    Attributes:
        calls: of the model.
        latents: the weight of the latents themselves in the prediction.
        rule: makes the next latents of these and the prediction.
    """

    calls: tuple[ModelCall, ...]
    latents: float
    rule: ScheduledStep


@dataclass(slots=True)
class Rehearsal:
    """Holds what was learned from a pipeline's call, which waits before the end of its last step.

    Attributes:
        call: the call; `finish` continues it.
        key: the argument of the model that holds the latents.
        start: the first latents.
        outputs: the model's outputs, one for each call of the first step.
        steps: the steps.
        is_over: whether the pipeline has ended before its scheduler's last step.
    """

    call: PausedCall
    key: str
    start: Tensor
    outputs: list[Any]
    steps: list[RehearsedStep] = field(default_factory=list)
    is_over: bool = False

    @property
    def rules(self) -> list[ScheduledStep]:
        """Lists the rules of the steps."""
        return [step.rule for step in self.steps]

    @property
    def numbers(self) -> list[float]:
        """Lists all numbers that were learned."""
        return [number for step in self.steps for number in _numbers_of(step)]

    @numbers.setter
    def numbers(self, values: Sequence[float]) -> None:
        left = iter(values)
        for place, step in enumerate(self.steps):
            latents = next(left)
            calls = tuple(
                replace(call, factor=next(left), weights=tuple(next(left) for _ in call.weights)) for call in step.calls
            )
            self.steps[place] = replace(step, latents=latents, calls=calls)

    def arguments(self, call: ModelCall, latents: Tensor) -> dict[str, Any]:
        """Returns the arguments of a call with other latents."""
        given = call.arguments[self.key].clone()
        place_of(latents, given).copy_(stacked(latents * call.factor, len(given)))
        return {**call.arguments, self.key: given}

    def prediction(self, step: int, latents: Tensor, outputs: Sequence[Any]) -> Tensor:
        """Computes a step's prediction from its latents and the outputs of its calls."""
        rehearsed = self.steps[step]
        weights = [weight for call in rehearsed.calls for weight in call.weights]
        parts = [part for output in outputs for part in copies_of(sample_of(output), self.start)]
        first = rehearsed.latents * latents if rehearsed.latents else torch.zeros_like(parts[0])
        return sum((weight * part for weight, part in zip(weights, parts, strict=True)), first)

    def finish(self, results: tuple[Any, ...]) -> Any:
        """Continues the pipeline after its last step, and returns its output.

        Args:
            results: the scheduler's return value in the last step.

        Raises:
            UnsupportedError: it makes more steps than its scheduler has.
        """
        event = self.call.send(results)
        if not isinstance(event, Finished):
            raise UnsupportedError(
                f"{type(self.call.pipe).__name__} goes on after the last of its scheduler's steps; {ADVICE}"
            )
        self.call.hand_back_random_state()
        return event.output


@dataclass(frozen=True, slots=True)
class Findings:
    """Holds the findings of a rehearsal that must not depend on its random numbers.

    Attributes:
        weights: for every step, those of the latents and of the outputs' parts in the prediction.
        arguments: for every step and call, the model's arguments that are not those of the first step.
        given: for every step, the scheduler's arguments that are not those of the first step.
        slack: how far weights may differ by rounding.
    """

    weights: list[list[float]]
    arguments: list[list[dict[str, Any]]]
    given: list[dict[str, Any]]
    slack: float

    @classmethod
    def of(cls, rehearsal: Rehearsal) -> Findings:
        """Collects the findings of a rehearsal."""
        steps, first = rehearsal.steps, rehearsal.steps[0]
        known = [call.arguments for call in first.calls]
        return cls(
            [[step.latents, *(weight for call in step.calls for weight in call.weights)] for step in steps],
            [
                [
                    _changed(call.arguments, known[branch] if branch < len(known) else {})
                    for branch, call in enumerate(step.calls)
                ]
                for step in steps
            ],
            [_changed(_tensors(step.rule.given.named), _tensors(first.rule.given.named)) for step in steps],
            weight_slack([sample_of(output) for output in rehearsal.outputs]),
        )

    def check_same(self, other: Findings, name: str) -> None:
        """Refuses a pipeline whose numbers depend on the model's outputs, as in rescaled guidance.

        Args:
            other: findings of the same pipeline with other random numbers.
            name: the pipeline's.

        Raises:
            UnsupportedError: their steps differ.
        """
        if [*map(len, self.arguments)] != [*map(len, other.arguments)]:
            raise UnsupportedError(f"{name} calls its model more or less often, as its outputs are; {ADVICE}")
        for number, (here, there) in enumerate(zip(self.arguments, other.arguments, strict=True)):
            if key := next((key for pair in zip(here, there, strict=True) if (key := _unequal(*pair))), None):
                raise UnsupportedError(
                    f"{name}: in step {number} its model's {key} depends on the steps before, and not by its "
                    f"latents alone; {ADVICE}"
                )
            if key := _unequal(self.given[number], other.given[number]):
                raise UnsupportedError(f"{name}: in step {number} its scheduler's {key} depends on latents; {ADVICE}")
            weights = self.weights[number]
            apart = max(abs(x - y) for x, y in zip(weights, other.weights[number], strict=True))
            if apart > self.slack * max(1.0, *map(abs, weights)):
                raise UnsupportedError(
                    f"{name}: in step {number} guidance weighs the model's outputs by what they are, as "
                    f"guidance_rescale does; set that to 0, or {ADVICE}"
                )

    def are_those_of(self, other: Findings | None) -> bool:
        """Says whether another rehearsal, of an earlier generation, has found the same."""
        try:
            if other is not None:
                self.check_same(other, "")
        except (UnsupportedError, ValueError):  # they belong to another call, or a number depends on the outputs
            return False
        return other is not None


def _changed(named: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in named.items() if not equal_arguments(value, first.get(key))}


def _tensors(named: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in named.items() if isinstance(value, Tensor)}


def _unequal(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Names an argument that differs between two calls."""
    return next((key for key in one.keys() | other if not equal_arguments(one.get(key), other.get(key))), None)


def _numbers_of(step: RehearsedStep) -> list[float]:
    parts = [number for call in step.calls for number in (call.factor, *call.weights)]
    return [step.latents, *parts]


def stacked(latents: Tensor, rows: int) -> Tensor:
    """Returns copies of a batch, one after another."""
    return torch.cat([latents] * (rows // len(latents)))


def place_of(latents: Tensor, sample: Tensor) -> Tensor:
    """Returns the part of a model's input that holds the latents: other channels may follow."""
    for dim in range(1, latents.ndim):
        sample = sample.narrow(dim, 0, min(latents.shape[dim], sample.shape[dim]))
    return sample


def copies_of(output: Tensor, latents: Tensor) -> list[Tensor]:
    """Cuts an output into the copies of its batch; a variance after a prediction's channels is left out."""
    if output.ndim == latents.ndim:
        output = place_of(latents, output)
    return list(output.split(len(latents)))
