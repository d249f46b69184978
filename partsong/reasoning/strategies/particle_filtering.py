"""Particle filtering grows texts step by step and resamples them by how promising they are."""

from __future__ import annotations

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.particles import Swarm
from partsong.reasoning.strategies.steps import Finished, Stepper, StepScorer, looks_finished

__all__ = ["particle_filtering"]


@checked
async def particle_filtering(
    run: Run,
    question: str,
    *,
    extract: Extract,
    particles: Count = 8,
    max_steps: Count = 32,
    step_tokens: Count = 256,
    scorer: StepScorer | None = None,
    finished: Finished = looks_finished,
    separator: str = "\n\n",
    parameters: Parameters | None = None,
) -> Answer:
    """Grows `particles` texts step by step; after each step, promising ones are continued more often.

    Texts are drawn for the next step in proportion to the odds of their newest score, by systematic resampling. Texts
    that have ended take part as they are. In the end the one with the highest score is the answer.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        particles: number of texts.
        max_steps: most steps of a text.
        step_tokens: most tokens of a step.
        scorer: takes (question, trace) and returns the chance, from 0 to 1, that the text is on the right track. None
            takes the confidence of the newest step, see `Stepper`.
        finished: returns whether a text has ended.
        separator: string that ends a step.
        parameters: how steps are drawn.

    Returns:
        The answer; its ``calls`` are the steps of its text. ``details`` hold the ``scores`` of all texts and the number
        of ``steps``.

    Raises:
        ArgumentError: a knob is out of range, or a score is not from 0 to 1.

    Source: particle-based inference scaling, arXiv 2502.01618.
    """
    stepper = Stepper(run, question, scorer, finished, separator, step_tokens, parameters)
    swarm = Swarm(stepper, particles, max_steps)
    spent = await swarm.grow("", None)
    return swarm.answer(extract, spent, 1)
