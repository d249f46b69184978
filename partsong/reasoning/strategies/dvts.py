"""Diverse verifier tree search grows several small trees instead of one."""

from __future__ import annotations

from typing import Literal

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import together
from partsong.reasoning.strategies.steps import Aggregate, Finished, Stepper, StepScorer, looks_finished
from partsong.reasoning.strategies.trees import SearchTree, best_of_trees

__all__ = ["dvts"]


@checked
async def dvts(
    run: Run,
    question: str,
    *,
    extract: Extract,
    trees: Count = 4,
    width: Count = 4,
    max_steps: Count = 32,
    step_tokens: Count = 256,
    aggregate: Aggregate = "last",
    selection: Literal["best", "weighted"] = "best",
    scorer: StepScorer | None = None,
    finished: Finished = looks_finished,
    separator: str = "\n\n",
    parameters: Parameters | None = None,
) -> Answer:
    """Runs `trees` independent searches, each of which keeps the best of `width` continuations at every step.

    Trees do not wait for each other, and cannot be crowded out by one early favourite.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        trees: number of searches.
        width: continuations of each text.
        max_steps: see `beam_search`, also for all that follow.
        step_tokens: most tokens of a step.
        aggregate: how the scores of its steps become the score of a text.
        selection: how the texts of the trees become one answer.
        scorer: returns the chance that a text is on the right track.
        finished: returns whether a text has ended.
        separator: string that ends a step.
        parameters: how steps are drawn.

    Returns:
        The answer; ``details["scores"]`` holds the score of each tree's text.

    Raises:
        ArgumentError: a knob is out of range, or a score is not from 0 to 1.

    Source: diverse verifier tree search, Beeching et al., "Scaling test-time compute with open models", 2024.
    """
    stepper = Stepper(run, question, scorer, finished, separator, step_tokens, parameters)
    grown = [SearchTree(stepper, (f"tree {t}",), 1, width, max_steps, aggregate) for t in range(trees)]
    results = await together(tree.grow() for tree in grown)
    return best_of_trees(stepper, extract, [kept for kept in results if kept is not None], aggregate, selection)
