"""Beam search grows texts step by step and continues each of the best few in several ways."""

from __future__ import annotations

from typing import Literal

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.steps import Aggregate, Finished, Stepper, StepScorer, looks_finished
from partsong.reasoning.strategies.trees import SearchTree, best_of_trees

__all__ = ["beam_search"]


@checked
async def beam_search(
    run: Run,
    question: str,
    *,
    extract: Extract,
    beams: Count = 4,
    width: Count = 4,
    max_steps: Count = 32,
    step_tokens: Count = 256,
    aggregate: Aggregate = "last",
    selection: Literal["best", "weighted"] = "best",
    distinct: bool = False,
    scorer: StepScorer | None = None,
    finished: Finished = looks_finished,
    separator: str = "\n\n",
    parameters: Parameters | None = None,
) -> Answer:
    """Keeps the `beams` best texts after each step and continues each of them in `width` ways.

    The first step is drawn `beams` * `width` times. Texts that have ended stay in the running with the score they have.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        beams: texts kept after each step.
        width: continuations of each text.
        max_steps: most steps of a text.
        step_tokens: most tokens of a step.
        aggregate: how the scores of its steps become the score of a text: "last", "min", or "prod" for their product.
        selection: "best" takes the text with the highest score; "weighted" lets all kept texts vote by score.
        distinct: whether identical texts are kept once. The paper keeps all, and they crowd others out.
        scorer: takes (question, trace) and returns the chance, from 0 to 1, that the text is on the right track. None
            takes the confidence of the newest step, see `Stepper`.
        finished: returns whether a text has ended.
        separator: string that ends a step.
        parameters: how steps are drawn.

    Returns:
        The answer; its ``calls`` are the steps of its text. ``details["scores"]`` holds the scores of all kept texts.

    Raises:
        ArgumentError: a knob is out of range, or a score is not from 0 to 1.

    Source: search against verifiers, arXiv 2408.03314.
    """
    stepper = Stepper(run, question, scorer, finished, separator, step_tokens, parameters)
    tree = SearchTree(stepper, (), beams, width, max_steps, aggregate, distinct)
    return best_of_trees(stepper, extract, [await tree.grow()], aggregate, selection)
