"""Particle Gibbs repeats particle filtering, each time holding one text of the previous pass fixed."""

from __future__ import annotations

from typing import Annotated

from partsong.knobs import Count, Whole
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.particles import Swarm
from partsong.reasoning.strategies.steps import Finished, Stepper, StepScorer, Trace, looks_finished

__all__ = ["particle_gibbs"]


@checked
async def particle_gibbs(
    run: Run,
    question: str,
    *,
    extract: Extract,
    particles: Annotated[int, Whole(2)] = 4,
    iterations: Count = 2,
    max_steps: Count = 32,
    step_tokens: Count = 256,
    scorer: StepScorer | None = None,
    finished: Finished = looks_finished,
    separator: str = "\n\n",
    parameters: Parameters | None = None,
) -> Answer:
    """Repeats particle filtering, each time holding one text of the previous pass fixed.

    After each pass a text is drawn in proportion to its odds. It is a particle of the next pass and survives every
    resampling; its steps are not drawn again.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        particles: number of texts in a pass, including the one held fixed.
        iterations: number of passes.
        max_steps: most steps of a text.
        step_tokens: most tokens of a step.
        scorer: see `particle_filtering`.
        finished: returns whether a text has ended.
        separator: string that ends a step.
        parameters: how steps are drawn.

    Returns:
        The answer with the highest score of the last pass; ``details`` hold ``scores``, ``steps`` and ``passes``.

    Raises:
        ArgumentError: a knob is out of range, or a score is not from 0 to 1.

    Source: particle Gibbs in arXiv 2502.01618; Andrieu, Doucet and Holenstein, 2010.
    """
    stepper = Stepper(run, question, scorer, finished, separator, step_tokens, parameters)
    swarm, passes, spent = Swarm(stepper, particles, max_steps), 0, False
    held: Trace | None = None
    while passes < iterations and not spent:
        spent = await swarm.grow(f"pass {passes}", held)
        passes += 1
        held = held if spent else swarm.draw(f"pass {passes}")
    return swarm.answer(extract, spent, passes)
