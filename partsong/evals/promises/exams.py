"""Answers problems of an exam with thinking methods; what a stopped run has answered is not answered again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from partsong.evals.promises import programs, sums
from partsong.evals.promises.evidence import Effort
from partsong.evals.reasoning.outcome import Outcome
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.suite import evaluate, greedy
from partsong.reasoning import Parameters
from partsong.reasoning.strategies.registry import ThinkingMethod

__all__ = ["EXAMS", "Exam", "answered"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """Says who is asked what.

    Attributes:
        model: who is asked.
        problems: draws the problems of a family.
        method: reads a thinking method with what it needs for these problems.
        max_tokens: of a call.
        together: problems at the same time.
    """

    model: str
    problems: Callable[[str, Effort], list[Problem]]
    method: Callable[[str], ThinkingMethod]
    max_tokens: int
    together: int = 16

    def read(self, text: str) -> ThinkingMethod:
        """Reads a thinking method, or ``greedy``.

        Raises:
            ArgumentError: the method or a knob is unknown.
        """
        return greedy if text == "greedy" else self.method(text)


_SUMS = Exam(model=sums.MODEL, problems=sums.problems, method=sums.method, max_tokens=sums.MAX_TOKENS)
#: The exams by family of problems.
EXAMS = {
    "sum": _SUMS,
    "countdown": _SUMS,
    "humaneval": Exam(
        model=programs.MODEL, problems=programs.problems, method=programs.method, max_tokens=256, together=4
    ),
}


def answered(family: str, texts: Sequence[str], effort: Effort, work: Path) -> dict[str, list[Outcome]]:
    """Answers the problems of a family with every method.

    Args:
        family: one of `EXAMS`.
        texts: methods as `Exam.read` takes them.
        effort: how many problems, and their seed.
        work: folder of a file for each method.
    """
    from partsong.reasoning.local import LocalEngine

    exam = EXAMS[family]

    async def run() -> dict[str, list[Outcome]]:
        engine, done = LocalEngine(exam.model, max_rows=128), {}
        try:
            for text in texts:
                file = f"{family}-{effort.problems}-{re.sub(r'[^a-z0-9]+', '-', text)}.jsonl"
                done[text] = await evaluate(
                    exam.problems(family, effort),
                    {text: exam.read(text)},
                    engine,
                    seed=effort.seed,
                    parameters=Parameters(max_tokens=exam.max_tokens),
                    outcomes=work / file,
                    together=exam.together,
                )
        finally:
            await engine.close()
        return done

    return asyncio.run(run())
