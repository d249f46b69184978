"""Calls the warp-specialised Hopper kernel in Gluon, for the versions of triton it was compiled with.

Gluon lives inside triton and renames its functions between minor versions, so no other version is tried. The kernel has
been compiled for sm_90 but not yet run on one: it is used where a tuned table or `force_backend` names it, never by
itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.backends.cuda import is_aligned
from partsong.kernels.call import HALF, Call, refusal, triton_version

__all__ = ["BLOCK_N", "STAGES", "VERSIONS", "known_gluon", "run", "supports", "usable"]

#: Minor versions of triton whose Gluon has the functions used.
VERSIONS = ("3.6", "3.7", "3.9")
WIDTHS = (64, 128)
BLOCK_N, STAGES = 128, 2


def known_gluon() -> tuple[bool, str]:
    """Whether the installed triton has the Gluon this kernel is written in, and why (not)."""
    version = triton_version()
    if version is None:
        return False, "triton is not installed (it comes with the CUDA build of torch)"
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        return False, f"triton {version} has another Gluon; it needs {' or '.join(VERSIONS)}"
    return True, f"triton {version}"


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not)."""
    ok, reason = known_gluon()
    if not ok:
        return False, reason
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False, "no CUDA device"
    if torch.cuda.get_device_capability()[0] != 9:
        return False, "it needs a Hopper GPU (compute capability 9.0)"
    return True, "partsong's warp-specialised kernel; compiled but never run, so only by name or tuned table"


def supports(call: Call) -> tuple[bool, str]:
    """Whether this plain call can be computed, and why (not)."""
    q, k, v = call.q, call.k, call.v
    if not q.is_cuda:
        return False, f"the tensors are on {q.device.type}, not cuda"
    ok, reason = usable()
    if not ok:
        return False, reason
    if q.shape[3] not in WIDTHS:
        return False, f"its head sizes are 64 and 128, found {q.shape[3]}"
    if reason := refusal(call, HALF, max(WIDTHS), takes_bias=False):
        return False, reason
    if not all(is_aligned(x) and min(x.stride()) > 0 for x in (q, k, v)):
        return False, "the copy engine needs 16-byte aligned rows and a contiguous last dim"
    if q.shape[0] * q.shape[1] > 65535:
        return False, f"batch x heads = {q.shape[0] * q.shape[1]} is more than a CUDA grid takes (65535)"
    return True, "partsong's warp-specialised kernel"


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for a plain call that is not empty."""
    gl = importlib.import_module("triton.experimental.gluon.language")
    hopper = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    kernel: Any = importlib.import_module("partsong.kernels.backends.gluon_attention_kernel")

    q, k, v = call.q, call.k, call.v
    batch, heads, length, width = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)

    def tiles(x: Tensor, rows: int) -> Any:
        block = [1, 1, rows, width]
        element = gl.float16 if x.dtype is torch.float16 else gl.bfloat16
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        return hopper.TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)

    grid = (-(-length // (kernel.ROWS * kernel.CONSUMERS)), batch * heads)
    # Triton starts kernels on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q):
        kernel.hopper_attention_kernel[grid](
            tiles(q, kernel.ROWS), tiles(k, BLOCK_N), tiles(v, BLOCK_N), out, lse, *out.stride()[:3],
            heads, heads // k.shape[1], length, call.num_keys, call.scale * 1.4426950408889634,
            WIDTH=width, BLOCK_N=BLOCK_N, STAGES=STAGES, CAUSAL=call.mask is not None, CONSUMERS=kernel.CONSUMERS,
            num_warps=4,
        )  # fmt: skip
    return out, lse
