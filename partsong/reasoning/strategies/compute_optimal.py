"""Compute-optimal thinking estimates from a few samples how hard a question is, and spends the rest accordingly."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from partsong.errors import ArgumentError
from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, Scorer, await_score, together
from partsong.reasoning.strategies.pdr import pdr
from partsong.reasoning.strategies.self_consistency import self_consistency
from partsong.reasoning.strategies.sequential_refinement import sequential_refinement

__all__ = ["EASY_TO_HARD", "compute_optimal"]

#: A strategy with its knobs: called with (run, question, extract=..., parameters=...).
Choice = Callable[..., Coroutine[Any, Any, Answer]]

#: The default for five bins. Easy questions are revised in sequence; the harder a question, the more drafts it gets.
EASY_TO_HARD: tuple[Choice, ...] = (
    partial(sequential_refinement, rounds=2, stable=2),
    partial(sequential_refinement, rounds=4, stable=2),
    partial(self_consistency, num=16),
    partial(pdr, schedule=(8, 4, 1)),
    partial(pdr, schedule=(16, 8, 1)),
)


@checked
async def compute_optimal(
    run: Run,
    question: str,
    *,
    extract: Extract,
    probes: Count = 4,
    choices: Sequence[Choice] = EASY_TO_HARD,
    edges: Sequence[float] | None = None,
    scorer: Scorer | None = None,
    parameters: Parameters | None = None,
) -> Answer:
    """Draws a few samples, estimates the difficulty from them, and runs the method for that difficulty.

    The estimate needs no answer key. It is the mean score of the samples under `scorer` or, without one, the share of
    them that name the most frequent answer. Choose bins and strategies from runs of your model on questions with
    answers; the defaults are a beginning.

    Args:
        run: makes the calls.
        question: the problem.
        extract: finds the answer in a text.
        probes: number of samples for the estimate.
        choices: strategies from the easiest bin to the hardest; fix their knobs with `functools.partial`.
        edges: ascending values of the estimate between the bins, one fewer than choices. None spaces them evenly
            between 0 and 1.
        scorer: returns the chance that a completion is right; may be async.
        parameters: how the probes and all that follows are drawn.

    Returns:
        The answer of the chosen strategy, or the vote of the probes where that strategy found no answer. ``details``
        hold the estimate ``ease``, the ``bin``, where 0 is the easiest, and ``inner``, the chosen strategy's details.

    Raises:
        ArgumentError: a knob is out of range, there are no choices, or the edges do not fit them.

    Source: Scaling LLM Test-Time Compute Optimally, arXiv 2408.03314.
    """
    edges = [i / len(choices) for i in range(1, len(choices))] if edges is None else edges
    if len(edges) != len(choices) - 1 or list(edges) != sorted(edges):
        raise ArgumentError(f"{len(choices)} choices need {len(choices) - 1} ascending edges, found {tuple(edges)}")
    chat, poll = [Message("user", (question,))], Poll(probes, extract)
    samples = await together(run.call(chat, path=("probe",), sample=i, parameters=parameters) for i in range(probes))
    drawn = [completion for completion in samples if completion is not None]
    for number, completion in enumerate(drawn):
        poll.count(number, completion)
    ease = await _ease(poll, drawn, scorer)
    # Low estimates are hard questions, and the choices begin with the easy ones.
    place = len(choices) - 1 - bisect_right(edges, ease)
    details: dict[str, Any] = {"ease": ease, "bin": place}
    if len(drawn) < probes:
        return poll.answer(run, "budget", **details)
    chosen = run.branch("chosen", [completion.source for completion in drawn])
    inner = await choices[place](chosen, question, extract=extract, parameters=parameters)
    details["inner"] = inner.details
    if inner.answer is None:
        return poll.answer(run, inner.stopped, **details)
    return replace(inner, details=details)


async def _ease(poll: Poll, drawn: Sequence[Completion], scorer: Scorer | None) -> float:
    if scorer is not None:
        scores = [await await_score(scorer(completion)) for completion in drawn]
        return sum(scores) / max(1, len(scores))
    return max(poll.ballot.weights.values(), default=0.0) / max(1, len(drawn))
