"""Computes attention to chosen blocks of keys, in time that goes with how many were chosen.

On the CPU, blocks of queries that see equally many blocks of keys are computed together, with their keys put side by
side. On CUDA the tiles of flex_attention do it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.kernels.backends import cpu_flash, flex, naive
from partsong.kernels.call import Call, Segment, compute_dtype
from partsong.kernels.masks import ChosenBlocks
from partsong.kernels.merge import merge_checked

__all__ = ["run", "supports", "usable"]

#: Most numbers of keys that are put side by side at once.
MAX_GATHERED = 1 << 24


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not)."""
    return True, "chosen blocks of keys, by torch's CPU kernel or by flex_attention"


def supports(call: Call) -> tuple[bool, str]:
    """Whether this call can be computed correctly, and why (not)."""
    mask = call.mask
    if not isinstance(mask, ChosenBlocks):
        return False, "it computes masks of chosen blocks"
    if call.bias is not None:
        return False, "it takes no bias and no second mask"
    if call.q.is_cuda:
        return flex.supports(call)
    if call.q.is_meta:
        return True, "shapes"
    if call.q.shape[2] % mask.size or call.num_keys % mask.size:
        return False, f"queries and keys are whole blocks of {mask.size}, found {call.q.shape[2]} and {call.num_keys}"
    return cpu_flash.supports(call)


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for a call with chosen blocks and one tensor of keys."""
    if call.q.is_cuda:
        return flex.run(call)
    result = naive.run(Call(call.q, call.segments, None, None, call.scale)) if call.q.is_meta else _by_count(call)
    return result if call.init is None else merge_checked([call.init, result])


def _by_count(call: Call) -> tuple[Tensor, Tensor]:
    """Computes the blocks of queries that see equally many blocks of keys together."""
    mask, (batch, heads, length, dim) = call.mask, call.q.shape
    assert isinstance(mask, ChosenBlocks)
    size, group = mask.size, heads // call.k.shape[1]
    q, k, v = (x.unflatten(2, (-1, size)) for x in (call.q, call.k, call.v))
    chosen = mask.chosen.expand(batch, heads, -1, -1)
    counts = chosen.sum(-1)
    # One list of (sample, head, query block, key block) in order, so a block's keys are a run of it.
    keys = chosen.nonzero()[:, 3]
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    out = torch.zeros((batch, heads, length // size, size, dim), dtype=call.q.dtype)
    lse = torch.full((batch, heads, length // size, size), -torch.inf, dtype=compute_dtype(call.q.dtype))
    for count in counts.unique().tolist():
        if count:
            most = max(MAX_GATHERED // (count * size * dim), 1)
            for where in (counts == count).nonzero().split(most):
                sample, head, row = where.unbind(1)
                seen = keys[starts[sample, head, row][:, None] + torch.arange(count)]
                near = sample[:, None], head[:, None] // group, seen
                part = Segment(k[near].flatten(1, 2)[:, None], v[near].flatten(1, 2)[:, None])
                found = cpu_flash.run(Call(q[sample, head, row][:, None], (part,), None, None, call.scale))
                out[sample, head, row], lse[sample, head, row] = (x[:, 0] for x in found)
    return out.flatten(2, 3), lse.flatten(2, 3)
