"""DeepConf lets confident samples vote, weighted by their confidence, until they agree."""

from __future__ import annotations

import math
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
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

__all__ = ["deepconf", "top_quantile"]


def top_quantile(scores: list[float], top: float) -> float:
    """Returns the score that the best share `top` of some scores reach, linear between neighbours.

    >>> top_quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.25)
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
    """Takes a weighted vote of the samples with the highest confidence.

    Offline, all `num` samples are drawn, and the best share `top` of them vote, each with the weight of its score.

    Online, `warmup` samples set a threshold: the score that the best share `top` of them reach. Those that reach it
    vote. More samples follow, and each that reaches the threshold votes, until the leader holds a share of `consensus`
    of all weight or `num` samples were drawn. With the "lowest" score a sample is halted while it is written when it
    falls under the threshold, because it can only fall further. Samples count in the order of their numbers, so
    `width` changes cost and time, and never the answer.

    Args:
        run: makes the calls, on an engine that reports log-probabilities of alternatives.
        question: the prompt.
        extract: finds the answer in a text.
        num: most samples drawn, including the warm-up.
        warmup: samples that set the threshold.
        top: share of the samples that vote: 0.1 filters strictly, 0.9 barely.
        consensus: share of the weight at which the question is settled.
        online: whether to stop early.
        score: how a sample is scored; the online form of the paper uses "lowest".
        group: tokens of a group, whose mean confidence is one value.
        width: samples drawn at the same time after the warm-up.
        alternatives: alternatives requested at each token.
        parameters: how samples are drawn.

    Returns:
        The answer. ``details`` hold what those of `self_consistency` hold, the ``threshold``, and ``kept``, the numbers
        of the samples that voted.

    Raises:
        ArgumentError: a knob is out of range, or `warmup` is larger than `num`.
        UnsupportedError: the engine reports no log-probabilities.

    Source: Deep Think with Confidence, arXiv 2508.15260.
    """
    if online and warmup > num:
        raise ArgumentError(f"warmup={warmup} of num={num} samples; warm up with fewer")
    chat, settings = [Message("user", (question,))], with_alternatives(parameters, alternatives)
    draw = partial(in_order, run, chat, path=("sample",), parameters=settings)
    vote = _ThresholdVote(Poll(num, extract), score, group)
    first, stopped = warmup if online else num, "budget"
    async with aclosing(draw(first, width=first)) as samples:
        async for number, completion in samples:
            vote.add(number, completion)
    vote.set_threshold(top)
    if len(vote.drawn) == first:
        stopped = "confident" if online and vote.share >= consensus else stopped
        ended = tuple(completion.source for completion in vote.drawn.values())
        halt = vote.is_below if score == "lowest" else None
        async with aclosing(draw(num - first, width=width, first=first, waits=ended, halt=halt)) as samples:
            while stopped == "budget" and (sample := await anext(samples, None)) is not None:
                vote.add(*sample)
                vote.count(sample[0])
                stopped = "confident" if vote.share >= consensus else stopped
    if stopped == "budget" and len(vote.drawn) == num:
        stopped = "done"
    vote.show_all_if_none_is_kept()
    return vote.poll.answer(run, stopped, threshold=vote.threshold, kept=sorted(vote.kept))


@dataclass(slots=True)
class _ThresholdVote:
    """Holds the samples drawn, the score of each, and the vote of those above the threshold."""

    poll: Poll
    score: TraceScore
    group: int
    drawn: dict[int, Completion] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    threshold: float = -math.inf

    def add(self, number: int, completion: Completion) -> None:
        """Scores a sample that ended by itself with an answer; others have no vote and set no threshold."""
        self.drawn[number] = completion
        if vote_of(completion, self.poll.extract) is not None:
            self.scores[number] = trace_score(completion, self.score, self.group)

    def set_threshold(self, top: float) -> None:
        """Sets the threshold from the samples drawn so far and counts those that reach it."""
        self.threshold = top_quantile(list(self.scores.values()), top) if self.scores else -math.inf
        for number in self.drawn:
            self.count(number)

    def count(self, number: int) -> None:
        """Counts the vote of a sample that has one and reaches the threshold."""
        if number in self.scores and self.scores[number] >= self.threshold:
            self.kept.append(number)
            self.poll.count(number, self.drawn[number], self.scores[number])

    def show_all_if_none_is_kept(self) -> None:
        """Counts every sample where no text names an answer: then all texts are shown."""
        if not self.kept:
            for number, completion in self.drawn.items():
                self.poll.count(number, completion)

    def is_below(self, partial: Partial) -> bool:
        """Returns whether the last group of an unfinished sample is below the threshold; False before one is whole."""
        last = partial.confidence[-self.group :]
        return len(last) == self.group and math.fsum(last) / self.group < self.threshold

    @property
    def share(self) -> float:
        """Returns the leader's share of the weight; 0 without votes."""
        return max(self.poll.ballot.shares().values(), default=0.0)
