"""Measures how sure a model was of its text, from the log-probabilities of the alternatives at each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.calls.call import Completion, Parameters

__all__ = ["TraceScore", "by_token", "group_means", "self_certainty", "trace_score", "with_alternatives"]

#: How a whole text gets one number. "mean" averages all tokens, "tail" the last group of tokens, "bottom" the lowest
#: tenth of the groups. "lowest" takes the lowest group.
TraceScore = Literal["mean", "tail", "bottom", "lowest"]


def with_alternatives(parameters: Parameters | None, num: int) -> Parameters:
    """Returns parameters that also ask for log-probabilities of at least `num` alternatives."""
    parameters = parameters or Parameters()
    return replace(parameters, logprobs=max(parameters.logprobs, num))


def by_token(completion: Completion) -> Sequence[float]:
    """Returns the confidence of each token: the mean of minus the log-probabilities of the alternatives.

    Higher is surer.

    Raises:
        UnsupportedError: the engine reported no log-probabilities.
    """
    if not completion.confidence:
        raise UnsupportedError(
            f"call {completion.source} came back without log-probabilities of alternatives; use an engine that reports "
            "them, or give a scorer of your own"
        )
    return completion.confidence


def self_certainty(completion: Completion) -> float:
    """Returns the mean confidence of a text's tokens.

    The paper's measure is this over the whole vocabulary, less the logarithm of its size, which gives the same ranking.

    Source: Self-Certainty, arXiv 2502.18581.

    >>> self_certainty(Completion(text="", confidence=(1.0, 3.0)))
    2.0
    """
    return math.fsum(by_token(completion)) / len(by_token(completion))


def group_means(values: Sequence[float], size: int) -> list[float]:
    """Returns the means of all runs of `size` neighbours; one mean where there are fewer.

    >>> group_means([1.0, 2.0, 6.0], 2)
    [1.5, 4.0]
    """
    size = min(size, len(values))
    return [math.fsum(values[i : i + size]) / size for i in range(len(values) - size + 1)]


def trace_score(completion: Completion, score: TraceScore, group: int) -> float:
    """Returns one number for how sure the model was of a text; see `TraceScore`.

    Source: DeepConf, arXiv 2508.15260.

    >>> trace_score(Completion(text="", confidence=(1.0, 2.0, 6.0)), "lowest", 2)
    1.5
    """
    values = by_token(completion)
    if score == "mean":
        return self_certainty(completion)
    if score == "tail":
        return math.fsum(values[-group:]) / len(values[-group:])
    groups = sorted(group_means(values, group))
    if score == "lowest":
        return groups[0]
    if score == "bottom":
        tenth = max(1, len(groups) // 10)
        return math.fsum(groups[:tenth]) / tenth
    raise ArgumentError(f"score={score!r}; use {', '.join(get_args(TraceScore))}")
