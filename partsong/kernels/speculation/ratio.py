"""Verifies drafts whose own distribution is known, by ratios: for callers that draw without keyed noise.

The drafts must have been drawn from exactly the distributions given, with randomness of their own: where drafter and
model share noise, `match` is the rule, and a ratio would not be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Acceptance", "accept_block", "accept_chain", "accept_one_of"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Says how much of a draft is kept.

    Attributes:
        accepted: how many drafted tokens are kept; of several for one place, which one, and -1 for none.
        rest: the distribution `[vocabulary]` that the next token is drawn from.
    """

    accepted: int
    rest: Tensor


def accept_chain(target: Tensor, draft: Tensor, tokens: Sequence[int], uniforms: Sequence[float]) -> Acceptance:
    """Keeps each drafted token with the ratio of its probabilities, up to the first that fails.

    Args:
        target: the model's probabilities after 0, 1, ... drafted tokens, `[n + 1, vocabulary]`.
        draft: the drafter's, `[n, vocabulary]`.
        tokens: the n drafted tokens, each drawn from its row of `draft`.
        uniforms: n independent numbers in [0, 1).

    Returns:
        How many are kept, and the distribution of the token after them.

    Source: speculative decoding, arXiv 2211.17192 and 2302.01318.

    >>> import torch
    >>> accept_chain(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), [0], [0.4]).accepted
    1
    """
    for place, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        if uniform * draft[place, token] >= target[place, token]:
            return Acceptance(place, _residual(target[place], draft[place]))
    return Acceptance(len(tokens), target[len(tokens)])


def accept_block(target: Tensor, draft: Tensor, tokens: Sequence[int], uniforms: Sequence[float]) -> Acceptance:
    """Keeps the longest beginning of a draft that passes as a whole; on average more than `accept_chain` does.

    Every beginning is tested with a number of its own, and the last one that passes counts. Arguments and result are
    those of `accept_chain`.

    Source: block verification, arXiv 2403.10444.
    """
    weight, accepted, rest = 1.0, 0, _residual(target[0], draft[0]) if len(tokens) else target[0]
    for place, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True), 1):
        weight = min(weight * float(target[place - 1, token] / draft[place - 1, token]), 1.0)
        if place == len(tokens):
            chance, left = weight, target[place]
        else:
            excess = (weight * target[place] - draft[place]).clamp(min=0)
            mass = float(excess.sum())
            chance = mass / (mass + 1.0 - weight) if mass + 1.0 - weight > 0 else 1.0
            left = excess / mass if mass > 0 else target[place]
        if uniform < chance:
            accepted, rest = place, left
    return Acceptance(accepted, rest)


def accept_one_of(target: Tensor, draft: Tensor, tokens: Sequence[int], uniforms: Sequence[float]) -> Acceptance:
    """Keeps one of several tokens drafted for one place, which were drawn one after another without replacement.

    Args:
        target: the model's probabilities, `[vocabulary]`.
        draft: the drafter's, `[vocabulary]`, from which the first was drawn; each further one from what was left.
        tokens: the drafted tokens, in the order in which they were drawn. They must not be the likeliest ones by rule.
        uniforms: as many independent numbers in [0, 1).

    Returns:
        Which of them is kept, -1 for none, and the distribution of the token at this place where none is.

    Source: Sequoia, arXiv 2402.12374.
    """
    target, draft = target.clone(), draft.clone()
    for number, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        if uniform * draft[token] < target[token]:
            return Acceptance(number, target)
        target = _residual(target, draft)
        draft[token] = 0
        if float(draft.sum()) > 0:
            draft = draft / draft.sum()
    return Acceptance(-1, target)


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Returns the model's excess over the drafter as a distribution; the model's own if there is none."""
    excess = (target - draft).clamp(min=0)
    mass = excess.sum()
    return excess / mass if float(mass) > 0 else target
