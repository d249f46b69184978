"""Best of n draws many samples of one prompt and takes the one with the best score."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Literal

from partsong.knobs import Count, Number
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.confidence import self_certainty, with_alternatives
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, Scorer, await_score, in_order

__all__ = ["best_of_n"]


@checked
async def best_of_n(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: Count = 8,
    scorer: Scorer | None = None,
    selection: Literal["best", "borda"] = "best",
    power: Annotated[float, Number(0.0)] = 0.5,
    alternatives: Count = 20,
    parameters: Parameters | None = None,
) -> Answer:
    """Asks `num` times and takes the answer of the best sample, or lets samples vote by their rank.

    All samples are needed, because a later one may be better: nothing stops early. A sample that ran out of tokens or
    names no answer is not scored.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in a text.
        num: samples drawn.
        scorer: scores a completion, higher is better; may be async. None takes self-certainty, the mean confidence of
            the tokens, for which the engine must report log-probabilities of alternatives.
        selection: "best" takes the sample with the highest score. "borda" gives the sample of rank r, counted from 1,
            of N samples a vote of (N - r + 1)^power.
        power: exponent of "borda". 0 is the plain majority; the larger it is, the more only the best samples count.
        alternatives: alternatives requested at each token, for self-certainty.
        parameters: how samples are drawn.

    Returns:
        The answer. ``details`` hold what those of `self_consistency` hold, and ``scores`` by sample.

    Raises:
        ArgumentError: a knob is out of range.
        UnsupportedError: there is no scorer, and the engine reports no log-probabilities.

    Source: Self-Certainty and its Borda vote, arXiv 2502.18581.
    """
    judge: Scorer = scorer or self_certainty
    settings = parameters if scorer is not None else with_alternatives(parameters, alternatives)
    calls = in_order(run, [Message("user", (question,))], num, width=num, path=("sample",), parameters=settings)
    async with aclosing(calls) as samples:
        pool = {number: completion async for number, completion in samples}
    votes = Poll(num, extract)
    valid = [number for number, sample in pool.items() if vote_of(sample, extract) is not None]
    scores = {number: await await_score(judge(pool[number])) for number in valid}
    order = sorted(valid, key=lambda n: (-scores[n], n))
    # Samples of equal score rank by number. Votes are cast by rank, so the better sample wins a tie.
    for rank, number in enumerate(order):
        lost = selection == "best" and rank > 0
        votes.count(rank, pool[number], 0.0 if lost else float(len(order) - rank) ** power)
    for rank, number in enumerate(sorted(set(pool) - set(valid)), len(order)):
        votes.count(rank, pool[number], 0.0)
    return votes.answer(run, "done" if len(pool) == num else "budget", scores=scores)
