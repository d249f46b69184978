"""Applies a model's head at a few positions, whole or as the part of the vocabulary that each rank holds."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from partsong.kernels.few_rows import few_rows_product
from partsong.kernels.token_divergence import token_divergence
from partsong.kernels.token_head import TokenNoise, token_ids, token_state, token_stats
from partsong.kernels.token_head_naive import FEW_ROWS, Logits, to_logits
from partsong.kernels.token_state import TokenState, TokenStats, merge_token_states
from partsong.parallel.ranks.collectives import all_gather, gather_tokens
from partsong.parallel.ranks.sums import sum_over
from partsong.samplers.text.model import Head

__all__ = ["barred", "head_divergence", "head_ids", "head_logits", "head_stats", "log_probs"]


def barred(head: Head, tokens: tuple[int, ...], bias: Tensor | None = None) -> Tensor | None:
    """Returns the head's bias `[V]` (or another one) with some tokens forbidden, or None where there is no bias.

    Of a head that is shared out over ranks it is this rank's part.
    """
    bias = head.bias if bias is None else bias
    if not tokens:
        return bias
    bias = head.weight.new_zeros(len(head.weight)) if bias is None else bias.clone()
    first = 0 if head.shard is None else head.shard.first
    mine = [token - first for token in tokens if 0 <= token - first < len(bias)]
    bias[mine] = -torch.inf
    return bias


def head_stats(
    head: Head,
    hidden: Tensor,
    *,
    bias: Tensor | None,
    heat: float = 1.0,
    temperature: float = 0.0,
    noise: TokenNoise | None = None,
) -> TokenStats:
    """Computes what `token_stats` does, from the states of all ranks where the head is shared out.

    Args:
        head: from hidden states to logits.
        hidden: `[N, C]`, the same on all ranks.
        bias: replaces the head's; see `barred`.
        heat: temperature of the statistics.
        temperature: of the draw.
        noise: of the draw.
    """
    form = _form(head, bias, heat) | {"temperature": temperature, "noise": noise}
    if head.shard is None:
        return token_stats(hidden, head.weight, **form)
    return _merged(head, token_state(hidden, head.weight, first_token=head.shard.first, **form)).stats()


def head_ids(head: Head, hidden: Tensor, *, temperature: float = 0.0, noise: TokenNoise | None = None) -> Tensor:
    """Draws tokens `[N]` and computes nothing else; arguments are those of `head_stats`."""
    form = _form(head, head.bias, 1.0) | {"temperature": temperature, "noise": noise}
    if head.shard is None:
        return token_ids(hidden, head.weight, **form)
    return _merged(head, token_state(hidden, head.weight, first_token=head.shard.first, **form)).drawn()


def head_logits(head: Head, hidden: Tensor) -> Tensor:
    """Computes all logits `[N, V]` of some hidden states `[N, C]`."""
    product = few_rows_product if hidden.is_cpu and len(hidden) <= FEW_ROWS else functional.linear
    logits = to_logits(product(hidden, head.weight), _logits(head, head.bias), slice(0, len(head.weight)))
    return logits if head.shard is None else gather_tokens(head.shard.axis, logits, head.shard.sizes, 1, name="logits")


def head_divergence(head: Head, hidden: Tensor, other: Tensor, bias: Tensor | None) -> Tensor:
    """Computes what `token_divergence` does between what is read from two hidden states `[N, C]`."""
    form = _form(head, bias, 1.0)
    apart = token_divergence(hidden, other, head.weight, **form)
    if head.shard is None:
        return apart
    # With p = P_s p_s on the tokens of shard s: sum p (a - b) = sum over s of P_s (KL_s + lse(a_s) - lse(b_s)).
    mine = [token_stats(x, head.weight, **form).lse for x in (hidden, other)]
    whole = [head_stats(head, x, bias=bias).lse for x in (hidden, other)]
    part = torch.exp(mine[0] - whole[0]) * (apart + mine[0] - mine[1])
    mean = sum_over(head.shard.axis, part.nan_to_num(0.0), name="divergence")
    return (mean - whole[0] + whole[1]).clamp(min=0.0)


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
    stats, shard = head_stats(head, hidden, bias=bias), head.shard
    total = stats.lse
    local = tokens if shard is None else (tokens - shard.first).clamp(0, shard.size - 1)
    product = (hidden.to(total.dtype) * head.weight[local].to(total.dtype)).sum(1)
    logit = to_logits(product, _logits(head, bias), local)
    if shard is not None:
        logit = sum_over(shard.axis, torch.where(tokens == local + shard.first, logit, 0.0), name="logits of tokens")
    return (logit - total).clamp(max=0.0), stats.argmax


def _logits(head: Head, bias: Tensor | None) -> Logits:
    return Logits(bias=bias, softcap=head.softcap, scale=head.logit_scale)


def _form(head: Head, bias: Tensor | None, heat: float) -> dict[str, Any]:
    return {"bias": bias, "softcap": head.softcap, "logit_scale": head.logit_scale / heat}


def _merged(head: Head, state: TokenState) -> TokenState:
    """Merges the states of all ranks, to the same bits on all of them."""
    assert head.shard is not None
    axis, names = head.shard.axis, [each.name for each in fields(TokenState)]
    mine = [getattr(state, name) for name in names]
    # Token ids are exact in float64, and so are the sums.
    table = torch.empty((axis.size, len(names), *mine[0].shape), dtype=torch.float64, device=mine[0].device)
    table[axis.index] = torch.stack([each.double() for each in mine])
    all_gather(axis, table, [1] * axis.size, name="states of the vocabulary").wait()
    rows = (zip(names, mine, part, strict=True) for part in table)
    return merge_token_states([TokenState(**{name: x.to(own.dtype) for name, own, x in row}) for row in rows])
