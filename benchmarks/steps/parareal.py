"""Corrects coarse steps over blocks of a denoising trajectory by fine steps of all blocks in parallel.

Source: self-refining diffusion samplers (SRDS, arXiv 2412.08292), after parareal integration (Lions, Maday, Turinici
2001).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from benchmarks.steps.step_rule import StepRule
from partsong.errors import ArgumentError
from partsong.knobs import Count, Number, check_knobs, type_hints
from partsong.samplers.denoising.fixed_point import Evaluate, Solution

__all__ = ["parareal"]


class _Blocks:
    """Steps over blocks, coarsely or finely, and counts the cost."""

    def __init__(
        self, evaluate: Evaluate, count: int, rules: Sequence[StepRule], num: int, noise: Tensor | None
    ) -> None:
        self.evaluate, self.rules, self.noise = evaluate, rules, noise
        self.samples, self.num = list(range(count)), num
        self.edges = [len(rules) * block // num for block in range(num + 1)]
        self.rounds = self.evaluations = 0

    def _outputs(self, points: Sequence[Tensor], numbers: Sequence[int]) -> Sequence[Tensor]:
        """Evaluates the model at the points of several blocks in one call."""
        count = len(self.samples)
        wanted = [number for number in numbers for _ in range(count)]
        self.rounds, self.evaluations = self.rounds + 1, self.evaluations + len(wanted)
        return self.evaluate(torch.cat(list(points)), wanted, self.samples * len(numbers)).split(count)

    def _step(self, number: int, points: Tensor, output: Tensor) -> Tensor:
        return self.rules[number](points, output, None, None if self.noise is None else self.noise[number])[0]

    def coarse(self, block: int, point: Tensor) -> Tensor:
        """Takes all steps of a block with the output at its beginning."""
        (output,) = self._outputs([point], [self.edges[block]])
        for number in range(self.edges[block], self.edges[block + 1]):
            point = self._step(number, point, output)
        return point

    def fine(self, begins: Sequence[Tensor]) -> list[Tensor]:
        """Takes the steps of all blocks, the first ones of every block together, and so on."""
        points, sizes = list(begins), [after - before for before, after in itertools.pairwise(self.edges)]
        for offset in range(max(sizes)):
            going = [block for block in range(self.num) if offset < sizes[block]]
            numbers = [self.edges[block] + offset for block in going]
            outputs = self._outputs([points[block] for block in going], numbers)
            for block, number, output in zip(going, numbers, outputs, strict=True):
                points[block] = self._step(number, points[block], output)
        return points


def parareal(
    evaluate: Evaluate,
    start: Tensor,
    rules: Sequence[StepRule],
    *,
    num_blocks: Count | None = None,
    tolerance: Annotated[float, Number(0)] = 1e-3,
    noise: Tensor | None = None,
) -> Solution:
    """Corrects coarse steps over blocks until the end no longer moves.

    After n corrections the first n blocks are those of `serial`, so there are at most as many corrections as blocks.

    Args:
        evaluate: the model.
        start: first points, `[samples, ...]`.
        rules: the steps, without outputs of the previous step.
        num_blocks: how many blocks. Default: the square root of the number of steps, rounded up.
        tolerance: corrections end once the last point changes by less, as a root mean square over a sample.
        noise: that of every step, `[steps, samples, ...]`, for rules that add some.

    Returns:
        The last points; `Solution.residual` is the change of the last correction.

    Raises:
        ArgumentError: a number out of bounds, or rules that use the output of the previous step.

    >>> rules = [StepRule(1.0, 0.1)] * 9
    >>> solved = parareal(lambda x, steps, samples: x, torch.ones(1, 1), rules, tolerance=0.0)
    >>> float((solved.sample - 1.1**9).abs()) < 1e-6
    True
    """
    check_knobs(type_hints(parareal), {"num_blocks": num_blocks, "tolerance": tolerance}, owner="parareal: ")
    if any(rule.before for rule in rules):
        raise ArgumentError("parareal: steps that use the output of the previous step cannot be cut into blocks")
    num = min(len(rules), math.isqrt(len(rules) - 1) + 1 if num_blocks is None else num_blocks)
    blocks, ends, change = _Blocks(evaluate, len(start), rules, num, noise), [start], 0.0
    for block in range(num):
        ends.append(blocks.coarse(block, ends[-1]))
    guesses = ends[1:]
    for done in range(num):
        corrected, before = blocks.fine(ends[:-1]), ends[-1]
        # The blocks before `done` are final, and so is the result of the fine steps of the one at `done`.
        ends[done + 1] = corrected[done]
        for block in range(done + 1, num):
            guess = blocks.coarse(block, ends[block])
            ends[block + 1] = corrected[block] + guess - guesses[block]
            guesses[block] = guess
        change = float((ends[-1] - before).double().square().flatten(1).mean(1).sqrt().max())
        if change < tolerance:
            break
    return Solution(ends[-1], blocks.rounds, blocks.evaluations, change)
