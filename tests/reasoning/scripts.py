"""Scripts for engines that only pretend: right answers with some probability, lengths from a distribution."""

from __future__ import annotations

import random
from collections.abc import Callable

from partsong.reasoning import Line, Request


def guesses(right: float, *, wrong: int = 3, mean_tokens: int = 40) -> Callable[[Request, random.Random], Line]:
    """Answers 7 with probability `right`, else one of some others; between half and twice the mean tokens."""

    def script(request: Request, draw: random.Random) -> Line:
        answer = 7 if draw.random() < right else draw.randint(8, 7 + wrong)
        return Line(text=f"so it is {answer}", tokens=max(4, round(mean_tokens * 2 ** draw.uniform(-1, 1))))

    return script
