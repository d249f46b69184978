"""A pool's samples as arrays: which answer each named, whether that is right, how long and how sure it was."""

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
    """Problems in rows, samples in columns.

    Attributes:
        votes: number of the answer among the problem's, -1 for none; integers `[P, N]`.
        right: whether it is right, `[P, N]`.
        tokens: of the sample, `[P, N]`.
        certainty: mean confidence of its tokens, NaN where none was kept, `[P, N]`.
        answers: of each problem, in the order of their numbers.
    """

    votes: NDArray[np.int64]
    right: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    certainty: NDArray[np.float64]
    answers: tuple[tuple[str, ...], ...]

    def first(self, num: int) -> ScoreTable:
        """The first `num` samples of every problem."""
        return ScoreTable(
            votes=self.votes[:, :num],
            right=self.right[:, :num],
            tokens=self.tokens[:, :num],
            certainty=self.certainty[:, :num],
            answers=self.answers,
        )


def score_table(pool: Pool, problems: Sequence[Problem], num: int) -> ScoreTable:
    """Reads and judges every sample once; equal answers of a problem are judged once.

    Args:
        pool: the samples.
        problems: in the order of the rows.
        num: samples of each.

    Raises:
        ArgumentError: the pool lacks one.
    """
    shape = (len(problems), num)
    votes, tokens = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    right, certainty = np.zeros(shape, np.bool_), np.full(shape, np.nan)
    answers: list[tuple[str, ...]] = []
    for row, problem in enumerate(problems):
        numbers: dict[str, int] = {}
        samples = pool.of(problem, num)
        for column, made in enumerate(samples):
            vote = vote_of(made, problem.extract)
            if vote is not None:
                votes[row, column] = numbers.setdefault(vote, len(numbers))
        tokens[row] = [made.usage.completion for made in samples]
        certainty[row] = [_certainty(made) for made in samples]
        judged = np.asarray([problem.check(answer) for answer in numbers] + [False])
        right[row] = judged[votes[row]]  # -1 is the last
        answers.append(tuple(numbers))
    return ScoreTable(votes=votes, right=right, tokens=tokens, certainty=certainty, answers=tuple(answers))


def _certainty(made: Completion) -> float:
    return math.fsum(made.confidence) / len(made.confidence) if made.confidence else math.nan
