"""Beam search over steps: the best few texts are continued in several ways each."""

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
    """Keeps the `beams` best texts after each step, each of which is continued in `width` ways.

    The first step is drawn beams times width. Ended texts stay in the running with the score they have.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        beams: texts kept.
        width: continuations of each.
        max_steps: most steps of a text.
        step_tokens: most tokens of a step.
        aggregate: score of a text from those of its steps: the "last", the "min", or their product, "prod".
        selection: "best", the text with the highest score; "weighted", a vote of all kept texts by score.
        distinct: whether texts that read alike are kept once; the paper keeps all, and they crowd others out.
        scorer: chance that a text is on the right way, of (question, trace), between 0 and 1; None is the confidence
            of the newest step, see `Stepper`.
        finished: whether a text has ended.
        separator: ends a step.
        parameters: of the draws.

    Returns:
        The answer; its ``calls`` are the steps of its text. ``details["scores"]``: of all kept texts.

    Raises:
        ArgumentError: a knob out of range, or a score outside 0 to 1.

    Source: search against verifiers, arXiv 2408.03314.
    """
    stepper = Stepper(run, question, scorer, finished, separator, step_tokens, parameters)
    tree = SearchTree(stepper, (), beams, width, max_steps, aggregate, distinct)
    return best_of_trees(stepper, extract, [await tree.grow()], aggregate, selection)
