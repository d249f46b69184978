"""Calls the partial attention of xformers (since 0.0.34 that of mslk), which returns the log-sum-exp.

Its operators that do so take half precision, no bias, and the causal mask of as many queries as keys.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.backends.cuda import normalise
from partsong.kernels.backends.external import refusal, rows_first
from partsong.kernels.call import Call

__all__ = ["run", "supports", "usable"]

MAX_HEAD_SIZE = 256


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not)."""
    if importlib.util.find_spec("xformers") is None:
        return False, "xformers is not installed (pip install 'partsong[gpu]')"
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return False, "it needs compute capability 8.0 or newer"
    return True, "xformers' memory_efficient_attention_partial"


def supports(call: Call) -> tuple[bool, str]:
    """Whether these inputs can be computed correctly, and why (not)."""
    reason = refusal(call, MAX_HEAD_SIZE)
    if reason:
        return False, reason
    ops, reason = _load()
    return ops is not None, reason


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for a plain call that is not empty."""
    ops, reason = _load()
    assert ops is not None, reason
    q, k, v = rows_first(call)
    key_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    if group > 1:
        # Query heads that share a key head are a dim of their own; the keys repeat along it with stride 0.
        q = q.unflatten(2, (key_heads, group))
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
    mask = None if call.mask is None else ops.LowerTriangularMask()
    out, lse = ops.fmha.memory_efficient_attention_partial(q, k, v, mask, scale=call.scale)
    # The outputs are float32, and the log-sum-exp of some of its operators is padded.
    out = out.flatten(2, -2).transpose(1, 2)[..., : call.q.shape[3]].to(call.q.dtype)
    return normalise(out, lse.flatten(1, -2), call.q.shape[2], None)


@functools.cache
def _load() -> tuple[Any, str]:
    """Loads `xformers.ops` once, or returns None and why it cannot be used."""
    ok, reason = usable()
    if not ok:
        return None, reason
    try:
        ops = importlib.import_module("xformers.ops")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch, or its mslk is missing
        return None, f"xformers does not load: {error}"
    if not hasattr(ops.fmha, "memory_efficient_attention_partial"):
        return None, "this xformers has no memory_efficient_attention_partial (it needs 0.0.28 or newer)"
    return ops, "xformers' memory_efficient_attention_partial"
