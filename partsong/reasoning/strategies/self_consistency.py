"""Self-consistency: many samples of one prompt, and the answer most of them name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
    poll = _Poll(Ballot(num), extract, weight, most_weight, set(range(num)))
    decided = False
    async with run.samples([Message("user", (question,))], num, path=("sample",), parameters=parameters) as samples:
        async for number, completion in samples:
            poll.count(number, completion)
            decided = bool(poll.missing) and poll.ballot.decided(poll.missing, most_weight)
            if early_stop and decided:
                break
    return poll.answer(run, "done" if not poll.missing else "decided" if early_stop and decided else "budget")


@dataclass(slots=True)
class _Poll:
    """Votes and the completions they come from."""

    ballot: Ballot
    extract: Extract
    weight: Callable[[Completion], float] | None
    most_weight: float
    missing: set[int]
    seen: dict[int, tuple[str | None, Completion]] = field(default_factory=dict)

    def count(self, number: int, completion: Completion) -> None:
        vote = vote_of(completion, self.extract)
        worth = 1.0 if self.weight is None else self.weight(completion)
        if worth > self.most_weight:
            raise ArgumentError(f"vote {number} weighs {worth}, more than most_weight={self.most_weight}")
        self.seen[number] = (vote, completion)
        self.ballot.add(number, vote, worth)
        self.missing.discard(number)

    def answer(self, run: Run, stopped: str) -> Answer:
        """The leader, with the text of the first sample that named it."""
        leader, ballot = self.ballot.leader, self.ballot
        chosen = [self.seen[n][1] for n in sorted(self.seen) if leader is not None and self.seen[n][0] == leader][:1]
        accepted = tuple(completion.source for completion in chosen)
        details = {
            "shares": dict(ballot.shares()),
            "votes": ballot.counted,
            "spoilt": ballot.spoilt,
            "hint": voting_hint(ballot),
        }
        return Answer(
            answer=leader,
            text=chosen[0].text if chosen else "",
            calls=accepted,
            stopped=stopped,
            summary=run.summary(accepted),
            details=details,
        )
