"""Self-consistency draws many samples of one prompt and takes the answer most of them name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated

from partsong.errors import ArgumentError
from partsong.knobs import AboveZero, Count, Number
from partsong.reasoning.answers.votes import RiskBound
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, in_order

__all__ = ["self_consistency"]


@checked
async def self_consistency(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: Count = 8,
    early_stop: bool = True,
    risk: Annotated[float, Number(0.0, 0.5)] = 0.0,
    weight: Callable[[Completion], float] | None = None,
    most_weight: AboveZero = 1.0,
    parameters: Parameters | None = None,
) -> Answer:
    """Asks `num` times and takes the answer with the most votes; a tie goes to the sample of the lowest number.

    As soon as no missing vote can change the winner, the samples that still run are cancelled: the answer is the one
    all `num` samples would have given. A sample that ran out of tokens has no vote.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in a text.
        num: samples drawn.
        early_stop: whether to stop when the vote is decided.
        risk: largest chance that an even earlier stop gives another answer than all `num` samples would. With 0 there
            is no such stop; otherwise votes count in the order of their numbers (see `RiskBound`).
        weight: returns the weight of a completion's vote; None gives each vote a weight of 1.
        most_weight: largest value of `weight`, for the early stop.
        parameters: how samples are drawn.

    Returns:
        The answer. ``details`` hold the ``shares`` of the weight by answer, the number of ``votes``, the number of
        ``spoilt`` ones, and a ``hint`` where voting cannot help.

    Raises:
        ArgumentError: a knob is out of range, a weight is not from 0 to `most_weight`, or a risk is given together with
            weights or without an early stop.

    Source: Self-Consistency, arXiv 2203.11171.
    """
    if risk and (weight is not None or not early_stop):
        raise ArgumentError(f"risk={risk} is for votes of equal weight that may stop early; leave one of them out")
    chat, poll = [Message("user", (question,))], Poll(num, extract)
    if risk:
        return await _within_risk(run, chat, poll, risk, parameters)
    stopped = "budget"
    async with run.samples(chat, num, path=("sample",), parameters=parameters) as samples:
        async for number, completion in samples:
            worth = 1.0 if weight is None else weight(completion)
            if worth > most_weight:
                raise ArgumentError(f"vote {number} weighs {worth}, more than most_weight={most_weight}")
            poll.count(number, completion, worth)
            if early_stop and poll.decided(most_weight):
                stopped = "decided"
                break
    return poll.answer(run, "done" if not poll.missing else stopped)


async def _within_risk(run: Run, chat: list[Message], poll: Poll, risk: float, parameters: Parameters | None) -> Answer:
    bound, stopped, num = RiskBound(risk), "budget", poll.total
    async with aclosing(in_order(run, chat, num, width=num, path=("sample",), parameters=parameters)) as samples:
        async for number, completion in samples:
            certain = bound.add(poll.count(number, completion))
            if certain is not None or poll.decided():
                stopped = "decided" if poll.decided() else "confident"
                break
    return poll.answer(run, "done" if not poll.missing else stopped)
