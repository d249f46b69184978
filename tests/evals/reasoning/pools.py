"""Scripted problems and engines for tests of pools and suites."""

from __future__ import annotations

import random

from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.tasks import TASKS
from partsong.reasoning import Line, Parameters, Request, ScriptedEngine

#: With confidence.
DRAWN = Parameters(max_tokens=60, temperature=0.8, logprobs=5)


def problems(num: int, seed: int = 1) -> list[Problem]:
    return TASKS["multiplication"](num, seed=seed, digits=2)


def script(request: Request, draw: random.Random) -> Line:
    """Right with a skill that differs by question; a few say nothing, and a few never end."""
    numbers = [int(word.strip("?.")) for word in request.messages[-1].text.split() if word.strip("?.").isdigit()]
    right = numbers[0] * numbers[1] if len(numbers) > 1 else 7
    skill = 0.15 + (right % 7) / 10
    answer = right if draw.random() < skill else right + draw.choice([-10, -1, 1, 10])
    text = f"that makes {answer}." if draw.random() > 0.1 else "no idea."
    tokens = round(30 * 2 ** draw.uniform(-1.5, 1.3))
    return Line(text=text, tokens=tokens, confidence=tuple(draw.uniform(1, 5) + (answer == right) for _ in range(4)))


def engine(**more: float) -> ScriptedEngine:
    return ScriptedEngine(script, name="scripted", **more)  # type: ignore[arg-type]
