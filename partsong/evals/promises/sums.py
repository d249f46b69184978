"""Gives thinking methods the zoo's `sums` model: its problems, its prompts, and a check of its steps."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

from partsong import zoo
from partsong.evals.promises.evidence import Effort
from partsong.evals.reasoning.problem import Problem
from partsong.reasoning import Answer, Run
from partsong.reasoning.strategies.beam_search import beam_search
from partsong.reasoning.strategies.best_of_n import best_of_n
from partsong.reasoning.strategies.compute_optimal import compute_optimal
from partsong.reasoning.strategies.deepprune import deepprune
from partsong.reasoning.strategies.parallel_probe import parallel_probe
from partsong.reasoning.strategies.particle_filtering import particle_filtering
from partsong.reasoning.strategies.particle_gibbs import particle_gibbs
from partsong.reasoning.strategies.registry import ThinkingMethod, parse_thinking
from partsong.reasoning.strategies.steps import Trace

__all__ = ["MAX_TOKENS", "MODEL", "method", "problems", "steps_right"]

MODEL = "sums"
MAX_TOKENS = 96
_EQUATION = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
#: Chances that a text with right steps, or with a wrong one, leads to a right answer.
_RIGHT, _WRONG = 0.98, 0.02


def steps_right(question: str, text: str) -> float:
    """Scores the steps of a text: whether each computes rightly, with numbers that are there and unused.

    It does not know the answer, and does not see which sign a number has.

    >>> steps_right("8*25+6=?", "8*25=200, 200+6=206"), steps_right("8*25+6=?", "8*25=200, 25+6=31")
    (0.98, 0.02)
    """
    there = Counter(map(int, re.findall(r"\d+", question.rpartition("from ")[2])))
    for left, sign, right, result in _EQUATION.findall(text.partition("answer")[0]):
        a, b, c = int(left), int(right), int(result)
        used = Counter((a, b))
        if used - there or {"+": a + b, "-": a - b, "*": a * b}[sign] != c:
            return _WRONG
        there = there - used + Counter((c,))
    return _RIGHT


def _step_score(question: str, trace: Trace) -> float:
    return steps_right(question, trace.text)


def _same_steps(_question: str, one: str, other: str) -> float:
    """Returns 1 for two beginnings with the same whole equations, in any order."""
    first, second = (sorted(_EQUATION.findall(text)) for text in (one, other))
    return float(first == second)


async def _checked_best(run: Run, question: str, **knobs: Any) -> Answer:
    return await best_of_n(run, question, scorer=lambda sample: steps_right(question, sample.text), **knobs)


#: How methods that grow texts step by step see a step and its score.
_STEPS: dict[str, Any] = {
    "scorer": _step_score,
    "separator": ", ",
    "finished": lambda text: "answer: " in text,
    "step_tokens": 24,
}
#: What methods need besides knobs that text can set.
_NEEDS: dict[str, ThinkingMethod] = {
    "best-of-n": _checked_best,
    "beam-search": partial(beam_search, **_STEPS),
    "particle-filtering": partial(particle_filtering, **_STEPS),
    "particle-gibbs": partial(particle_gibbs, **_STEPS),
    "deepprune": partial(deepprune, judge=_same_steps),
    "parallel-probe": partial(parallel_probe, probe=". answer: ", probe_tokens=8),
    # Easy questions get few samples, hard ones many; the samples of a question agree the more, the easier it is.
    "compute-optimal": partial(compute_optimal, choices=[partial(_checked_best, num=num) for num in (32, 16, 8, 4, 2)]),
}


def method(text: str) -> ThinkingMethod:
    """Reads a thinking method with what it needs to think with the `sums` model.

    Raises:
        ArgumentError: the method or a knob is unknown.
    """
    thinking = parse_thinking(text)
    own = zoo.knobs_for(MODEL, thinking.name, thinking.knobs)
    needy = _NEEDS.get(thinking.name)
    return partial(thinking, **own) if needy is None else partial(needy, **thinking.knobs, **own)


def problems(family: str, effort: Effort) -> list[Problem]:
    """Draws problems of a family that the model was not trained on.

    Raises:
        ArgumentError: partsong-zoo is not installed.
    """
    task = zoo.task(MODEL)
    return [
        Problem(
            task=family,
            number=number,
            question=one.question,
            gold=task.answer_of(one.solution),
            check=partial(_right, one.question),
            extract=task.answer_of,
        )
        for number, one in enumerate(task.examples(effort.problems, effort.seed, [family]))
    ]


def _right(question: str, answer: str | None) -> bool:
    return answer is not None and zoo.task(MODEL).check(question, answer)
