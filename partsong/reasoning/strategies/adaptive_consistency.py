"""Adaptive consistency draws samples until the leader is probably the most frequent answer."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

from partsong.knobs import Count, Number
from partsong.reasoning.answers.votes import adaptive_confidence
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, in_order

__all__ = ["adaptive_consistency"]


@checked
async def adaptive_consistency(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: Count = 40,
    confidence: Annotated[float, Number(0.5, 1.0)] = 0.95,
    width: Count = 1,
    parameters: Parameters | None = None,
) -> Answer:
    """Draws one sample after the other until the most frequent answer leads by enough.

    It stops when, under a flat prior, the leader is more likely than the runner-up with a probability of at least
    `confidence`, which has a closed form in the two counts. It also stops when no missing vote can change the winner.
    Votes count in the order of their numbers, so `width` changes cost and time, and never the answer.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in a text.
        num: most samples drawn.
        confidence: probability at which it stops. With 1.0 it stops only when the vote is decided.
        width: samples drawn at the same time. 1 wastes no token, a larger number takes less time.
        parameters: how samples are drawn.

    Returns:
        The answer. ``details`` hold what those of `self_consistency` hold, and the ``confidence`` reached.

    Raises:
        ArgumentError: a knob is out of range.

    Source: Adaptive-Consistency, arXiv 2305.11860.
    """
    chat, poll, stopped, reached = [Message("user", (question,))], Poll(num, extract), "budget", 0.0
    async with aclosing(in_order(run, chat, num, width=width, path=("sample",), parameters=parameters)) as samples:
        async for number, completion in samples:
            poll.count(number, completion)
            if poll.decided():
                stopped = "decided"
                break
            first, second = [*sorted(map(int, poll.ballot.weights.values()), reverse=True), 0, 0][:2]
            reached = adaptive_confidence(first, second)
            if poll.missing and confidence < 1.0 and reached >= confidence:
                stopped = "confident"
                break
    return poll.answer(run, "done" if not poll.missing else stopped, confidence=reached)
