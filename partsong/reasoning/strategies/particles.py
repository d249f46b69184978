"""A swarm of texts that grow step by step and are resampled by how promising they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.strategies.parts import together
from partsong.reasoning.strategies.steps import Stepper, Trace
from partsong.seeds import derive

__all__ = ["Swarm", "odds", "systematic"]

#: Scores are kept this far from 0 and 1, where odds would be none.
_EDGE = 1e-6


def systematic(weights: Sequence[float], num: int, start: float) -> list[int]:
    """Systematic resampling: each place is drawn floor or ceil of num times its share, with the right mean.

    Args:
        weights: 0 or more, not all 0.
        num: places to draw.
        start: one uniform number, 0 <= start < 1, for all draws.

    Returns:
        Places, ascending.

    >>> systematic([0.5, 0.25, 0.25], 4, 0.1)
    [0, 0, 1, 2]
    """
    total, drawn, reach, place = sum(weights), [], weights[0], 0
    for turn in range(num):
        while reach * num <= (turn + start) * total and place < len(weights) - 1:
            place += 1
            reach += weights[place]
        drawn.append(place)
    return drawn


def odds(trace: Trace) -> float:
    """Weight of a trace: the odds of its newest score, which is the softmax of their logarithm before it is summed."""
    score = min(max(trace.score(), _EDGE), 1 - _EDGE)
    return score / (1 - score)


class Swarm:
    """Texts and how they move.

    Args:
        stepper: extends and scores them.
        num: how many.
        max_steps: most steps of a pass.
    """

    def __init__(self, stepper: Stepper, num: int, max_steps: int) -> None:
        self.stepper, self.num, self.max_steps = stepper, num, max_steps
        self.traces: list[Trace] = []
        self.waits: tuple[str, ...] = ()
        self.steps = 0

    async def fly(self, label: str, held: Trace | None) -> bool:
        """One pass; returns whether the budget ended it. What was complete by then is kept."""
        empty = Trace(separator=self.stepper.separator)
        swarm = [empty] * self.num
        for step in range(self.max_steps):
            path = tuple(filter(None, (label, f"step {step}")))
            moves = [self._moved(trace, path, i, held, step) for i, trace in enumerate(swarm)]
            moved = await together(moves)
            made = [trace for trace in moved if trace is not None]
            self.waits = tuple(n for t in made for n in t.names[step : step + 1]) or self.waits
            if len(made) < len(moved):
                self.traces = made or self.traces
                return True
            self.traces, self.steps = made, self.steps + 1
            if all(trace.finished for trace in made):
                break
            swarm = self._resampled(made, path, held is not None)
        return False

    def _resampled(self, made: list[Trace], path: tuple[str, ...], hold: bool) -> list[Trace]:
        draw = random.Random(derive(self.stepper.run.seed, "resample", *path))
        weights = [odds(trace) for trace in made]
        if not hold:
            return [made[i] for i in systematic(weights, self.num, draw.random())]
        # With one place given away, systematic draws would no longer be right on average; independent ones are.
        return [made[0], *(made[systematic(weights, 1, draw.random())[0]] for _ in range(self.num - 1))]

    def drawn(self, label: str) -> Trace:
        """One text, drawn in proportion to its odds."""
        start = random.Random(derive(self.stepper.run.seed, "hold", label)).random()
        return self.traces[systematic([odds(trace) for trace in self.traces], 1, start)[0]]

    async def _moved(self, trace: Trace, path: tuple[str, ...], place: int, held: Trace | None, step: int) -> Trace:
        if held is not None and place == 0:
            size = min(step + 1, len(held.steps))
            ended = held.finished and size == len(held.steps)
            return replace(held, steps=held.steps[:size], scores=held.scores[:size], finished=ended)
        return await self.stepper.extend(trace, path=path, sample=place, waits=self.waits)

    def answer(self, extract: Extract, spent: bool, passes: int) -> Answer:
        """The text with the highest score; ended ones come first."""
        ranked = sorted(self.traces, key=lambda t: (t.spoilt, not t.finished, -t.score()))
        scores = [trace.score() for trace in self.traces]
        best = ranked[0] if ranked else None
        stopped = "budget" if spent else "done"
        return self.stepper.answer(best, extract, stopped, scores=scores, steps=self.steps, passes=passes)
