"""Holds what kernels of optional packages have in common: half precision, no bias, no gradient."""

from __future__ import annotations

from torch import Tensor

from partsong.kernels import call as calls
from partsong.kernels.backends import cuda
from partsong.kernels.call import HALF, Call

__all__ = ["refusal", "rows_first"]


def refusal(call: Call, max_head_size: int) -> str:
    """Says why such a kernel cannot compute a plain call, or "" if it can.

    Args:
        call: a plain call that is not empty.
        max_head_size: largest D after padding to a multiple of 8.
    """
    if not call.q.is_cuda:
        return f"the tensors are on {call.q.device.type}, not cuda"
    return calls.refusal(call, HALF, max_head_size, takes_bias=False)


def rows_first(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v as `[B, L, H, D]` with aligned rows and D a multiple of 8; views if they have that already."""
    q, k, v = (cuda.align_rows(x).transpose(1, 2) for x in (call.q, call.k, call.v))
    return q, k, v
