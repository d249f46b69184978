"""Walks a trajectory in cycles; each of several solvers guesses its points with its own last output.

Source: ParaStep (arXiv 2505.14741).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partsong.knobs import Count, check_knobs, type_hints
from partsong.samplers.denoising.fixed_point import Evaluate, Solution, SolverStep

__all__ = ["reused_outputs"]


def reused_outputs(
    evaluate: Evaluate,
    start: Tensor,
    rules: Sequence[SolverStep],
    *,
    num: Count = 2,
    warmup: Count = 5,
    noise: Tensor | None = None,
) -> Solution:
    """Takes `num` steps in a round, with outputs at points guessed from outputs one round old.

    The solver of the k-th step of a cycle walks there with its output of the previous cycle. Then all steps are taken
    with the new outputs. `drafts` guesses with the latest output of all instead, which is closer.

    Args:
        evaluate: the model.
        start: first points, `[samples, ...]`.
        rules: the steps.
        num: steps in a round.
        warmup: how many steps are taken one by one before.
        noise: that of every step, `[steps, samples, ...]`, for rules that add some.

    Raises:
        ArgumentError: not a positive number of steps.

    >>> from benchmarks.steps.step_rule import StepRule
    >>> rules = [StepRule(1.0, 0.1)] * 9
    >>> reused_outputs(lambda x, steps, samples: x, torch.ones(1, 1), rules, num=2).rounds
    7
    """
    check_knobs(type_hints(reused_outputs), {"num": num, "warmup": warmup}, owner="reused_outputs: ")
    samples, kept = list(range(len(start))), list[Tensor]()

    def step(number: int, point: Tensor, output: Tensor, carried: Any) -> tuple[Tensor, Any]:
        return rules[number](point, output, carried, None if noise is None else noise[number])

    point, carried, number, rounds = start, None, 0, 0
    while number < len(rules):
        size = min(num, len(rules) - number) if number >= warmup else 1
        points = list[Tensor]()
        for place in range(size):
            guess = point, carried
            for ahead in range(place):
                guess = step(number + ahead, guess[0], kept[place], guess[1])  # its own output, from the previous round
            points.append(guess[0])
        numbers = [number + place for place in range(size) for _ in samples]
        outputs = list(evaluate(torch.cat(points), numbers, samples * size).split(len(samples)))
        for place, output in enumerate(outputs):
            point, carried = step(number + place, point, output, carried)
        # A single output so far serves every solver.
        kept = outputs if size == num else outputs * num
        number, rounds = number + size, rounds + 1
    return Solution(point, rounds, len(rules) * len(start))
