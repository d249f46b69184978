"""Holds the results of a pass over the vocabulary: sums that merge, and the statistics computed from them.

With the logits x of a row and their maximum m, a pass keeps s = sum e^(x - m) and t = sum (x - m) e^(x - m). Then
p_max = 1 / s, lse = m + ln s and entropy = ln s - t / s: neither logits nor probabilities are ever stored. t counts
from m, not from 0, so large logits leave nothing to cancel. Passes over parts of the vocabulary (tiles, the splits
of a kernel, the shards of a vocabulary-parallel head) leave states that merge into the state of the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels.no_token import marked

__all__ = ["TokenState", "TokenStats", "merge_token_states"]

#: Above every token id, so that a minimum passes it over.
_NO_TOKEN = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenStats:
    """Holds the statistics of a position's distribution that decoding rules need.

    All fields have one shape: that of the positions asked for. Probabilities and entropy are of softmax(logits), at
    temperature 1 whatever the temperature of the draw. A row whose logits are all -inf has lse -inf and zeros
    elsewhere; one with a NaN or +inf logit has NaN for its probabilities. Neither has a token.

    Attributes:
        token: int64, the sampled token; the most likely one at temperature 0. Negative where there is none: see
            `no_token`.
        token_prob: probability of `token`.
        argmax: int64, the most likely token, the lowest id among equals.
        max_prob: probability of `argmax`.
        margin: `max_prob` less the probability of the runner-up; 0 for a tie, `max_prob` for a vocabulary of one.
        entropy: in nats, at least 0.
        lse: natural log of the sum of e^logit.
    """

    token: Tensor
    token_prob: Tensor
    argmax: Tensor
    max_prob: Tensor
    margin: Tensor
    entropy: Tensor
    lse: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenState:
    """Holds the sums of a pass over a part of the vocabulary, all of one shape; ids count in the whole vocabulary.

    Attributes:
        top: largest logit m, at least `no_token.FLOOR`: finite, so that no -inf - -inf arises anywhere.
        total: s, the sum of e^(x - m).
        slope: t, the sum of (x - m) e^(x - m).
        argmax: int64, the token of `top`, the lowest id among equals.
        second: the largest logit besides that of `argmax`; `FLOOR` or below where there is no other.
        token: int64, the token of the largest x / temperature + noise; `argmax` at temperature 0.
        token_logit: x of `token`.
        score: what `token` won by: x / temperature + noise, x at temperature 0.
    """

    top: Tensor
    total: Tensor
    slope: Tensor
    argmax: Tensor
    second: Tensor
    token: Tensor
    token_logit: Tensor
    score: Tensor

    def drawn(self) -> Tensor:
        """Returns the token, or a negative number where there is none."""
        # A sum of NaN is one of logits that are no numbers, as is a largest one of +inf.
        return marked(self.token, (self.top + self.total).masked_fill(self.total == 0, -math.inf))

    def stats(self) -> TokenStats:
        """Returns the statistics of the vocabulary this state has seen."""
        empty = self.total == 0
        total = self.total.masked_fill(empty, 1.0)
        spread = total.log()
        # expm1: of two nearly equal probabilities, the difference of the logits is far more accurate than their own.
        margin = -torch.expm1(self.second - self.top) / total
        return TokenStats(
            token=self.drawn(),
            token_prob=(torch.exp(self.token_logit - self.top) / total).masked_fill(empty, 0.0),
            argmax=self.argmax,
            max_prob=total.reciprocal().masked_fill(empty, 0.0),
            margin=margin.masked_fill(empty, 0.0),
            entropy=(spread - self.slope / total).clamp(min=0.0),
            lse=(self.top + spread).masked_fill(empty, -math.inf),
        )

    def reshape(self, *shape: int) -> TokenState:
        """Returns this state with every field reshaped."""
        return TokenState(**{name: getattr(self, name).reshape(shape) for name in _FIELDS})

    @staticmethod
    def cat(states: Sequence[TokenState]) -> TokenState:
        """Joins the states of several rows, one after the other: the same vocabulary, other rows."""
        if len(states) == 1:
            return states[0]
        return TokenState(**{name: torch.cat([getattr(state, name) for state in states]) for name in _FIELDS})


_FIELDS = tuple(field.name for field in dataclasses.fields(TokenState))


def merge_token_states(states: Sequence[TokenState]) -> TokenState:
    """Merges the states of disjoint parts of the vocabulary, as of a head split over ranks.

    Ties go to the lowest token id, whatever the order of the parts. All parts must come from one temperature and one
    noise; then the token drawn is the one a single pass over everything draws.

    Args:
        states: one state per part, with fields of one shape.

    Raises:
        ArgumentError: no states, or shapes that differ.
        ArgumentTypeError: something other than states.

    Source: the split softmax of Milakov and Gimelshein, arXiv 1805.02867, section 3.
    """
    states = list(states)
    _check(states)
    if len(states) == 1:
        return states[0]
    part = {name: torch.stack([getattr(state, name) for state in states]) for name in _FIELDS}
    top, score = part["top"].amax(dim=0), part["score"].amax(dim=0)
    shift = part["top"] - top
    decay = torch.exp(shift)
    total = decay * part["total"]
    token = _lowest(part["token"], part["score"], score)
    drawn = (part["score"] == score) & (part["token"] == token)
    return TokenState(
        top=top,
        total=total.sum(dim=0),
        # A sum that counted from another maximum moves by their difference.
        slope=(decay * part["slope"] + shift * total).sum(dim=0),
        argmax=_lowest(part["argmax"], part["top"], top),
        second=torch.cat([part["top"], part["second"]]).topk(2, dim=0).values[1],
        token=token,
        token_logit=part["token_logit"].masked_fill(~drawn, -math.inf).amax(dim=0),
        score=score,
    )


def _lowest(tokens: Tensor, values: Tensor, largest: Tensor) -> Tensor:
    """Returns the lowest token among the parts that hold the largest value."""
    # A NaN equals nothing, not even itself, but the id returned has to be a token's in any case.
    return tokens.masked_fill(~((values == largest) | values.isnan()), _NO_TOKEN).amin(dim=0)


def _check(states: list[TokenState]) -> None:
    if not states:
        raise ArgumentError("merge_token_states needs at least one state, found none")
    for index, state in enumerate(states):
        if not isinstance(state, TokenState):
            raise ArgumentTypeError(f"merge_token_states needs TokenState, part {index} is a {type(state).__name__}")
        if state.top.shape != states[0].top.shape:
            raise ArgumentError(
                f"merge_token_states needs states of one shape; part {index} has {tuple(state.top.shape)}, "
                f"part 0 has {tuple(states[0].top.shape)}"
            )
