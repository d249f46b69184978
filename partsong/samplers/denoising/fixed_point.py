"""Solves for many points of a denoising trajectory at once, instead of walking from one to the next.

The points of a trajectory are the fixed point of "step from the previous point with the model's output there". Guesses
at several points can be evaluated in one call of the model, and right guesses save steps. Everything
here is a plain function of a model `evaluate`; steps are data.

Source: ParaDiGMS (Shih et al., arXiv 2305.16317).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.knobs import Count, Number, check_knobs, type_hints

__all__ = ["Evaluate", "Solution", "SolverStep", "picard", "serial"]

#: The model: points `[n, ...]`, the number of the step that starts at each, and the sample each belongs to -> outputs
#: `[n, ...]`.
Evaluate = Callable[[Tensor, list[int], list[int]], Tensor]


class SolverStep(Protocol):
    """Takes one step of a solver, which may carry a memory of earlier steps."""

    def __call__(self, point: Tensor, output: Tensor, carried: Any, noise: Tensor | None) -> tuple[Tensor, Any]:
        """Returns the next point and the `carried` value for the next step; the first step gets None.

        Args:
            point: where the step starts.
            output: output of the model there.
            carried: value from the previous step. It is not changed.
            noise: noise of the step.
        """
        ...


@dataclass(frozen=True, slots=True)
class Solution:
    """Holds the end of a trajectory, and its cost.

    Attributes:
        sample: the last points, `[samples, ...]`.
        rounds: calls of the model one after the other.
        evaluations: points at which the model was evaluated.
        residual: the largest error, as a root mean square over a point, that was accepted instead of another round.
        last: for each sample the inputs of the last step: point, output and `carried`. With
            `drafts` and `serial`, which step all samples at once, one entry. None where a method keeps none.
    """

    sample: Tensor
    rounds: int
    evaluations: int
    residual: float = 0.0
    last: Sequence[tuple[Tensor, Tensor, Any]] | None = None


def serial(evaluate: Evaluate, start: Tensor, rules: Sequence[SolverStep], noise: Tensor | None = None) -> Solution:
    """Takes one step after the other: the serial twin of all other methods.

    Args:
        evaluate: the model.
        start: first points, `[samples, ...]`.
        rules: the steps.
        noise: that of every step, `[steps, samples, ...]`, for rules with noise.

    >>> rules = [lambda point, output, carried, noise: (point + output, None)] * 3
    >>> serial(lambda x, steps, samples: x, torch.ones(1, 1), rules).sample
    tensor([[8.]])
    """
    point, carried, samples, last = start, None, list(range(len(start))), None
    for number, rule in enumerate(rules):
        output = evaluate(point, [number] * len(start), samples)
        last = [(point, output, carried)]
        point, carried = rule(point, output, carried, None if noise is None else noise[number])
    return Solution(point, len(rules), len(rules) * len(start), last=last)


class _Window:
    """Solves one sample: points from `begin` on; those before are final."""

    def __init__(
        self, start: Tensor, rules: Sequence[SolverStep], noise: Tensor | None, window: int, *, bundles: bool
    ) -> None:
        self.rules, self.noise, self.window, self.bundles = rules, noise, window, bundles
        self.begin, self.end, self.residual = 0, min(1, len(rules)), 0.0
        self.points = [start]  # of steps begin, begin + 1, ..., end
        self.carried: Any = None  # the `carried` value of the step at `begin`,
        self.last: tuple[Tensor, Tensor, Any] | None = None  # and the inputs of the previous step

    @property
    def done(self) -> bool:
        return self.begin == len(self.rules)

    def advance(self, outputs: Tensor, tolerances: Sequence[float]) -> None:
        """Steps through the window with its outputs, and moves it to the first point that is not settled."""
        point, carried, right = self.points[0], self.carried, 0
        new, kept, is_settled = [point], [carried], True
        for place, output in enumerate(outputs):
            number = self.begin + place
            point, carried = self._step(number, point, output, carried)
            new.append(point)
            kept.append(carried)
            if is_settled and place + 1 < len(self.points):
                error = self._distance(point, self.points[place + 1])
                # The output at the next point counts only if that point is where it was evaluated.
                is_settled = place + 1 < len(outputs) and error <= tolerances[number]
                if is_settled:
                    right, self.residual = right + 1, max(self.residual, error)
        moved = min(right + 1, len(outputs))
        self.carried, self.last = kept[moved], (new[moved - 1], outputs[moved - 1], kept[moved - 1])
        self.begin += moved
        self.points = new[moved:]
        self.end = self.begin + len(self.points) - 1
        while self.end < min(self.begin + self.window, len(self.rules)):
            # Points ahead are guessed with the last known output.
            point, carried = self._step(self.end, self.points[-1], outputs[-1], carried)
            self.points.append(point)
            self.end += 1

    def _distance(self, one: Tensor, other: Tensor) -> float:
        """Returns the root mean square of a difference; for a bundle, that of the worst row."""
        squares = (one - other).double().square()
        return float((squares.flatten(1).mean(1) if self.bundles else squares.mean()).sqrt().max())

    def _step(self, number: int, point: Tensor, output: Tensor, carried: Any) -> tuple[Tensor, Any]:
        return self.rules[number](point, output, carried, None if self.noise is None else self.noise[number])


def picard(
    evaluate: Evaluate,
    start: Tensor,
    rules: Sequence[SolverStep],
    *,
    window: Count = 4,
    tolerance: Annotated[float, Number(0)] = 1e-2,
    scales: Sequence[float] | None = None,
    noise: Tensor | None = None,
    bundles: bool = False,
) -> Solution:
    """Evaluates a window of points in each round, and moves it past those that no longer change.

    Every sample has a window of its own, so none waits for another. A round settles at least one point, so there are
    at most as many rounds as steps. With tolerance 0 a point settles when it repeats itself to the last bit, and the
    result is that of `serial` but for rounding between batches of different sizes.

    Args:
        evaluate: the model.
        start: first points, `[samples, ...]`.
        rules: the steps.
        window: points of a sample in a round.
        tolerance: how much a point may still have changed, as a root mean square, in units of `scales`.
        scales: for every step, the scale of its tolerance, such as its noise level. Default: 1.
        noise: that of every step, `[steps, samples, ...]`, for rules that add some.
        bundles: whether a sample is a bundle of several, `[rows, ...]`, which are evaluated together and move on once
            the worst of them has settled.

    Returns:
        The last points. `Solution.residual` certifies them: no output was used that was evaluated further than this
        from the trajectory.

    Raises:
        ArgumentError: a window or tolerance out of bounds, or not a scale for each step.

    >>> rules = [lambda point, output, carried, noise: (point + 0.1 * output, None)] * 8
    >>> picard(lambda x, steps, samples: 0 * x + 1, torch.zeros(1, 2), rules).rounds
    3
    """
    check_knobs(type_hints(picard), {"window": window, "tolerance": tolerance}, owner="picard: ")
    if scales is not None and len(scales) != len(rules):
        raise ArgumentError(f"picard: {len(scales)} scales for {len(rules)} steps; give one for each")
    tolerances = [tolerance * scale for scale in (scales or [1.0] * len(rules))]
    windows = [
        _Window(point, rules, None if noise is None else noise[:, sample], window, bundles=bundles)
        for sample, point in enumerate(start)
    ]
    rounds = evaluations = 0
    while going := [(sample, each) for sample, each in enumerate(windows) if not each.done]:
        points = torch.stack([point for _, each in going for point in each.points[: each.end - each.begin]])
        numbers = [number for _, each in going for number in range(each.begin, each.end)]
        samples = [sample for sample, each in going for _ in range(each.begin, each.end)]
        outputs = evaluate(points, numbers, samples)
        parts = outputs.split([each.end - each.begin for _, each in going])
        for (_, each), part in zip(going, parts, strict=True):
            each.advance(part, tolerances)
        rounds, evaluations = rounds + 1, evaluations + len(numbers)
    sample, last = torch.stack([each.points[0] for each in windows]), [w.last for w in windows if w.last is not None]
    return Solution(sample, rounds, evaluations, max(each.residual for each in windows), last or None)
