"""Draws the offline tasks of ParallelBench from seeds, to show what decoding many tokens at once can and cannot do.

The tasks are operations on a waiting line, sums, dominoes, Latin squares and sudokus. Some have one answer, which
parallel decoding can write in one step. Others have many equally good answers whose tokens depend on each other, and
these it cannot write in one step. The tasks are those of ParallelBench, but the wording, the names and the draws are
our own, so scores cannot be compared with published ones. Its text tasks (summaries, paraphrases, sentences) are left
out, because they need data and grammar checkers. This module loads no torch; the runner is in
`partsong.evals.parallelbench.runner`.

Source: ParallelBench, arXiv 2510.04767.

>>> problem = problems("reverse", 1, seed=1)[0]
>>> score(problem, problem.answer)["score_strict"]
1.0
"""

from __future__ import annotations

import random
from typing import Annotated

from partsong import seeds, zoo
from partsong.evals.parallelbench.drawing import draw_answer, draw_facts
from partsong.evals.parallelbench.questions import ask
from partsong.evals.parallelbench.scoring import score
from partsong.evals.parallelbench.task import BenchProblem, Facts, Language, Task, task_of, tasks
from partsong.knobs import Whole, check_knobs, type_hints

__all__ = ["Facts", "Language", "BenchProblem", "Task", "problems", "score", "task_of", "tasks"]


def problems(
    name: str, num: Annotated[int, Whole(0)] = 100, seed: int = 0, *, language: Language = "chat"
) -> list[BenchProblem]:
    """Draws problems of a task, with its sizes in turn.

    Args:
        name: of the task.
        num: how many.
        seed: problem i depends on the seed, the task and i, but not on `num`.
        language: "chat", or "lists" for the prompts of the zoo's `lists` models, drawn by their own task.

    Returns:
        The problems.

    Raises:
        ArgumentError: the language has no such task, or the number is negative.

    >>> problems("sort", 1, language="lists")[0].prompt().split()[0]
    'sort'
    """
    task = task_of(name, language)
    check_knobs(type_hints(problems), {"num": num})
    draw = _in_lists if language == "lists" else _in_chat
    return [draw(task, number, seed) for number in range(num)]


def _in_chat(task: Task, number: int, seed: int) -> BenchProblem:
    size = task.sizes[number % len(task.sizes)]
    rng = random.Random(seeds.derive(seed, "parallelbench", task.name, number))
    facts = draw_facts(task.name, size, rng)
    answer, question = draw_answer(task.name, facts, rng), ask(task.name, facts)
    return BenchProblem(
        task=task.name,
        number=number,
        size=size,
        language="chat",
        facts=facts,
        question=question,
        answer=answer,
        example=_example(task, seed, question),
    )


def _example(task: Task, seed: int, question: str) -> tuple[str, str]:
    """Draws a worked example of the smallest size: one for all problems of a seed, except one that asks the same."""
    attempt = 0
    while True:
        rng = random.Random(seeds.derive(seed, "parallelbench example", task.name, attempt))
        facts = draw_facts(task.name, min(task.sizes), rng)
        if (shown := ask(task.name, facts)) != question:
            return shown, draw_answer(task.name, facts, rng)
        attempt += 1


def _in_lists(task: Task, number: int, seed: int) -> BenchProblem:
    size = task.lists_sizes[number % len(task.lists_sizes)]
    rng = random.Random(seeds.derive(seed, "parallelbench lists", task.name, number))
    drawn = zoo.task("lists").draw(task.lists, rng, size)
    return BenchProblem(
        task=task.name,
        number=number,
        size=size,
        language="lists",
        facts=Facts(),
        question=drawn.prompt,
        answer=drawn.answer,
    )
