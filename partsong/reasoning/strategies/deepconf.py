"""DeepConf: samples the model was sure of vote, weighted by how sure it was, until they agree."""

from __future__ import annotations

import math
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated

from partsong.errors import ArgumentError
from partsong.knobs import Count, Number, Share
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.running_call import Partial
from partsong.reasoning.strategies.confidence import TraceScore, trace_score, with_alternatives
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, in_order

__all__ = ["deepconf", "keep_above"]


def keep_above(scores: list[float], top: float) -> float:
    """The score that the best share `top` of some scores reach: their (1 - top) quantile, linear between neighbours.

    >>> keep_above([1.0, 2.0, 3.0, 4.0, 5.0], 0.25)
    4.0
    """
    ranked = sorted(scores)
    place = (1.0 - top) * (len(ranked) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


@checked
async def deepconf(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: Count = 64,
    warmup: Count = 16,
    top: Annotated[float, Number(0.0, 1.0, above=True)] = 0.1,
    consensus: Share = 0.95,
    online: bool = True,
    score: TraceScore = "lowest",
    group: Count = 2048,
    width: Count = 8,
    alternatives: Count = 20,
    parameters: Parameters | None = None,
) -> Answer:
    """Weighted vote of the samples with the highest confidence.

    Offline: all `num` samples are drawn, the best share `top` of them vote, each with the weight of its score.

    Online: `warmup` samples set a threshold, the score that the best share `top` of them reach. Those of them that
    reach it vote. More samples follow, and each that reaches it votes, until the leader holds a share of `consensus`
    of all weight, or `num` samples were drawn. With the "lowest" score, one that falls under the threshold is halted
    while it is written; it can only fall further. Samples count in the order of their numbers, so `width` changes
    cost and time, and never the answer.

    Args:
        run: makes the calls, on an engine that reports log-probabilities of alternatives.
        question: the prompt.
        extract: finds the answer in a text.
        num: most samples, the warm-up's among them.
        warmup: samples that set the threshold.
        top: share of samples that vote: 0.1 filters hard, 0.9 hardly.
        consensus: share of the weight at which the question is settled.
        online: whether to stop early.
        score: of a sample; the paper's online form has "lowest".
        group: tokens of a group, whose mean confidence is one value.
        width: samples under way at a time after the warm-up.
        alternatives: asked for at each token.
        parameters: of the draws.

    Returns:
        The answer; ``details`` as of `self_consistency`, ``threshold``, and ``kept``, the numbers that voted.

    Raises:
        ArgumentError: a knob out of range, or a warm-up of more than `num`.
        UnsupportedError: the engine reports no log-probabilities.

    Source: Deep Think with Confidence, arXiv 2508.15260.
    """
    if online and warmup > num:
        raise ArgumentError(f"warmup={warmup} of num={num} samples; warm up with fewer")
    chat, asked = [Message("user", (question,))], with_alternatives(parameters, alternatives)
    trust = _Trust(Poll(num, extract), score, group)
    first, stopped = warmup if online else num, "budget"
    async with aclosing(in_order(run, chat, first, width=first, path=("sample",), parameters=asked)) as samples:
        async for number, completion in samples:
            trust.see(number, completion)
    trust.open(top)
    if len(trust.drawn) == first:
        stopped = "confident" if online and trust.share >= consensus else stopped
        ended = tuple(made.source for made in trust.drawn.values())
        halt = trust.falls if score == "lowest" else None
        order = in_order(
            run, chat, num - first, width=width, path=("sample",), first=first, waits=ended, parameters=asked, halt=halt
        )
        async with aclosing(order) as samples:
            while stopped == "budget" and (found := await anext(samples, None)) is not None:
                trust.see(*found)
                trust.count(found[0])
                stopped = "confident" if trust.share >= consensus else stopped
    if stopped == "budget" and len(trust.drawn) == num:
        stopped = "done"
    return trust.poll.answer(run, stopped, threshold=trust.threshold, kept=sorted(trust.kept))


@dataclass(slots=True)
class _Trust:
    """Samples drawn, the score each has, and the vote of those above the threshold."""

    poll: Poll
    score: TraceScore
    group: int
    drawn: dict[int, Completion] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    threshold: float = -math.inf

    def see(self, number: int, completion: Completion) -> None:
        """Scores a sample that ended by itself with an answer; others have no vote and set no threshold."""
        self.drawn[number] = completion
        if vote_of(completion, self.poll.extract) is not None:
            self.scores[number] = trace_score(completion, self.score, self.group)

    def open(self, top: float) -> None:
        """Sets the threshold from the samples seen so far and counts those that reach it."""
        self.threshold = keep_above(list(self.scores.values()), top) if self.scores else -math.inf
        for number in self.drawn:
            self.count(number)

    def count(self, number: int) -> None:
        """A sample's vote, if it has one and reaches the threshold."""
        if number in self.scores and self.scores[number] >= self.threshold:
            self.kept.append(number)
            self.poll.count(number, self.drawn[number], self.scores[number])

    def falls(self, seen: Partial) -> bool:
        """Whether a sample under way has fallen below the threshold; before its first group is whole, it has not."""
        last = seen.confidence[-self.group :]
        return len(last) == self.group and math.fsum(last) / self.group < self.threshold

    @property
    def share(self) -> float:
        """The leader's share of the weight; 0 without votes."""
        return max(self.poll.ballot.shares().values(), default=0.0)
