"""Draws arithmetic problems as stories: somebody has some things, and gains, loses or shares them."""

from __future__ import annotations

import random
from functools import partial
from typing import Annotated

from partsong.evals.reasoning.judges import is_number
from partsong.evals.reasoning.problem import NumProblems, Problem
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.reasoning.answers.extract import final_number
from partsong.seeds import derive

__all__ = ["problems"]

_PEOPLE = ("Ada", "Bruno", "Carla", "Deniz", "Emil", "Farida", "Goran", "Hanna", "Ivo", "Jana", "Kofi", "Lena")
_THINGS = ("apples", "marbles", "stickers", "shells", "pencils", "coins", "walnuts", "buttons", "beads", "stamps")
#: Sentences for each kind of event.
_SENTENCES = {
    "gain": ("{who} finds {k} more {things}.", "A friend gives {who} another {k} {things}."),
    "lose": ("{who} gives {k} of the {things} away.", "{who} loses {k} {things}."),
    "times": ("An aunt multiplies what {who} has by {k}.", "In a game, {who} ends up with {k} times as many {things}."),
    "share": (
        "{who} shares all {things} evenly among {k} people, {who} being one of them, and keeps that one share.",
        "{who} puts all {things} into {k} equal bags and goes on with one bag.",
    ),
    "packs": ("{who} buys {k} packs of {m} {things} each.", "{k} children bring {who} {m} {things} each."),
}


def problems(
    num: NumProblems,
    seed: int = 0,
    *,
    steps: Annotated[int, Whole(1, 12)] = 3,
    largest: Annotated[int, Whole(2, 100)] = 20,
) -> list[Problem]:
    """Draws stories; the number of things stays a whole number from 1 to 10,000.

    Args:
        num: how many.
        seed: problem i depends on the seed, i and the knobs, but not on `num`.
        steps: how many events each story has.
        largest: of the numbers in a story, except that the first may be three times as large.

    Returns:
        The problems, with ``start`` and ``events`` in their ``facts``; an event is a kind and two numbers.

    Raises:
        ArgumentError: a knob is outside its range.

    >>> problem = problems(1, seed=3)[0]
    >>> problem.check(problem.gold)
    True
    """
    check_knobs(type_hints(problems), {"num": num, "steps": steps, "largest": largest})
    return [_problem(number, seed, steps, largest) for number in range(num)]


def _problem(number: int, seed: int, steps: int, largest: int) -> Problem:
    rng = random.Random(derive(seed, "word_problems", steps, largest, number))
    who, things = rng.choice(_PEOPLE), rng.choice(_THINGS)
    start = rng.randint(2, 3 * largest)
    have, events, story = start, [], [f"{who} has {start} {things}."]
    for _ in range(steps):
        kind, k, m = _event(have, largest, rng)
        have = {"gain": have + k, "lose": have - k, "times": have * k, "share": have // k, "packs": have + k * m}[kind]
        events.append((kind, k, m))
        story.append(rng.choice(_SENTENCES[kind]).format(who=who, things=things, k=k, m=m))
    return Problem(
        task="word_problems",
        number=number,
        question=f"{' '.join(story)} How many {things} does {who} have now? Reason step by step, end with the number.",
        gold=str(have),
        check=partial(is_number, gold=str(have)),
        extract=final_number,
        facts={"start": start, "events": tuple(events)},
    )


def _event(have: int, largest: int, rng: random.Random) -> tuple[str, int, int]:
    """Draws an event that can happen to somebody who has `have` things."""
    divisors = [k for k in range(2, min(largest, 12) + 1) if have % k == 0 and have > k]
    kinds = ["gain", "packs"] if have < 9000 else []
    kinds += ["lose"] if have > 1 else []
    kinds += ["times"] if have <= 500 else []
    kinds += ["share"] if divisors else []
    kind = rng.choice(kinds)
    if kind == "share":
        return kind, rng.choice(divisors), 0
    if kind == "lose":
        return kind, rng.randint(1, min(largest, have - 1)), 0
    return (
        kind,
        rng.randint(2, min(largest, 9 if kind == "packs" else 5 if kind == "times" else largest)),
        (rng.randint(2, largest) if kind == "packs" else 0),
    )
