"""Holds what kernels of optional packages have in common: half precision, no bias, no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.kernels.backends import cuda
from partsong.kernels.call import Call

__all__ = ["refusal", "rows_first"]

_DTYPES = (torch.float16, torch.bfloat16)


def refusal(call: Call, max_head_size: int) -> str:
    """Says why such a kernel cannot compute a plain call, or "" if it can.

    Args:
        call: a plain call that is not empty.
        max_head_size: largest D after padding to a multiple of 8.
    """
    q = call.q
    if not q.is_cuda:
        return f"the tensors are on {q.device.type}, not cuda"
    if q.dtype not in _DTYPES:
        return f"it computes float16 and bfloat16, not {q.dtype}"
    if not 0 < q.shape[3] <= max_head_size:
        return f"its head size goes from 1 to {max_head_size}, found {q.shape[3]}"
    if call.bias is not None:
        return "it takes no mask or bias"
    if call.needs_gradient:
        return "an input requires a gradient and this kernel's log-sum-exp has none (use torch.no_grad())"
    return ""


def rows_first(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v as `[B, L, H, D]` with aligned rows and D a multiple of 8; views if they have that already."""
    q, k, v = (cuda.align_rows(x).transpose(1, 2) for x in (call.q, call.k, call.v))
    return q, k, v
