"""Self-consistency: many samples of one prompt, and the answer most of them name."""

from __future__ import annotations

from collections.abc import Callable

from partsong.errors import ArgumentError
from partsong.reasoning.answer import Answer, Extract, vote_of
from partsong.reasoning.call import Completion, Message, Parameters
from partsong.reasoning.run import Run
from partsong.reasoning.votes import Ballot, voting_hint

__all__ = ["self_consistency"]


async def self_consistency(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: int = 8,
    early_stop: bool = True,
    weight: Callable[[Completion], float] | None = None,
    most_weight: float = 1.0,
    parameters: Parameters | None = None,
) -> Answer:
    """Asks `num` times and takes the answer with the most votes; a tie goes to the sample of the lowest number.

    As soon as no missing vote can change the winner, the samples under way are cancelled: the answer is that of all
    `num` samples, whatever they would have said. A sample that ran out of tokens has no vote.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in a text.
        num: samples.
        early_stop: whether to stop when the vote is decided.
        weight: of a vote; None is 1 for each.
        most_weight: largest value of `weight`, for the early stop.
        parameters: of the draws.

    Returns:
        The answer; ``details``: ``shares`` of the weight by answer, ``votes``, ``spoilt``, and a ``hint`` where
        voting cannot help.

    Raises:
        ArgumentError: `num` is no positive integer, or a weight lies outside 0 to `most_weight`.

    Source: Self-Consistency, arXiv 2203.11171.
    """
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ArgumentError(f"num={num!r}; use a positive integer")
    ballot, missing, seen = Ballot(num), set(range(num)), dict[int, Completion]()
    named: dict[int, str | None] = {}
    stopped = "done"
    async with run.samples([Message("user", (question,))], num, path=("sample",), parameters=parameters) as samples:
        async for number, completion in samples:
            seen[number], named[number] = completion, vote_of(completion, extract)
            worth = 1.0 if weight is None else weight(completion)
            if worth > most_weight:
                raise ArgumentError(f"a vote weighs {worth}, more than most_weight={most_weight}")
            ballot.add(number, named[number], worth)
            missing.discard(number)
            if early_stop and missing and ballot.decided(missing, most_weight):
                stopped = "decided"
                break
    if stopped == "done" and missing:
        stopped = "budget"
    leader = ballot.leader
    winner = min((n for n, answer in named.items() if answer is not None and answer == leader), default=None)
    chosen = None if winner is None else seen[winner]
    details = {
        "shares": dict(ballot.shares()),
        "votes": ballot.counted,
        "spoilt": ballot.spoilt,
        "hint": voting_hint(ballot),
    }
    accepted = () if chosen is None else (chosen.source,)
    return Answer(
        answer=leader,
        text="" if chosen is None else chosen.text,
        calls=accepted,
        stopped=stopped,
        summary=run.summary(accepted),
        details=details,
    )
