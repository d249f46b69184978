"""Computes from a table of samples the answers and costs of thinking methods.

Each function mirrors a method of `partsong.reasoning.strategies`. For every problem it gives the same answer,
tokens and critical path as that strategy gives on `PoolEngine`, but it takes milliseconds for a thousand problems.
Early stops follow the order in which samples would end.

>>> list(RESCORERS)
['single', 'self-consistency', 'best-of-n', 'short-m', 'adaptive-consistency', 'deepconf-offline']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong.evals.reasoning.score_table import ScoreTable
from partsong.knobs import Count, Number, Whole, check_knobs, check_value, type_hints
from partsong.reasoning.answers.votes import adaptive_confidence

__all__ = ["RESCORERS", "StrategyResult", "pass_at"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyResult:
    """Holds the results of a method for each problem.

    Attributes:
        vote: number of the answer, as in `ScoreTable`; -1 is no answer.
        right: whether it is right.
        total: tokens written by all samples.
        critical: tokens of the longest chain of samples that waited for each other.
    """

    vote: Ints
    right: NDArray[np.bool_]
    total: Ints
    critical: Ints


def _first(table: ScoreTable, num: int) -> ScoreTable:
    held = Whole(1, table.votes.shape[1], "the pool has no more samples of each problem")
    check_value("num", num, Annotated[int, held])
    return table.first(num)


def _result(table: ScoreTable, vote: Ints, total: Ints, critical: Ints) -> StrategyResult:
    """Looks up whether the answers are right, from any sample that has the same answer."""
    named = (table.votes == vote[:, None]) & (vote >= 0)[:, None]
    return StrategyResult(vote=vote, right=(named & table.right).any(1), total=total, critical=critical)


def _all_drawn(table: ScoreTable, vote: Ints) -> StrategyResult:
    """Makes the result of a strategy that draws all samples at once and waits for all of them."""
    return _result(table, vote, table.tokens.sum(1), table.tokens.max(1))


def _majority(votes: Ints, weights: NDArray[np.float64]) -> Ints:
    """Returns the answer of the largest weight, of equals that of the lowest sample; -1 if there is none."""
    # [P, N, N] numbers are few enough to compare every sample with every other.
    support = ((votes[:, :, None] == votes[:, None, :]) * weights[:, None, :]).sum(2)
    support[votes < 0] = -1.0
    best = support.argmax(1)
    return np.where(support.max(1) < 0, -1, np.take_along_axis(votes, best[:, None], 1)[:, 0])


def single(table: ScoreTable) -> StrategyResult:
    """Answers with sample 0."""
    table = _first(table, 1)
    return _all_drawn(table, table.votes[:, 0])


def self_consistency(table: ScoreTable, num: Count = 8, early_stop: bool = True) -> StrategyResult:
    """Takes the majority; with `early_stop`, samples still running when it is decided are cancelled."""
    table = _first(table, num)
    vote = _majority(table.votes, np.ones(table.votes.shape))
    if not early_stop:
        return _all_drawn(table, vote)
    order = table.tokens.argsort(1, kind="stable")
    end = np.take_along_axis(table.tokens, order, 1)
    stop = _stops(np.take_along_axis(table.votes, order, 1), order, num, lambda state: state.decided())
    last = np.take_along_axis(end, stop[:, None], 1)[:, 0]
    return _result(table, vote, np.minimum(table.tokens, last[:, None]).sum(1), last)


def adaptive_consistency(table: ScoreTable, num: Count = 40, confidence: float = 0.95) -> StrategyResult:
    """Draws one sample after the other until the leader is probably the most frequent answer."""
    table = _first(table, num)
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
    return _result(table, vote, spent, spent)


def best_of_n(
    table: ScoreTable, num: Count = 8, selection: Literal["best", "borda"] = "best", power: float = 0.5
) -> StrategyResult:
    """Takes the sample of the highest self-certainty, or a vote weighted by rank."""
    check_knobs(type_hints(best_of_n), {"selection": selection})
    table = _first(table, num)
    votes = _by_certainty(table)
    if selection == "best":
        return _all_drawn(table, votes[:, 0])
    valid = (votes >= 0).sum(1)
    rank = np.maximum(valid[:, None] - np.arange(num), 1).astype(np.float64)
    return _all_drawn(table, _majority(votes, rank**power))


def deepconf_offline(
    table: ScoreTable, num: Count = 64, top: Annotated[float, Number(0.0, 1.0, above=True)] = 0.1
) -> StrategyResult:
    """Votes with the share `top` of the samples that has the highest mean confidence, weighted by confidence."""
    check_knobs(type_hints(deepconf_offline), {"top": top})
    table = _first(table, num)
    _by_certainty(table)  # refuses a pool without confidence
    valid = table.votes >= 0
    scores = np.where(valid, table.certainty, np.nan)
    kept = np.zeros_like(valid)
    some = valid.any(1)
    if some.any():
        kept[some] = scores[some] >= np.nanquantile(scores[some], 1.0 - top, axis=1, keepdims=True) - 1e-12
    weights = np.where(kept, np.maximum(np.nan_to_num(table.certainty), 0.0), 0.0)
    return _all_drawn(table, _majority(np.where(kept, table.votes, -1), weights))


def _by_certainty(table: ScoreTable) -> Ints:
    """Returns the votes with the surest sample first and those without an answer last."""
    if np.isnan(table.certainty[table.votes >= 0]).any():
        raise ArgumentError("the pool holds no confidence; collect it with logprobs=20 on an engine that reports them")
    key = np.where(table.votes >= 0, -table.certainty, np.inf)
    return np.take_along_axis(table.votes, key.argsort(1, kind="stable"), 1)


def short_m(table: ScoreTable, num: Count = 8, shortest: Count = 3, early_stop: bool = True) -> StrategyResult:
    """Lets the `shortest` samples with an answer vote; with `early_stop`, longer ones are halted a token later."""
    table = _first(table, num)
    check_value("shortest", shortest, Annotated[int, Whole(1, num, "no more can vote than there are samples")])
    endless = np.iinfo(np.int64).max
    key = np.where(table.votes >= 0, table.tokens, endless)
    order = key.argsort(1, kind="stable")[:, :shortest]
    votes = np.take_along_axis(table.votes, order, 1)
    result = _all_drawn(table, _majority(votes, np.ones(votes.shape)))
    if not early_stop:
        return result
    # Nothing is halted for a problem that has fewer answers than may vote.
    last = np.take_along_axis(key, order[:, -1:], 1)[:, 0]
    some = last < endless
    total = np.where(some, np.minimum(table.tokens, np.where(some, last, 0)[:, None] + 1).sum(1), result.total)
    return replace(result, total=total, critical=np.where(some, last, result.critical))


def pass_at(table: ScoreTable, num: int) -> NDArray[np.float64]:
    """Returns for each problem the chance that one of `num` samples of the pool is right, which no vote can exceed.

    Source: the unbiased estimator of arXiv 2107.03374.
    """
    total, wrong = table.right.shape[1], (~table.right).sum(1)
    _first(table, num)
    left = np.asarray([wrong - i for i in range(num)], np.float64) / np.asarray([[total - i] for i in range(num)])
    return 1.0 - np.prod(np.maximum(left, 0.0), 0)


# --- votes one by one -------------------------------------------------------------------------------------------------


class _Counts:
    """Counts the votes of all problems so far."""

    def __init__(self, problems: int, answers: int, num: int) -> None:
        self.num = num
        self.counts = np.zeros((problems, answers), np.int64)
        self.first = np.full((problems, answers), num, np.int64)
        self.missing = np.ones((problems, num), np.bool_)

    def add(self, votes: Ints, numbers: Ints) -> None:
        """Adds a vote of each problem, given with the number of its sample."""
        rows = np.arange(len(votes))
        self.missing[rows, numbers] = False
        rows, answers, numbers = rows[votes >= 0], votes[votes >= 0], numbers[votes >= 0]
        self.counts[rows, answers] += 1
        self.first[rows, answers] = np.minimum(self.first[rows, answers], numbers)

    def decided(self) -> NDArray[np.bool_]:
        """Says whether no missing vote can change the leader, for each problem; see `votes.Ballot.decided`."""
        rows, left = np.arange(len(self.counts)), self.missing.sum(1)
        lowest = np.where(left > 0, self.missing.argmax(1), self.num)
        leader = (self.counts * (self.num + 1) - self.first).argmax(1)
        lead, first = self.counts[rows, leader], self.first[rows, leader]
        reach = self.counts + left[:, None]
        earliest = np.minimum(self.first, lowest[:, None])
        # An answer without votes has the number `num` and stands for all answers that no sample has named.
        threat = (reach > lead[:, None]) | ((reach == lead[:, None]) & (earliest < first[:, None]))
        threat[rows, leader] = False
        return (left == 0) | ((lead > 0) & ~threat.any(1))


def _stops(votes: Ints, numbers: Ints, num: int, enough: Callable[[_Counts], NDArray[np.bool_]]) -> Ints:
    """Returns the place of the vote after which to stop, in the order of `votes`, or the last place."""
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


#: Strategies whose answers and costs follow from a pool, by name; knobs are named as in `partsong.reasoning`.
RESCORERS: dict[str, Callable[..., StrategyResult]] = {
    "single": single,
    "self-consistency": self_consistency,
    "best-of-n": best_of_n,
    "short-m": short_m,
    "adaptive-consistency": adaptive_consistency,
    "deepconf-offline": deepconf_offline,
}
