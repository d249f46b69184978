"""Computes the loss of group-relative policy optimisation, as a pure function of sampled tokens' log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs, type_hints

__all__ = ["PolicyLoss", "per_token", "policy_loss"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Holds a loss and two numbers to watch.

    Attributes:
        loss: the number that training makes smaller.
        divergence: the mean estimate of the divergence from the reference; 0 without a reference.
        clipped: the share of tokens whose ratio was clipped, so that they give no gradient.
    """

    loss: Tensor
    divergence: float
    clipped: float


def policy_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    texts: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    reference: Tensor | None = None,
    divergence_weight: float = 0.0,
    normalise: Literal["token", "sequence", "constant"] = "token",
    most_tokens: Count | None = None,
) -> PolicyLoss:
    """Computes the clipped surrogate loss of sampled tokens, with an optional pull towards a reference model.

    With the ratio r = exp(new - old), every token gains min(r A, clip(r, 1 - low, 1 + high) A). It loses
    ``divergence_weight * (exp(d) - d - 1)`` with d = reference - new, whose mean over tokens that `new` drew is the
    divergence.

    `normalise` says how texts of different length count. "token" takes the mean over all tokens, so that long texts
    count for more (DAPO, arXiv 2503.14476). "sequence" takes the mean of the texts' own means (GRPO, arXiv 2402.03300).
    "constant" divides the sum by ``texts * most_tokens`` (Dr. GRPO, arXiv 2503.20783).

    Args:
        new: log-probabilities under the model that is trained, with gradient, `[tokens]`.
        old: log-probabilities under the model that drew the tokens, `[tokens]`.
        advantages: for each token the advantage of its text, `[tokens]`.
        texts: for each token the number of its text, int64, `[tokens]`.
        clip: how far the ratio may fall below and rise above 1.
        reference: log-probabilities under the reference, `[tokens]`; None for no reference.
        divergence_weight: weight of the pull towards the reference.
        normalise: "token", "sequence" or "constant".
        most_tokens: how many tokens a text may have; only for "constant".

    Returns:
        The loss, and two numbers to watch.

    Raises:
        ArgumentError: the tensors differ in length or are empty, there is a weight without a reference or a reference
            without a weight, or a knob is out of bounds.

    >>> old = torch.log(torch.tensor([0.5, 0.5]))
    >>> new = torch.log(torch.tensor([0.55, 0.8]))
    >>> policy_loss(new, old, torch.tensor([1.0, 1.0]), torch.tensor([0, 0])).loss
    tensor(-1.1500)
    """
    check_knobs(type_hints(policy_loss), {"normalise": normalise, "most_tokens": most_tokens})
    _check_shapes(new, {"old": old, "advantages": advantages, "texts": texts, "reference": reference})
    low, high = clip
    if not (0 <= low <= 1 and high >= 0):
        raise ArgumentError(f"clip={clip}; use a lower bound from 0 to 1 and an upper one of 0 or more")
    if (reference is None) != (divergence_weight == 0):
        raise ArgumentError(
            f"divergence_weight={divergence_weight} with {'no' if reference is None else 'a'} reference; give both or "
            f"neither"
        )
    ratio = torch.exp(new - old)
    plain, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    gain, divergence = torch.minimum(plain, bounded), 0.0
    if reference is not None:
        away = reference - new
        apart = torch.exp(away) - away - 1
        gain, divergence = gain - divergence_weight * apart, float(apart.detach().mean())
    weights = _weights(texts, normalise, most_tokens).to(gain.dtype)
    clipped = float((bounded < plain).detach().float().mean())
    return PolicyLoss(-(weights * gain).sum(), divergence, clipped)


def per_token(values: Tensor, texts: Tensor) -> Tensor:
    """Repeats a value per text for each of its tokens: `[texts]` and `[tokens]` give `[tokens]`.

    >>> per_token(torch.tensor([0.5, -0.5]), torch.tensor([1, 0, 0]))
    tensor([-0.5000,  0.5000,  0.5000])
    """
    return values[texts]


def _weights(texts: Tensor, normalise: str, most_tokens: int | None) -> Tensor:
    _, place, counts = texts.unique(return_inverse=True, return_counts=True)
    if (most_tokens is not None) != (normalise == "constant"):
        raise ArgumentError(f"most_tokens={most_tokens} with normalise={normalise!r}; only 'constant' needs it")
    if normalise == "token":
        return torch.full_like(texts, 1, dtype=torch.float64) / len(texts)
    if normalise == "sequence":
        return 1 / (len(counts) * counts.double())[place]
    assert most_tokens is not None
    longest = int(counts.max())
    if longest > most_tokens:
        raise ArgumentError(
            f"a text has {longest} tokens, most_tokens={most_tokens}; give the limit they were drawn with"
        )
    return torch.full_like(texts, 1, dtype=torch.float64) / (len(counts) * most_tokens)


def _check_shapes(new: Tensor, others: dict[str, Tensor | None]) -> None:
    if new.ndim != 1 or not len(new):
        raise ArgumentError(f"new has shape {tuple(new.shape)}; give log-probabilities of at least one token, flat")
    for name, other in others.items():
        if other is not None and other.shape != new.shape:
            raise ArgumentError(
                f"{name} has shape {tuple(other.shape)}, new {tuple(new.shape)}; give one value per token"
            )
