"""Specifies `attention`: softmax written out. It runs everywhere, is the slowest, and the others must agree with it.

s_ij = scale * q_i . k_j + bias_ij        lse_i = ln sum_j exp s_ij        out_i = sum_j exp(s_ij - lse_i) v_j
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partsong.kernels.call import Call, compute_dtype

__all__ = ["run", "supports", "usable"]

#: Most logits held at once; longer queries are processed in slices, so a fall-back is slow instead of running out of
#: memory.
MAX_LOGITS = 1 << 27


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not)."""
    return True, "plain torch, runs everywhere"


def supports(call: Call) -> tuple[bool, str]:
    """Whether these inputs can be computed: always."""
    return True, "plain torch"


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for a plain call that is not empty."""
    q, k, v = call.q, call.k, call.v
    batch, heads, length, _ = q.shape
    dtype = compute_dtype(q.dtype)
    if q.is_meta:
        return _shapes(q, k, v, dtype)
    rows = max(1, MAX_LOGITS // (batch * heads * k.shape[2]))
    # Autocast would turn the matmuls below into bfloat16 ones.
    with torch.autocast(q.device.type, enabled=False):
        k, v = k.to(dtype), v.to(dtype)
        slices = [slice(start, start + rows) for start in range(0, length, rows)]
        parts = [_softmax(q[:, :, here].to(dtype), k, v, _rows(call, here), call.scale) for here in slices]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
        return out.to(q.dtype), lse


def _shapes(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns results without values by one operator, so that those who count work see an attention."""
    if q.shape[-1] != v.shape[-1]:
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:3], dtype=dtype)
    every = (-1, q.shape[1], -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k[:, :1].expand(every), v[:, :1].expand(every)
    )
    return out, lse.to(dtype)


def _rows(call: Call, here: slice) -> Tensor | None:
    """Returns the bias of the logits of some of the queries."""
    if call.mask is not None:  # the square causal one
        keys = torch.arange(call.num_keys, device=call.q.device)
        hidden = keys[None, :] > keys[here][:, None]
        return torch.zeros(hidden.shape, dtype=compute_dtype(call.q.dtype), device=hidden.device).masked_fill(
            hidden, -math.inf
        )
    return call.bias if call.bias is None or call.bias.shape[2] == 1 else call.bias[:, :, here]


def _softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    # Query heads that share a key head become a dim of their own; k and v broadcast over it without a copy.
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], length, width)
    logits = (grouped @ k.unsqueeze(2).mT).reshape(batch, heads, length, k.shape[2]) * scale
    if bias is not None:
        logits = logits + bias
    top = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    lse = (torch.log(total) + top).squeeze(-1)  # an empty row: log 0 + -inf
    weights = weights / total.masked_fill(total == 0.0, 1.0)
    out = weights.reshape(batch, k.shape[1], -1, length, k.shape[2]) @ v.unsqueeze(2)
    return out.reshape(batch, heads, length, width), lse
