"""Turns a router's logits for each sample into weights of the chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.errors import ArgumentError

__all__ = ["expert_weights"]


def expert_weights(logits: Tensor, *, top_k: int | None = None, temperature: float = 1.0) -> Tensor:
    """Returns the weight of every expert for every sample, 0 for experts that are not chosen.

    The posterior is the softmax of the logits over the temperature. The `top_k` largest of a sample are kept and
    divided by their sum; of equal ones the first is kept.

    Args:
        logits: of the router, `[samples, experts]`.
        top_k: experts asked for a sample; None asks all.
        temperature: what the logits are divided by. Below 1 sharpens the router's choice, above 1 softens it.

    Returns:
        Weights `[samples, experts]` that sum to 1, in single precision at least.

    Raises:
        ArgumentError: `top_k` is not between 1 and the number of experts, or the temperature is not above 0.

    Source: Decentralized Diffusion Models, arXiv 2501.05450.

    >>> expert_weights(torch.tensor([[0.0, 2.0, 1.0]]), top_k=1)
    tensor([[0., 1., 0.]])
    """
    experts = logits.shape[1]
    if top_k is not None and not 1 <= top_k <= experts:
        raise ArgumentError(f"top_k={top_k} of {experts} experts; use a number from 1 to {experts}")
    if not temperature > 0:
        raise ArgumentError(f"temperature={temperature}; use a number above 0")
    posterior = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(dim=1)
    if top_k is None or top_k == experts:
        return posterior
    order = posterior.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    kept = torch.zeros_like(posterior).scatter(1, order, posterior.gather(1, order))
    return kept / kept.sum(dim=1, keepdim=True)
