"""Grows a swarm of texts step by step and resamples them by how promising they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.strategies.parts import together
from partsong.reasoning.strategies.steps import Stepper, Trace
from partsong.seeds import derive

__all__ = ["Swarm", "odds", "systematic"]

#: Scores are kept this far from 0 and 1, where odds would be zero or infinite.
_EDGE = 1e-6


def systematic(weights: Sequence[float], num: int, start: float) -> list[int]:
    """Draws `num` places, ascending, by systematic resampling; `start`, uniform in [0, 1), serves all draws.

    Each place is drawn floor or ceil of num times its share of the weights, with the right mean.

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
    """Returns the weight of a trace: the odds of its newest score. To draw by odds is a softmax over log-odds."""
    score = min(max(trace.score(), _EDGE), 1 - _EDGE)
    return score / (1 - score)


class Swarm:
    """Holds `num` texts and grows them step by step, by at most `max_steps` steps in a pass."""

    def __init__(self, stepper: Stepper, num: int, max_steps: int) -> None:
        self.stepper, self.num, self.max_steps = stepper, num, max_steps
        self.traces: list[Trace] = []
        self.waits: tuple[str, ...] = ()
        self.steps = 0

    async def grow(self, label: str, held: Trace | None) -> bool:
        """Makes one pass; returns whether the budget ended it. The texts that are complete by then are kept."""
        empty = Trace(separator=self.stepper.separator)
        swarm = [empty] * self.num
        for step in range(self.max_steps):
            path = tuple(filter(None, (label, f"step {step}")))
            results = await together(self._extend(trace, path, i, held, step) for i, trace in enumerate(swarm))
            traces = [trace for trace in results if trace is not None]
            self.waits = tuple(n for t in traces for n in t.names[step : step + 1]) or self.waits
            if len(traces) < len(results):
                self.traces = traces or self.traces
                return True
            self.traces, self.steps = traces, self.steps + 1
            if all(trace.finished for trace in traces):
                break
            swarm = self._resample(traces, path, held is not None)
        return False

    def _resample(self, traces: list[Trace], path: tuple[str, ...], hold: bool) -> list[Trace]:
        draw = random.Random(derive(self.stepper.run.seed, "resample", *path))
        weights = [odds(trace) for trace in traces]
        if not hold:
            return [traces[i] for i in systematic(weights, self.num, draw.random())]
        # With one place given away, systematic draws would no longer be right on average; independent ones are.
        return [traces[0], *(traces[systematic(weights, 1, draw.random())[0]] for _ in range(self.num - 1))]

    def draw(self, label: str) -> Trace:
        """Draws one text in proportion to its odds."""
        start = random.Random(derive(self.stepper.run.seed, "hold", label)).random()
        return self.traces[systematic([odds(trace) for trace in self.traces], 1, start)[0]]

    async def _extend(self, trace: Trace, path: tuple[str, ...], place: int, held: Trace | None, step: int) -> Trace:
        """Adds a step to a text; the text that is held fixed gets the step it already has."""
        if held is not None and place == 0:
            size = min(step + 1, len(held.steps))
            ended = held.finished and size == len(held.steps)
            return replace(held, steps=held.steps[:size], scores=held.scores[:size], finished=ended)
        return await self.stepper.extend(trace, path=path, sample=place, waits=self.waits)

    def answer(self, extract: Extract, spent: bool, passes: int) -> Answer:
        """Returns the answer of the text with the highest score; texts that have ended come first."""
        ranked = sorted(self.traces, key=lambda t: (t.spoilt, not t.finished, -t.score()))
        scores = [trace.score() for trace in self.traces]
        best = ranked[0] if ranked else None
        stopped = "budget" if spent else "done"
        return self.stepper.answer(best, extract, stopped, scores=scores, steps=self.steps, passes=passes)
