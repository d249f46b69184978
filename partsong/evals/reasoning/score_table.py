"""Turns the samples of a pool into arrays: their answers, whether these are right, how long and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partsong.evals.reasoning.pool import Pool
from partsong.evals.reasoning.problem import Problem
from partsong.reasoning.calls.answer import vote_of
from partsong.reasoning.calls.call import Completion

__all__ = ["ScoreTable", "score_table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTable:
    """Holds arrays with a row per problem and a column per sample.

    Attributes:
        votes: number of the sample's answer among those of its problem, `[P, N]`; -1 is no answer.
        right: whether the answer is right, `[P, N]`.
        tokens: how many the sample has, `[P, N]`.
        certainty: mean confidence of the sample's tokens, `[P, N]`; NaN if it was not kept.
        answers: of each problem, in the order of their numbers.
    """

    votes: NDArray[np.int64]
    right: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    certainty: NDArray[np.float64]
    answers: tuple[tuple[str, ...], ...]

    def first(self, num: int) -> ScoreTable:
        """Returns the table of the first `num` samples of every problem."""
        return ScoreTable(
            votes=self.votes[:, :num],
            right=self.right[:, :num],
            tokens=self.tokens[:, :num],
            certainty=self.certainty[:, :num],
            answers=self.answers,
        )


def score_table(pool: Pool, problems: Sequence[Problem], num: int) -> ScoreTable:
    """Reads every sample once, and judges every different answer of a problem once.

    Args:
        pool: the samples.
        problems: in the order of the rows.
        num: samples of each problem.

    Raises:
        ArgumentError: the pool lacks a sample.
    """
    shape = (len(problems), num)
    votes, tokens = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    right, certainty = np.zeros(shape, np.bool_), np.full(shape, np.nan)
    answers: list[tuple[str, ...]] = []
    for row, problem in enumerate(problems):
        numbers: dict[str, int] = {}
        samples = pool.of(problem, num)
        for column, sample in enumerate(samples):
            vote = vote_of(sample, problem.extract)
            if vote is not None:
                votes[row, column] = numbers.setdefault(vote, len(numbers))
        tokens[row] = [sample.usage.completion for sample in samples]
        certainty[row] = [_certainty(sample) for sample in samples]
        judged = np.asarray([problem.check(answer) for answer in numbers] + [False])
        right[row] = judged[votes[row]]  # -1 picks the last element, False
        answers.append(tuple(numbers))
    return ScoreTable(votes=votes, right=right, tokens=tokens, certainty=certainty, answers=tuple(answers))


def _certainty(sample: Completion) -> float:
    return math.fsum(sample.confidence) / len(sample.confidence) if sample.confidence else math.nan
