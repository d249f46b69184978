"""Describes one attention call as the kernels see it: queries, segments of keys, a mask kind, a bias, a start."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.masks import SHARED, Causal, Mask, Streams

__all__ = [
    "HALF",
    "NO_GRADIENT",
    "Call",
    "Segment",
    "compute_dtype",
    "missing_triton",
    "refusal",
    "triton_refusal",
    "triton_version",
]

HALF = (torch.float16, torch.bfloat16)
#: The kernels are tested from this version on; the interpreter of 3.3 computes some of them wrong.
OLDEST_TRITON = (3, 6)
#: Why a kernel refuses inputs that require a gradient.
NO_GRADIENT = "an input requires a gradient and this kernel's log-sum-exp has none (use torch.no_grad())"


@functools.cache
def triton_version() -> str | None:
    """Returns the version of the package triton; None without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def missing_triton() -> str:
    """Says why our Triton kernels cannot be compiled here; empty where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    there = triton_version()
    if there is None:  # it came in a package of another name, as AMD's
        return ""
    major, minor = map(int, re.findall(r"\d+", there)[:2])
    return "" if (major, minor) >= OLDEST_TRITON else f"it needs triton 3.6 or newer, found {there}"


@functools.cache
def triton_refusal(device: torch.device) -> str:
    """Says why our Triton kernels do not compute on a device; empty where they do."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if torch.version.hip is not None:
        return "it was not tried on ROCm"
    if missing_triton():
        return missing_triton()
    return "" if torch.cuda.get_device_capability(device) >= (8, 0) else "it needs compute capability 8.0 or newer"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of logits, log-sum-exp and accumulators: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Holds keys and values in memory of their own; a call takes any number of segments and copies none.

    Args:
        k: keys `[B, Hkv, L, D]`, any strides (an expanded batch is read in place); L may be 0.
        v: values of the same shape.
        bias: added to every logit of the segment: ``math.log(r)`` where one key stands for r of them, -inf leaves the
            segment out.
        position: position of its first key, for causal masks; None is right after the segment before.
        stream: which stream of a `Streams` mask sees it; `SHARED` (-1) is all of them.
    """

    k: Tensor
    v: Tensor
    bias: float = 0.0
    position: int | None = None
    stream: int = SHARED

    @property
    def length(self) -> int:
        """Counts the keys."""
        return self.k.shape[2]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Holds a checked call.

    Attributes:
        q: `[B, Hq, Lq, D]`.
        segments: at least one, none empty, every position given.
        mask: mask kind or None; ids and additive bias run over the keys of all segments in order.
        bias: four dims, each 1 or the full size of `[B, Hq, Lq, Lk]`, in `compute_dtype`; -inf masks.
        scale: factor on q.k.
        init: an earlier (out, lse) over other keys, or None.
    """

    q: Tensor
    segments: tuple[Segment, ...]
    mask: Mask | None
    bias: Tensor | None
    scale: float
    init: tuple[Tensor, Tensor] | None = None

    @property
    def k(self) -> Tensor:
        """Returns the keys of a call with one segment."""
        return self.segments[0].k

    @property
    def v(self) -> Tensor:
        """Returns the values of a call with one segment."""
        return self.segments[0].v

    @property
    def num_keys(self) -> int:
        """Counts the keys of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def needs_gradient(self) -> bool:
        """Says whether autograd would have to follow this call."""
        if not torch.is_grad_enabled():
            return False
        tensors = [self.q, *(x for s in self.segments for x in (s.k, s.v)), *(self.init or ())]
        tensors += [] if self.bias is None else [self.bias]
        return any(x.requires_grad for x in tensors)

    @property
    def is_square_causal(self) -> bool:
        """Says whether the mask is the plain causal one of as many queries as keys."""
        first = self.segments[0]
        return (
            isinstance(self.mask, Causal)
            and len(self.segments) == 1
            and self.mask.offset == first.position
            and self.q.shape[2] == first.length
        )

    def plain(self) -> Call:
        """Returns the same call for kernels that know one tensor of keys, an additive bias and the square causal mask.

        Segments are put together, all other masks are written out; `init` is left to a merge.
        """
        first, *others = self.segments
        if self.mask is None and not others and not first.bias:
            return self if self.init is None else Call(self.q, self.segments, None, self.bias, self.scale)
        causal = self.is_square_causal and self.bias is None and not first.bias
        bias = self.bias if causal else self._dense_bias()
        k, v = first.k, first.v
        if others:
            k = torch.cat([segment.k for segment in self.segments], dim=2)
            v = torch.cat([segment.v for segment in self.segments], dim=2)
        one = Segment(k, v, position=first.position if causal else 0)
        return Call(self.q, (one,), self.mask if causal else None, bias, self.scale)

    def by_segment(self) -> list[Call]:
        """Returns one call per segment, without the segments' bias: it can be added to their log-sum-exp."""
        calls, start = [], 0
        for segment in self.segments:
            part = self._select_keys((segment,), slice(start, start + segment.length))
            calls.append(replace(part, segments=(replace(segment, bias=0.0),), init=None))
            start += segment.length
        return calls

    def used(self) -> Call | None:
        """Returns the call without segments that are empty or left out, or None where no key is left."""
        kept = [segment.length > 0 and segment.bias != -math.inf for segment in self.segments]
        if False not in kept:
            return self if kept else None
        if not any(kept):
            return None
        lengths = torch.tensor([segment.length for segment in self.segments])
        where = torch.tensor(kept).repeat_interleave(lengths).nonzero()[:, 0].to(self.q.device)
        return self._select_keys(tuple(s for s, keep in zip(self.segments, kept, strict=True) if keep), where)

    def _select_keys(self, segments: tuple[Segment, ...], where: Any) -> Call:
        mask = self.mask if self.mask is None else self.mask.keys(where)
        bias = self.bias if self.bias is None or self.bias.shape[3] == 1 else self.bias[..., where]
        return replace(self, segments=segments, mask=mask, bias=bias)

    def _dense_bias(self) -> Tensor | None:
        """Returns bias, segment biases and mask as one additive tensor."""
        device, dtype = self.q.device, compute_dtype(self.q.dtype)
        total = self.bias
        if any(segment.bias for segment in self.segments):
            row = torch.cat([torch.full((s.length,), s.bias, dtype=dtype, device=device) for s in self.segments])
            total = row[None, None, None] if total is None else total + row
        if self.mask is not None:
            zero = torch.zeros((), dtype=dtype, device=device)
            total = torch.where(self._dense_mask(), zero if total is None else total, -math.inf)
        return total

    def _dense_mask(self) -> Tensor:
        assert self.mask is not None
        positions = torch.cat([torch.arange(s.length) + (s.position or 0) for s in self.segments])
        streams = None
        if isinstance(self.mask, Streams) and self.mask.key is None:
            streams = torch.cat([torch.full((s.length,), s.stream) for s in self.segments]).to(self.q.device)
        return self.mask.dense(self.q.shape[2], positions.to(self.q.device), streams)


def refusal(call: Call, dtypes: Sequence[torch.dtype], max_head_size: int, *, takes_bias: bool = True) -> str:
    """Says why a fused kernel with these limits cannot compute a call, or "" if it can.

    Args:
        call: a call that is not empty.
        dtypes: input dtypes the kernel computes.
        max_head_size: largest D.
        takes_bias: whether the kernel takes an additive mask.
    """
    q = call.q
    if q.dtype not in dtypes:
        return f"it computes {', '.join(str(x).removeprefix('torch.') for x in dtypes)}, not {q.dtype}"
    if not 0 < q.shape[3] <= max_head_size:
        return f"its head size goes from 1 to {max_head_size}, found {q.shape[3]}"
    if call.bias is not None and not takes_bias:
        return "it takes no mask or bias"
    return NO_GRADIENT if call.needs_gradient else ""
