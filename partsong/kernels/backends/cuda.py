"""Brings the fused CUDA kernels of PyTorch to the contract of `attention`.

This file settles what they disagree on. cuDNN's log-sum-exp has a trailing dim since torch 2.9, the memory-efficient
kernel pads its length, and fully masked rows hold different values. Head sizes must be multiples of 8, and a bias must
have q's dtype and aligned rows. So a float bias is rounded to q's dtype; that of a segment is not (see `dispatch`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from partsong.kernels.call import HALF, Call, refusal

__all__ = ["CUDNN", "EFFICIENT", "FLASH", "CudaKernel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaKernel:
    """Describes one aten operator with its limits.

    Attributes:
        name: backend name, which is in the operator's.
        dtypes: input dtypes it computes.
        max_head_size: largest D after padding to a multiple of 8.
        takes_bias: whether an additive mask can be given.
        grouped: whether it reads grouped key heads itself; else they are expanded.
        min_length: smallest Lq and Lk it is trusted with.
        least_queries: smallest Lq that pays for the plan it makes for every new shape.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    max_head_size: int
    takes_bias: bool
    grouped: bool
    min_length: int = 1
    least_queries: int = 1

    @property
    def operator(self) -> str:
        """Returns the operator's name in `torch.ops.aten`."""
        return f"_scaled_dot_product_{self.name}_attention"

    def usable(self) -> tuple[bool, str]:
        """Whether this backend can run on this machine, and why (not)."""
        if not torch.cuda.is_available():
            return False, "no CUDA device"
        if not hasattr(torch.ops.aten, self.operator):
            return False, f"torch {torch.__version__} has no {self.operator}"
        if self.name == "cudnn" and not (torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled):
            return False, "cuDNN is missing or switched off"
        return True, f"aten::{self.operator}"

    def supports(self, call: Call) -> tuple[bool, str]:
        """Whether these inputs can be computed correctly, and why (not)."""
        q, k = call.q, call.k
        if not q.is_cuda:
            return False, f"the tensors are on {q.device.type}, not cuda"
        reason = _operator_refusal(self.name, self.operator, q.device.index or 0) or refusal(
            call, self.dtypes, self.max_head_size, takes_bias=self.takes_bias
        )
        if reason:
            return False, reason
        if self.name == "cudnn" and not torch.backends.cudnn.enabled:
            return False, "torch.backends.cudnn.enabled is off"
        if min(q.shape[2], k.shape[2]) < self.min_length:
            return False, f"it is not trusted with fewer than {self.min_length} queries or keys"
        if q.shape[2] < self.least_queries:
            return False, f"it plans for every new shape, which {q.shape[2]} queries do not pay for"
        if self.name == "cudnn" and q.shape[1] != k.shape[1]:
            return False, "grouped key heads would have to be expanded"
        return True, f"aten::{self.operator}"

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        """Computes attention for a plain call that is not empty."""
        q, k, v, bias = call.q, call.k, call.v, call.bias
        width, group = q.shape[3], q.shape[1] // k.shape[1]
        if group > 1 and not self.grouped:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        q_in, k_in, v_in = (align_rows(x) for x in (q, k, v))
        out, lse = self.call(
            q_in, k_in, v_in, None if bias is None else _align_bias(bias, q, k), call.mask is not None, call.scale
        )
        return normalise(out[..., :width], lse, q.shape[2], bias)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Calls the operator: out and the log-sum-exp in the operator's own shape."""
        # The argument after the bias requests the log-sum-exp, which the operator without a bias always returns.
        given = (bias, True) if self.takes_bias else ()
        return getattr(torch.ops.aten, self.operator)(q, k, v, *given, is_causal=causal, scale=scale)[:2]


@functools.cache
def _operator_refusal(name: str, operator: str, device: int) -> str:
    """Says why an operator cannot run on a device ("" if it can): this does not change while a process lives."""
    if not hasattr(torch.ops.aten, operator):
        return f"torch {torch.__version__} has no {operator}"
    if torch.version.hip is not None and name == "cudnn":
        return "ROCm has no cuDNN"
    if name != "efficient" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    if name == "cudnn" and (torch.backends.cudnn.version() or 0) < 90100:
        return f"it needs cuDNN 9.1 or newer, found {torch.backends.cudnn.version()}"
    return ""


def normalise(out: Tensor, lse: Tensor, num_queries: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Brings a kernel's log-sum-exp to `[B, Hq, Lq]` contiguous float32 and its empty rows to out 0, lse -inf.

    Args:
        out: `[B, Hq, Lq, D]`.
        lse: `[B, Hq, L]` or `[B, Hq, L, 1]` with L >= Lq (padding after the real rows).
        num_queries: Lq.
        bias: the additive mask the kernel was given, four dims, or None.
    """
    if lse.dim() == 4:
        lse = lse.squeeze(-1)
    lse = (lse if lse.shape[2] == num_queries else lse[:, :, :num_queries]).float()
    if bias is not None:
        # Without asking the device whether there are any: that would make the host wait.
        empty = bias.amax(dim=-1) == -math.inf
        lse = lse.masked_fill(empty, -math.inf)
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    return out, lse.contiguous()


def align_rows(x: Tensor) -> Tensor:
    """Gives x a contiguous last dim of a multiple of 8 and 16-byte aligned rows; without a copy if it has them."""
    extra = -x.shape[3] % 8
    if extra:
        return pad(x, (0, extra))
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Whether the last of four dims is contiguous and every row starts at a multiple of 16 bytes."""
    unit, (batch, head, row, one) = 16 // x.element_size(), x.stride()
    return one == 1 and not (x.data_ptr() % 16 or batch % unit or head % unit or row % unit)


def _align_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Expands bias to `[B, Hq, Lq, Lk]` in q's dtype, its rows a multiple of 16 elements apart in memory."""
    batch, heads, rows, _ = bias.shape
    keys = k.shape[2]
    room = torch.empty(batch, heads, rows, keys + -keys % 16, dtype=q.dtype, device=q.device)
    view = room[..., :keys]
    view.copy_(bias.expand(batch, heads, rows, keys))
    return view.expand(q.shape[0], q.shape[1], q.shape[2], keys)


CUDNN = CudaKernel(
    name="cudnn", dtypes=HALF, max_head_size=128, takes_bias=True, grouped=False, min_length=2, least_queries=1024
)
FLASH = CudaKernel(name="flash", dtypes=HALF, max_head_size=256, takes_bias=False, grouped=True)
EFFICIENT = CudaKernel(
    name="efficient", dtypes=(*HALF, torch.float32), max_head_size=1 << 16, takes_bias=True, grouped=False
)
