"""Holds the texts for workers that write side by side."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.reasoning.strategies.prompts import Prompts

__all__ = ["HogwildPrompts", "fill", "worker_names"]

_NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")


@dataclass(frozen=True, kw_only=True, slots=True)
class HogwildPrompts(Prompts):
    """Holds the prompts of `hogwild`, its headings, its labels and its questions.

    `problem` has the rules and the problem, and `alone` is the same for a single worker. `history` stands before the
    finished steps, `others` before what the others are writing, `own` before what a worker writes itself, and `label`
    at the beginning of each step. `probe` asks a worker whether it repeats another one's work. If all have run out of
    tokens without a result, one worker continues from `finish`.
    """

    problem: str = (
        "{names} solve the problem below together. They all write at the same time, and each of them sees at once what "
        "the others have written, unfinished sentences included. So they share the work: they settle early who does "
        "what, build on each other's results, point out mistakes, and never do again what somebody has done or is "
        "doing. Paragraphs are short. As soon as one of them is sure of the final result, it writes \\boxed{{result}}, "
        "and all stop.\n\nProblem:\n{question}"
    )
    alone: str = (
        "Solve the following problem step by step. When you are sure of the final result, write \\boxed{{result}}."
        "\n\nProblem:\n{question}"
    )
    history: str = "### Finished so far\n\n"
    others: str = "\n\n### The others, still writing\n\n"
    own: str = "\n\n### Myself, still writing\n\n"
    label: str = "**{name} [{step}]:** "
    probe: str = "Before I go on: is somebody else already doing this? (yes/no) "
    finish: str = "\n\nThere is no time left. From everything found so far, the final result is \\boxed{{"


def fill(template: str, **gaps: str) -> str:
    """Fills the gaps of a template.

    >>> fill("**{name}:** ", name="Bob")
    '**Bob:** '
    """
    return template.format(**gaps)


def worker_names(num: int) -> tuple[str, ...]:
    """Names a number of workers.

    >>> worker_names(2), worker_names(9)[-1]
    (('Alice', 'Bob'), 'Worker 9')
    """
    return tuple(_NAMES[number] if number < len(_NAMES) else f"Worker {number + 1}" for number in range(num))
