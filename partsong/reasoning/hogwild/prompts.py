"""What workers that write side by side are told, as data."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.reasoning.strategies.prompts import Prompts

__all__ = ["HogwildPrompts", "filled", "worker_names"]

_NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")


@dataclass(frozen=True, kw_only=True, slots=True)
class HogwildPrompts(Prompts):
    """What `hogwild` says: the rules with the problem; the same for one that is alone; headings, labels and questions.

    `history` stands before the finished steps, `others` before what the others are writing, `own` before what a worker
    writes itself, `label` at the beginning of each step. `probe` asks a worker whether it repeats another one's work.
    `finish` is put into the mouth of one where all have run out of tokens and nobody has named a result.
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


def filled(template: str, **gaps: str) -> str:
    """A template as text, its gaps filled.

    >>> filled("**{name}:** ", name="Bob")
    '**Bob:** '
    """
    return template.format(**gaps)


def worker_names(num: int) -> tuple[str, ...]:
    """Names of workers.

    >>> worker_names(2), worker_names(9)[-1]
    (('Alice', 'Bob'), 'Worker 9')
    """
    return tuple(_NAMES[number] if number < len(_NAMES) else f"Worker {number + 1}" for number in range(num))
