"""Runs several solvers along one trajectory from different starts; those behind correct those ahead.

Source: CHORDS (Han et al., arXiv 2507.15260), for memoryless steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.steps.step_rule import StepRule
from partsong.errors import ArgumentError
from partsong.samplers.denoising.fixed_point import Evaluate, Solution

__all__ = ["chords"]


@dataclass
class _Walker:
    """Walks the trajectory from a guess.

    Attributes:
        number: the step it is at,
        point: and the points there.
        begin: the step from which it was last corrected, or where it began,
        begin_point: the points there,
        begin_output: and the model's output; None until it is evaluated.
    """

    number: int
    point: Tensor
    begin: int
    begin_point: Tensor
    begin_output: Tensor | None = None


def chords(evaluate: Evaluate, start: Tensor, rules: Sequence[StepRule], *, begins: Sequence[int] = (0, 7)) -> Solution:
    """Returns the end of the foremost of several solvers, which the others have corrected on the way.

    The solver that begins at step 0 walks like `serial`. Each other solver begins with one coarse step from the start
    of the one behind it. Whenever a solver reaches the step from which the next one was last corrected, the next one's
    point is corrected by the difference between two coarse steps from there: one from the old point, one from the new.
    Nothing is checked.

    Args:
        evaluate: the model.
        start: first points, `[samples, ...]`.
        rules: the steps, without noise and without outputs of the previous step.
        begins: the step at which each solver begins, from 0 on.

    Returns:
        The last points of the foremost solver. A round evaluates the model once for every solver.

    Raises:
        ArgumentError: the solvers' beginnings do not rise from 0, or steps have noise or a memory.

    >>> rules = [StepRule(1.0, 0.1)] * 8
    >>> chords(lambda x, steps, samples: 0 * x + 1, torch.zeros(1, 2), rules, begins=(0, 4)).rounds
    5
    """
    if list(begins) != sorted(set(begins)) or begins[0] != 0 or begins[-1] >= len(rules):
        raise ArgumentError(f"chords: begins={tuple(begins)}; they rise from 0 and end before step {len(rules)}")
    if any(rule.before or rule.noise for rule in rules):
        raise ArgumentError("chords: steps with noise or with the output of the previous step cannot be corrected")
    samples, walkers = list(range(len(start))), [_Walker(0, start, 0, start)]
    rounds = evaluations = 0
    while walkers[-1].number < len(rules) or len(walkers) < len(begins):
        numbers = [walker.number for walker in walkers for _ in samples]
        points = torch.cat([walker.point for walker in walkers])
        outputs = evaluate(points, numbers, samples * len(walkers)).split(len(samples))
        rounds, evaluations = rounds + 1, evaluations + len(numbers)
        foremost = walkers[-1]
        ahead = None
        if len(walkers) < len(begins):  # the next one begins, a coarse step from the foremost's start
            number = begins[len(walkers)]
            point = _coarse(rules, foremost.number, number, foremost.point, outputs[-1])
            ahead = _Walker(number, point, number, point)
        _walk(walkers, rules, outputs)
        walkers += [] if ahead is None else [ahead]
    return Solution(walkers[-1].point, rounds, evaluations)


def _walk(walkers: Sequence[_Walker], rules: Sequence[StepRule], outputs: Sequence[Tensor]) -> None:
    """Lets every solver take a step, and corrects those whose follower has reached their start."""
    before = [(walker.number, walker.point) for walker in walkers]
    for walker, output in zip(walkers, outputs, strict=True):
        if walker.begin_output is None:
            walker.begin_output = output
        walker.point, _ = rules[walker.number](walker.point, output, None, None)
        walker.number += 1
    for place, walker in enumerate(walkers[1:]):
        number, point = before[place]
        if number == walker.begin:
            assert walker.begin_output is not None
            wrong = _coarse(rules, number, walker.number, walker.begin_point, walker.begin_output)
            walker.point = walker.point - wrong + _coarse(rules, number, walker.number, point, outputs[place])
            walker.begin, walker.begin_point, walker.begin_output = walker.number, walker.point, None


def _coarse(rules: Sequence[StepRule], first: int, last: int, point: Tensor, output: Tensor) -> Tensor:
    """Takes several steps with one output."""
    for rule in rules[first:last]:
        point, _ = rule(point, output, None, None)
    return point
