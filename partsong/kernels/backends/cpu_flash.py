"""Calls the tiled CPU kernel of PyTorch for the log-sum-exp that `F.scaled_dot_product_attention` throws away.

It has these traps, each measured on torch 2.13, and each is guarded against:

- an empty batch, head, query or key dim ends the process with SIGFPE: `attention` answers those itself;
- other batch sizes for k and v than for q read out of bounds without an error: refused by `check_qkv`;
- q, k or v whose last dim is not contiguous gives wrong numbers without an error: copied here;
- a fully masked row has out 0 but lse 0.0, which a merge would count as a real part: rewritten to -inf here;
- bool masks and masks of three dims raise: `additive` makes float masks of four dims;
- its log-sum-exp carries no gradient, so inputs that need one are refused and go to the plain version.

Any other stride is read in place (so `[B, S, H, D]` storage costs no copy and `out` has q's layout), every head size
from 1 up works, and grouped key heads are read as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partsong.kernels.call import NO_GRADIENT, Call

__all__ = ["run", "supports", "usable"]

_OP = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not)."""
    if _OP is None:
        return False, f"torch {torch.__version__} has no _scaled_dot_product_flash_attention_for_cpu"
    return True, "PyTorch's tiled CPU kernel"


def supports(call: Call) -> tuple[bool, str]:
    """Whether these inputs can be computed correctly, and why (not)."""
    if _OP is None:
        return usable()
    if not call.q.is_cpu:
        return False, f"the tensors are on {call.q.device.type}, not cpu"
    if not call.q.shape[3]:
        return False, "the head size is 0"
    if call.needs_gradient:
        return False, NO_GRADIENT
    return True, "PyTorch's tiled CPU kernel"


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for a plain call that is not empty."""
    assert _OP is not None
    bias, scale = call.bias, call.scale
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    if bias is None:
        out, lse = _OP.default(q, k, v, is_causal=call.mask is not None, scale=scale)
        return out, lse.contiguous()
    out, lse = _OP.default(q, k, v, attn_mask=bias, scale=scale)
    lse = lse.contiguous()
    # An empty row gets exactly 0.0 and hardly any other row does, so the mask is rarely read a second time.
    suspect = lse == 0.0
    if bool(suspect.any()):
        lse = lse.masked_fill(suspect & (bias.amax(dim=-1) == -math.inf), -math.inf)
    return out, lse
