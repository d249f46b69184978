"""Applies the head at a few positions: forbids tokens, and computes the probability of given ones."""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.kernels.token_head import token_stats
from partsong.kernels.token_head_naive import Logits, to_logits
from partsong.samplers.text.model import Head

__all__ = ["barred", "log_probs"]


def barred(head: Head, tokens: tuple[int, ...], bias: Tensor | None = None) -> Tensor | None:
    """Returns the head's bias `[V]` (or another one) with some tokens forbidden, or None where there is no bias."""
    bias = head.bias if bias is None else bias
    if not tokens:
        return bias
    bias = head.weight.new_zeros(len(head.weight)) if bias is None else bias.clone()
    bias[list(tokens)] = -torch.inf
    return bias


def log_probs(head: Head, hidden: Tensor, tokens: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes log-probabilities of given tokens, and the likeliest tokens, without storing the logits.

    Args:
        head: from hidden states to logits.
        hidden: `[N, C]`.
        tokens: int64 `[N]`.
        bias: replaces the head's; see `barred`.

    Returns:
        Log-probabilities `[N]` in nats, and the most likely tokens `[N]`.
    """
    stats = token_stats(hidden, head.weight, bias=bias, softcap=head.softcap, logit_scale=head.logit_scale)
    total = stats.lse
    product = (hidden.to(total.dtype) * head.weight[tokens].to(total.dtype)).sum(1)
    logit = to_logits(product, Logits(bias=bias, softcap=head.softcap, scale=head.logit_scale), tokens)
    return (logit - total).clamp(max=0.0), stats.argmax
