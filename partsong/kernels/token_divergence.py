"""Measures how far a distribution over the vocabulary has moved, from the hidden states alone."""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.kernels.call import compute_dtype
from partsong.kernels.token_head_naive import Logits, to_logits

__all__ = ["token_divergence"]

#: Tokens whose logits exist at a time.
_TILE = 8192


@torch.no_grad()
def token_divergence(
    hidden: Tensor,
    other: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Computes KL(p || q) in nats of two distributions over the vocabulary, without storing either.

    With logits a of p and b of q it is sum p (a - b) - lse(a) + lse(b), and each of the three is a running sum over
    tiles of the vocabulary.

    Args:
        hidden: `[N, C]`, what p is read from.
        other: `[N, C]`, what q is read from.
        weight: the head `[V, C]`.
        bias: `[V]`; a token it forbids with -inf does not count.
        softcap: as in `token_stats`.
        logit_scale: as in `token_stats`.

    Returns:
        `[N]`, at least 0, float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: the shapes do not fit.

    >>> import torch
    >>> x, w = torch.randn(3, 4), torch.randn(9, 4)
    >>> token_divergence(x, x, w).tolist()
    [0.0, 0.0, 0.0]
    """
    if hidden.shape != other.shape or hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ArgumentError(
            f"token_divergence needs two hidden states [N, C] and a head [V, C]; found {tuple(hidden.shape)}, "
            f"{tuple(other.shape)} and {tuple(weight.shape)}"
        )
    wide, form = compute_dtype(hidden.dtype), Logits(bias=bias, softcap=softcap, scale=logit_scale)
    lse_a = lse_b = torch.full((len(hidden),), -torch.inf, dtype=wide, device=hidden.device)
    mean = torch.zeros_like(lse_a)
    for first in range(0, len(weight), _TILE):
        here = slice(first, first + _TILE)
        part = weight[here].to(wide)
        a, b = (to_logits(x.to(wide) @ part.T, form, here) for x in (hidden, other))
        top = torch.logaddexp(lse_a, a.logsumexp(1))
        # The mean of a - b under p, so far: rescaled to the larger sum, plus the new part.
        gap = torch.where(a > -torch.inf, a - b, 0.0)
        mean = mean * (lse_a - top).exp() + ((a - top[:, None]).exp() * gap).sum(1)
        lse_a, lse_b = top, torch.logaddexp(lse_b, b.logsumexp(1))
    return (mean - lse_a + lse_b).clamp(min=0.0)
