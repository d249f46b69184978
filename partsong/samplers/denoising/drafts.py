"""Drafts a few points of a denoising trajectory with the last output, and evaluates them in one call of the model.

Source: DRiffusion (arXiv 2603.25872).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from partsong.knobs import Count, Whole, check_knobs, type_hints
from partsong.samplers.denoising.fixed_point import Evaluate, Solution, SolverStep

__all__ = ["drafts"]


def drafts(
    evaluate: Evaluate,
    start: Tensor,
    rules: Sequence[SolverStep],
    *,
    num: Count = 2,
    warmup: Annotated[int, Whole(0)] = 0,
    noise: Tensor | None = None,
) -> Solution:
    """Drafts a few points with the last output, evaluates them at once, and steps with the results.

    It is one unchecked sweep of `picard`. `num` drafts divide the number of rounds by `num`; 1 is `serial`.

    Args:
        evaluate: the model.
        start: first points, `[samples, ...]`.
        rules: the steps.
        num: drafts in a round.
        warmup: first steps that are taken one by one.
        noise: that of every step, `[steps, samples, ...]`, for rules that add some.

    Raises:
        ArgumentError: a number of drafts or of first steps out of bounds.

    >>> rules = [lambda point, output, carried, noise: (point + 0.1 * output, None)] * 5
    >>> drafts(lambda x, steps, samples: x, torch.ones(1, 1), rules, num=2).rounds
    3
    """
    check_knobs(type_hints(drafts), {"num": num, "warmup": warmup}, owner="drafts: ")
    count = len(start)

    def step(number: int, point: Tensor, output: Tensor, carried: Any) -> tuple[Tensor, Any]:
        return rules[number](point, output, carried, None if noise is None else noise[number])

    output = evaluate(start, [0] * count, list(range(count)))
    point, carried, number, rounds, taken = start, None, 0, 1, None
    while number < len(rules):
        size = 1 if number < warmup else min(num, len(rules) - number)
        drafted, ahead = (point, carried), list[Tensor]()
        for place in range(size):
            drafted = step(number + place, drafted[0], output, drafted[1])
            ahead.append(drafted[0])
        # The last draft's output starts the next round; after the last step there is nothing to evaluate.
        wanted = ahead if number + size < len(rules) else ahead[:-1]
        outputs = [output]
        if wanted:
            numbers = [number + 1 + place for place in range(len(wanted)) for _ in range(count)]
            fresh = evaluate(torch.cat(wanted), numbers, list(range(count)) * len(wanted))
            outputs += fresh.split(count)
            rounds += 1
        for place in range(size):
            taken = [(point, outputs[place], carried)]
            point, carried = step(number + place, point, outputs[place], carried)
        output, number = outputs[-1], number + size
    return Solution(point, rounds, count * len(rules), last=taken)
