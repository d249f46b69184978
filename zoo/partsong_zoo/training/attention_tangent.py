"""Computes attention together with its derivative along a direction, in one pass over the keys.

With S = scale q k^T + bias, P = softmax(S) and O = P v, the derivative along (tq, tk, tv) is

    tS = scale (tq k^T + q tk^T)
    tO = (P * tS) v - rowsum(P * tS) O + P tv

Every sum over keys is kept with a running maximum, as in flash attention, so no matrix of queries times keys larger
than a block is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partsong.errors import ArgumentError

__all__ = ["attention_tangent", "directional_derivative"]

Triple = tuple[Tensor, Tensor, Tensor]


def attention_tangent(
    values: Triple, tangents: Triple, *, bias: Tensor | None = None, scale: float | None = None, block: int = 1024
) -> tuple[Tensor, Tensor]:
    """Returns attention and its derivative along a direction.

    Args:
        values: queries `[B, H, Lq, D]`, keys `[B, H, Lk, D]` and values `[B, H, Lk, Dv]`.
        tangents: their derivatives, of the same shapes.
        bias: added to the logits, broadcast to `[B, H, Lq, Lk]`; it does not change along the direction.
        scale: of the logits; None takes ``D ** -0.5``.
        block: keys at a time.

    Returns:
        Output and derivative, each `[B, H, Lq, Dv]`.

    Raises:
        ArgumentError: a tangent differs in shape from its tensor.

    Source: the tangent of attention in continuous consistency models, arXiv 2410.11081.

    Example:
        >>> q = torch.zeros(1, 1, 2, 4)
        >>> out, derivative = attention_tangent((q, q, q), (q, q, q + 1.0))
        >>> bool((derivative == 1).all())
        True
    """
    for value, tangent in zip(values, tangents, strict=True):
        if value.shape != tangent.shape:
            raise ArgumentError(f"a tangent of {list(tangent.shape)} for {list(value.shape)}; they must be alike")
    q, k, v = values
    tq, tk, tv = tangents
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    top = q.new_full((*q.shape[:3], 1), -torch.inf)
    # Running sums of P, P tS, P v, (P tS) v + P tv.
    total, slope = torch.zeros_like(top), torch.zeros_like(top)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    change = torch.zeros_like(out)
    for first in range(0, k.shape[2], block):
        here = slice(first, first + block)
        keys, their_keys = k[:, :, here], tk[:, :, here]
        logits = factor * (q @ keys.mT)
        logits = logits if bias is None else logits + _columns(bias, here)
        rise = factor * (tq @ keys.mT + q @ their_keys.mT)
        higher = torch.maximum(top, logits.amax(dim=-1, keepdim=True))
        # A row without any key so far has no maximum; its sums are 0 at any scale.
        anchor = higher.masked_fill(higher == -torch.inf, 0.0)
        shrink = torch.exp(top - anchor)
        weights = torch.exp(logits - anchor)
        risen = weights * rise
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        slope = slope * shrink + risen.sum(dim=-1, keepdim=True)
        out = out * shrink + weights @ v[:, :, here]
        change = change * shrink + risen @ v[:, :, here] + weights @ tv[:, :, here]
        top = higher
    total = total.masked_fill(total == 0, 1.0)
    out = out / total
    return out, change / total - slope / total * out


def directional_derivative(
    function: Callable[..., Tensor], values: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Returns a function's value and its derivative along a direction, by forward differentiation.

    Unlike `torch.func.jvp` it takes models that call `torch.nn.functional.scaled_dot_product_attention`, whose fused
    kernels have no forward rule: their attention is computed by `attention_tangent`. Neither result keeps a graph.

    Args:
        function: of as many tensors as there are values, to one tensor.
        values: where to evaluate it.
        tangents: the direction, one tensor for every value.
    """
    with torch.no_grad(), forward.dual_level(), _DualAttention():
        duals = (forward.make_dual(value, tangent) for value, tangent in zip(values, tangents, strict=True))
        result: Any = forward.unpack_dual(function(*duals))
    tangent = torch.zeros_like(result.primal) if result.tangent is None else result.tangent
    return result.primal, tangent


class _DualAttention(TorchFunctionMode):
    """Computes attention over dual numbers by `attention_tangent`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and _depends((*args, *kwargs.values())):
            return _dual_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _depends(inputs: Iterable[Any]) -> bool:
    """Says whether any of the inputs changes along the direction."""
    return any(isinstance(each, Tensor) and forward.unpack_dual(each).tangent is not None for each in inputs)


def _dual_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p or is_causal or enable_gqa:
        raise ArgumentError(
            "attention with dropout, causal masks or grouped heads has no derivative here; leave them out"
        )
    parts: list[Any] = [forward.unpack_dual(each) for each in (query, key, value)]
    values = tuple(each.primal for each in parts)
    tangents = tuple(torch.zeros_like(each.primal) if each.tangent is None else each.tangent for each in parts)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=query.dtype, device=bias.device).masked_fill(~bias, -torch.inf)
    return forward.make_dual(*attention_tangent(values, tangents, bias=bias, scale=scale))  # type: ignore[arg-type]


def _columns(bias: Tensor, here: slice) -> Tensor:
    return bias if bias.shape[-1] == 1 else bias[..., here]
