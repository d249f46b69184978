"""Measures promises of thinking methods: tokens saved, answers gained, and how they scale."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from partsong.evals.promises.evidence import Effort, Evidence, judged, ratio
from partsong.evals.promises.exams import EXAMS, answered
from partsong.evals.reasoning.intervals import Difference, Resampler
from partsong.evals.reasoning.outcome import Outcome
from partsong.reasoning import Message, Parameters, Run
from partsong.reasoning.strategies.decompose import decompose
from partsong.reasoning.strategies.splits import ProblemSplit

__all__ = ["Gain", "Parts", "Saving", "Scaling", "factor_of"]

Family = Literal["sum", "countdown", "humaneval"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Measures how much less one method writes than another, and whether its answers are as good.

    Attributes:
        method: the method of the paper.
        than: what it is compared with.
        share: the share of the other's tokens that the paper promises, at most.
        points: how much accuracy it may lose, in per cent.
        counts: `tokens_total`, or `tokens_critical` for the tokens that are written one after another.
        family: kind of problems.
    """

    method: str
    than: str
    share: float
    points: float = 0.0
    counts: str = "tokens_total"
    family: Family = "countdown"

    def __call__(self, effort: Effort, work: Path) -> Evidence:
        """Answers the problems with both methods."""
        done = answered(self.family, (self.method, self.than), effort, work)
        counts = {name: [outcome.counts[self.counts] for outcome in outcomes] for name, outcomes in done.items()}
        value, low, high = ratio(counts, self.method, self.than, effort.seed)
        change = _difference(done, self.method, self.than, effort)
        good = change.mean >= -self.points / 100
        return Evidence(
            value=value,
            low=low,
            high=high,
            measured=f"{value:.2f} of the tokens ({low:.2f} to {high:.2f}), accuracy {_points(change)}",
            cost=_cost(done, self.method, self.than),
            verdict=judged(met=good and value <= self.share, helps=good and high < 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Measures how many more questions one method answers than another.

    Attributes:
        method: the method of the paper.
        than: what it is compared with.
        points: what the paper promises, in per cent.
        family: kind of problems.
    """

    method: str
    than: str
    points: float = 0.0
    family: Family = "countdown"

    def __call__(self, effort: Effort, work: Path) -> Evidence:
        """Answers the problems with both methods."""
        done = answered(self.family, (self.method, self.than), effort, work)
        change = _difference(done, self.method, self.than, effort)
        return Evidence(
            value=100 * change.mean,
            low=100 * change.low,
            high=100 * change.high,
            measured=f"accuracy {_points(change)}",
            cost=_cost(done, self.method, self.than),
            verdict=judged(met=change.low > 0 and 100 * change.mean >= self.points, helps=change.low > 0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Measures how many tokens another method needs for as many right answers.

    Attributes:
        method: the method of the paper.
        than: the other, with `{}` where the number of samples goes.
        factor: the factor that the paper promises.
        family: kind of problems.
    """

    method: str
    than: str
    factor: float
    family: Family = "countdown"

    def __call__(self, effort: Effort, work: Path) -> Evidence:
        """Answers the problems with the method, and with the other at 1, 2, 4 ... samples."""
        sizes = [2**power for power in range(effort.samples.bit_length())]
        curve = [self.than.format(size) for size in sizes]
        done = answered(self.family, (self.method, *curve), effort, work)
        tokens, right = (
            np.asarray([[_value(outcome, name) for outcome in done[text]] for text in (self.method, *curve)])
            for name in ("tokens_total", "right")
        )
        draws = np.random.default_rng(effort.seed).integers(0, tokens.shape[1], (2000, tokens.shape[1]))
        factors = [factor_of(tokens[:, draw].mean(axis=1), right[:, draw].mean(axis=1)) for draw in draws]
        low, high = (float(end) for end in np.quantile(factors, [0.025, 0.975]))
        value = factor_of(tokens.mean(axis=1), right.mean(axis=1))
        best = right[1:].mean(axis=1).max()
        more = "" if right[0].mean() <= best else f"; it never gets that far ({best:.1%} at {sizes[-1]} samples)"
        return Evidence(
            value=value,
            low=low,
            high=high,
            measured=f"the other needs {value:.1f}x of the tokens ({low:.1f}x to {high:.1f}x){more}",
            cost=_cost(done, self.method),
            # An interval that holds 1 shows nothing, however large the value.
            verdict=judged(met=value >= self.factor and low > 1, helps=low > 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Measures how much sooner a request of independent parts is answered when all are asked at once.

    Attributes:
        num: parts of a request.
        factor: the speed-up that the paper promises.
        family: kind of problems.
    """

    num: int
    factor: float
    family: Family = "sum"

    def __call__(self, effort: Effort, work: Path) -> Evidence:
        """Answers as many requests as there are rounds, part by part and by `decompose`, in turn."""
        from partsong.reasoning.local import LocalEngine

        exam = EXAMS[self.family]
        asked = [problem.question for problem in exam.problems(self.family, replace(effort, problems=self.num))]
        split = ProblemSplit(template="[DATA]", data=tuple(asked))

        async def both(engine: LocalEngine, turn: int) -> tuple[float, float, int]:
            """Returns the seconds of both ways, and how many parts have another text."""
            settings, begin = Parameters(max_tokens=exam.max_tokens, temperature=0.0), time.perf_counter()
            run = Run(engine, seed=turn, name="in turn")
            texts = [(await run.call([Message("user", (q,))], path=(q,), parameters=settings)).text for q in asked]
            middle, run = time.perf_counter(), Run(engine, seed=turn, name="at once")
            answer = await decompose(run, "", extract=str.strip, split=split, parameters=settings)
            differing = sum(a.strip() != b for a, b in zip(texts, answer.text.split("\n\n"), strict=True))
            return middle - begin, time.perf_counter() - middle, differing

        async def rounds() -> list[tuple[float, float, int]]:
            engine = LocalEngine(exam.model)
            try:
                await both(engine, effort.rounds)  # a first run packs weights
                return [await both(engine, turn) for turn in range(effort.rounds)]
            finally:
                await engine.close()

        times = asyncio.run(rounds())
        speeds = sorted(one / many for one, many, _ in times)
        value, low, high = median(speeds), speeds[0], speeds[-1]
        return Evidence(
            value=value,
            low=low,
            high=high,
            measured=f"{value:.1f}x sooner ({low:.1f}x to {high:.1f}x), {times[-1][2]} of {self.num} texts differ",
            cost=f"{median(many for _, many, _ in times):.2f} s for {self.num} parts",
            verdict=judged(met=value >= self.factor and not times[-1][2], helps=low > 1 and not times[-1][2]),
        )


def factor_of(tokens: np.ndarray, right: np.ndarray) -> float:
    """Returns the tokens at which a curve reaches the first method's accuracy, over that method's tokens.

    Between two points of the curve tokens are interpolated by their logarithm. A curve that never gets there counts
    with its last point, so that the factor is then a lower bound.
    """
    reached = np.maximum.accumulate(right[1:])
    if reached[-1] <= right[0]:
        return float(tokens[-1] / tokens[0])
    place = int(np.argmax(reached >= right[0]))
    if place == 0:
        return float(tokens[1] / tokens[0])
    share = (right[0] - reached[place - 1]) / max(reached[place] - reached[place - 1], 1e-12)
    low, high = np.log(tokens[place]), np.log(tokens[place + 1])
    return float(np.exp(low + share * (high - low)) / tokens[0])


def _value(outcome: Outcome, name: str) -> float:
    return float(outcome.right) if name == "right" else outcome.counts[name]


def _difference(done: dict[str, list[Outcome]], method: str, than: str, effort: Effort) -> Difference:
    scores = {name: [float(outcome.right) for outcome in outcomes] for name, outcomes in done.items()}
    return Resampler(scores, seed=effort.seed).difference(method, than)


def _points(change: Difference) -> str:
    return f"{100 * change.mean:+.1f} points ({100 * change.low:+.1f} to {100 * change.high:+.1f})"


def _cost(done: dict[str, list[Outcome]], *names: str) -> str:
    """Says how right each method is and what it writes per problem."""
    return "; ".join(f"`{name}`: {_line(done[name])}" for name in names)


def _line(outcomes: Sequence[Outcome]) -> str:
    right = sum(outcome.right for outcome in outcomes) / len(outcomes)
    total, critical = (np.mean([o.counts[name] for o in outcomes]) for name in ("tokens_total", "tokens_critical"))
    return f"{right:.1%}, {total:.0f} tokens, {critical:.0f} one after another"
