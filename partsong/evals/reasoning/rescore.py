"""Strategies over a table of samples, all problems at once: what each would have answered, and what it would have cost.

Each is the twin of a strategy of `partsong.reasoning.strategies` and gives what that one gives on `PoolEngine`, problem
by problem: the same answer, tokens to the last one, and critical path; only it takes milliseconds for a thousand
problems. Early stops are played out in the order in which samples would end.

>>> list(RESCORERS)
['single', 'self-consistency', 'best-of-n', 'short-m', 'adaptive-consistency', 'deepconf-offline']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong.evals.reasoning.score_table import ScoreTable
from partsong.reasoning.answers.votes import adaptive_confidence

__all__ = ["RESCORERS", "Rescored", "pass_at"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """What a strategy did, by problem.

    Attributes:
        vote: number of the answer, as in `ScoreTable`; -1 for none.
        right: whether it is right.
        total: tokens written by all samples.
        critical: tokens of the longest chain of samples that waited for each other.
    """

    vote: Ints
    right: NDArray[np.bool_]
    total: Ints
    critical: Ints


def _num(table: ScoreTable, num: int) -> ScoreTable:
    if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num <= table.votes.shape[1]:
        raise ArgumentError(f"num={num!r}; the pool has 1 to {table.votes.shape[1]} samples of each problem")
    return table.first(num)


def _of(table: ScoreTable, vote: Ints, total: Ints, critical: Ints) -> Rescored:
    """Looks up whether the answers are right: any sample that named one knows."""
    named = (table.votes == vote[:, None]) & (vote >= 0)[:, None]
    return Rescored(vote=vote, right=(named & table.right).any(1), total=total, critical=critical)


def _whole(table: ScoreTable, vote: Ints) -> Rescored:
    """All samples were drawn at once, and all were waited for."""
    return _of(table, vote, table.tokens.sum(1), table.tokens.max(1))


def _majority(votes: Ints, weights: NDArray[np.float64]) -> Ints:
    """The answer of the largest weight, among equals that of the lowest sample; -1 where nobody votes."""
    # The support of each sample's answer: [P, N, N] is small next to what it replaces.
    support = ((votes[:, :, None] == votes[:, None, :]) * weights[:, None, :]).sum(2)
    support[votes < 0] = -1.0
    best = support.argmax(1)
    return np.where(support.max(1) < 0, -1, np.take_along_axis(votes, best[:, None], 1)[:, 0])


def single(table: ScoreTable) -> Rescored:
    """Sample 0."""
    table = _num(table, 1)
    return _whole(table, table.votes[:, 0])


def self_consistency(table: ScoreTable, num: int = 8, early_stop: bool = True) -> Rescored:
    """The majority; with `early_stop`, samples still under way when it is decided are cancelled."""
    table = _num(table, num)
    vote = _majority(table.votes, np.ones(table.votes.shape))
    if not early_stop:
        return _whole(table, vote)
    order = table.tokens.argsort(1, kind="stable")
    end = np.take_along_axis(table.tokens, order, 1)
    stop = _stops(np.take_along_axis(table.votes, order, 1), order, num, lambda state: state.decided())
    last = np.take_along_axis(end, stop[:, None], 1)[:, 0]
    return _of(table, vote, np.minimum(table.tokens, last[:, None]).sum(1), last)


def adaptive_consistency(table: ScoreTable, num: int = 40, confidence: float = 0.95) -> Rescored:
    """One sample after the other until the leader is probably the most frequent answer."""
    table = _num(table, num)
    sure = np.asarray([[adaptive_confidence(max(a, b), min(a, b)) for b in range(num + 1)] for a in range(num + 1)])

    def enough(state: _Counts) -> NDArray[np.bool_]:
        two = -np.sort(-state.counts, 1)[:, :2]
        second = two[:, 1] if two.shape[1] > 1 else np.zeros_like(two[:, 0])
        return state.decided() | ((sure[two[:, 0], second] >= confidence) if confidence < 1.0 else False)

    order = np.broadcast_to(np.arange(num), table.votes.shape)
    stop = _stops(table.votes, order, num, enough)
    drawn = order <= stop[:, None]
    vote = _majority(np.where(drawn, table.votes, -1), np.ones(table.votes.shape))
    spent = (table.tokens * drawn).sum(1)
    return _of(table, vote, spent, spent)


def best_of_n(table: ScoreTable, num: int = 8, selection: str = "best", power: float = 0.5) -> Rescored:
    """The sample of the highest self-certainty, or a vote weighted by rank."""
    table = _num(table, num)
    if selection not in ("best", "borda"):
        raise ArgumentError(f"selection={selection!r}; use best or borda")
    votes = _by_certainty(table)
    if selection == "best":
        return _whole(table, votes[:, 0])
    valid = (votes >= 0).sum(1)
    rank = np.maximum(valid[:, None] - np.arange(num), 1).astype(np.float64)
    return _whole(table, _majority(votes, rank**power))


def deepconf_offline(table: ScoreTable, num: int = 64, top: float = 0.1) -> Rescored:
    """The best share `top` of the samples by mean confidence, each with its confidence as weight."""
    table = _num(table, num)
    if not 0 < top <= 1:
        raise ArgumentError(f"top={top!r}; use a number above 0 to 1")
    _by_certainty(table)  # refuses a pool without confidence
    valid = table.votes >= 0
    scores = np.where(valid, table.certainty, np.nan)
    kept = np.zeros_like(valid)
    some = valid.any(1)
    if some.any():
        kept[some] = scores[some] >= np.nanquantile(scores[some], 1.0 - top, axis=1, keepdims=True) - 1e-12
    weights = np.where(kept, np.maximum(np.nan_to_num(table.certainty), 0.0), 0.0)
    return _whole(table, _majority(np.where(kept, table.votes, -1), weights))


def _by_certainty(table: ScoreTable) -> Ints:
    """Votes with the surest sample first, those without an answer last."""
    if np.isnan(table.certainty[table.votes >= 0]).any():
        raise ArgumentError("the pool holds no confidence; collect it with logprobs=20 on an engine that reports them")
    key = np.where(table.votes >= 0, -table.certainty, np.inf)
    return np.take_along_axis(table.votes, key.argsort(1, kind="stable"), 1)


def short_m(table: ScoreTable, num: int = 8, shortest: int = 3, early_stop: bool = True) -> Rescored:
    """A vote of the `shortest` samples with an answer; with `early_stop`, longer ones are halted a token later."""
    table = _num(table, num)
    if not 1 <= shortest <= num:
        raise ArgumentError(f"shortest={shortest!r} of num={num} samples; let no more vote than there are")
    endless = np.iinfo(np.int64).max
    key = np.where(table.votes >= 0, table.tokens, endless)
    order = key.argsort(1, kind="stable")[:, :shortest]
    votes = np.take_along_axis(table.votes, order, 1)
    made = _whole(table, _majority(votes, np.ones(votes.shape)))
    if not early_stop:
        return made
    # Where fewer answer than may vote, nothing is halted.
    last = np.take_along_axis(key, order[:, -1:], 1)[:, 0]
    some = last < endless
    total = np.where(some, np.minimum(table.tokens, np.where(some, last, 0)[:, None] + 1).sum(1), made.total)
    return replace(made, total=total, critical=np.where(some, last, made.critical))


def pass_at(table: ScoreTable, num: int) -> NDArray[np.float64]:
    """The chance that one of `num` samples out of the pool is right, by problem: what no vote can exceed.

    Source: the unbiased estimator of arXiv 2107.03374.
    """
    total, wrong = table.right.shape[1], (~table.right).sum(1)
    _num(table, num)
    left = np.asarray([wrong - i for i in range(num)], np.float64) / np.asarray([[total - i] for i in range(num)])
    return 1.0 - np.prod(np.maximum(left, 0.0), 0)


# --- votes one by one -------------------------------------------------------------------------------------------------


class _Counts:
    """Votes so far, of all problems."""

    def __init__(self, problems: int, answers: int, num: int) -> None:
        self.num = num
        self.counts = np.zeros((problems, answers), np.int64)
        self.first = np.full((problems, answers), num, np.int64)
        self.missing = np.ones((problems, num), np.bool_)

    def add(self, votes: Ints, numbers: Ints) -> None:
        """A vote of each problem, with its number."""
        rows = np.arange(len(votes))
        self.missing[rows, numbers] = False
        rows, answers, numbers = rows[votes >= 0], votes[votes >= 0], numbers[votes >= 0]
        self.counts[rows, answers] += 1
        self.first[rows, answers] = np.minimum(self.first[rows, answers], numbers)

    def decided(self) -> NDArray[np.bool_]:
        """Whether no missing vote can change the leader: `votes.Ballot.decided`, for all problems."""
        rows, left = np.arange(len(self.counts)), self.missing.sum(1)
        lowest = np.where(left > 0, self.missing.argmax(1), self.num)
        leader = (self.counts * (self.num + 1) - self.first).argmax(1)
        lead, first = self.counts[rows, leader], self.first[rows, leader]
        reach = self.counts + left[:, None]
        earliest = np.minimum(self.first, lowest[:, None])
        # Answers nobody has named have no votes and the number `num`: they stand for all unnamed ones.
        threat = (reach > lead[:, None]) | ((reach == lead[:, None]) & (earliest < first[:, None]))
        threat[rows, leader] = False
        return (left == 0) | ((lead > 0) & ~threat.any(1))


def _stops(votes: Ints, numbers: Ints, num: int, enough: Callable[[_Counts], NDArray[np.bool_]]) -> Ints:
    """The place of the vote after which it is enough, in the order of `votes`; the last place where it never is."""
    problems, places = votes.shape
    state = _Counts(problems, int(votes.max(initial=0)) + 2, num)
    stop = np.full(problems, places - 1)
    running = np.ones(problems, np.bool_)
    for place in range(places):
        state.add(votes[:, place], numbers[:, place])
        ended = running & enough(state)
        stop[ended] = place
        running &= ~ended
        if not running.any():
            break
    return stop


#: By name, strategies whose cost and answers are in a pool; knobs have the names they have in `partsong.reasoning`.
RESCORERS: dict[str, Callable[..., Rescored]] = {
    "single": single,
    "self-consistency": self_consistency,
    "best-of-n": best_of_n,
    "short-m": short_m,
    "adaptive-consistency": adaptive_consistency,
    "deepconf-offline": deepconf_offline,
}
