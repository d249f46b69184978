"""Best of n: many samples of one prompt, and the one a scorer likes best."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Literal

from partsong.knobs import Count, Number
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.confidence import self_certainty, with_alternatives
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, Scorer, in_order, now

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

    All samples are needed: a later one may be better, so nothing stops early. One that ran out of tokens or names no
    answer is not scored.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in a text.
        num: samples.
        scorer: of a completion, higher is better; may be async. None is self-certainty: the mean confidence of the
            tokens, for which the engine must report log-probabilities of alternatives.
        selection: "best", the sample of the highest score; "borda", where of N samples that of rank r, from 1, has a
            vote of (N - r + 1)^power.
        power: of "borda": 0 is the plain majority, and the larger it is the more only the best count.
        alternatives: asked for at each token, for self-certainty.
        parameters: of the draws.

    Returns:
        The answer; ``details`` as of `self_consistency`, and ``scores`` by sample.

    Raises:
        ArgumentError: a knob out of range.
        UnsupportedError: self-certainty is wanted, and the engine reports no log-probabilities.

    Source: Self-Certainty and its Borda vote, arXiv 2502.18581.
    """
    judge: Scorer = scorer or self_certainty
    asked = parameters if scorer is not None else with_alternatives(parameters, alternatives)
    pool: dict[int, Completion] = {}
    calls = in_order(run, [Message("user", (question,))], num, width=num, path=("sample",), parameters=asked)
    async with aclosing(calls) as samples:
        async for number, completion in samples:
            pool[number] = completion
    votes = Poll(num, extract)
    valid = [n for n, made in pool.items() if made.finish == "stop" and extract(made.text) is not None]
    scores = {number: await now(judge(pool[number])) for number in valid}
    order = sorted(valid, key=lambda n: (-scores[n], n))
    # Equal scores count by number; votes are cast in that order too, so that a tie is the better sample's.
    for rank, number in enumerate(order):
        lost = selection == "best" and rank > 0
        votes.count(rank, pool[number], 0.0 if lost else float(len(order) - rank) ** power)
    for rank, number in enumerate(sorted(set(pool) - set(valid)), len(order)):
        votes.count(rank, pool[number], 0.0)
    return votes.answer(run, "done" if len(pool) == num else "budget", scores=scores)
