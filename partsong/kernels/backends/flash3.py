"""Calls FlashAttention-3 for Hopper, through the package ``kernels`` of Hugging Face.

Loading it runs compiled code from the hub, so nothing is loaded unless the user says so:

- ``PARTSONG_FLASH3=/path`` names a local copy of the kernel repository; nothing is downloaded;
- ``PARTSONG_HUB_KERNELS=1`` allows `kernels` to fetch it (a trusted publisher's; `kernels` checks that), once.

Source: FlashAttention-3, Shah et al., arXiv 2407.08608.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.backends.cuda import normalise
from partsong.kernels.backends.external import refusal, rows_first
from partsong.kernels.call import Call

__all__ = ["ALLOW", "LOCAL", "run", "supports", "usable"]

#: Environment variable that names a local copy of the kernel.
LOCAL = "PARTSONG_FLASH3"
#: Environment variable that allows the download of kernels when it is "1".
ALLOW = "PARTSONG_HUB_KERNELS"

REPOSITORY, VERSION = "kernels-community/flash-attn3", 1
MAX_HEAD_SIZE = 256


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not); loads nothing."""
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is not None or capability[0] != 9:
        return False, f"it is for Hopper (compute capability 9.x), found {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("kernels") is None:
        return False, "the package kernels is not installed (pip install 'partsong[gpu]')"
    path, allowed = _settings()
    if not path and not allowed:
        return False, f"set {ALLOW}=1 to allow the download of {REPOSITORY}, or {LOCAL} to the path of a copy"
    return True, f"FlashAttention-3 from {path or REPOSITORY}"


def supports(call: Call) -> tuple[bool, str]:
    """Whether these inputs can be computed correctly, and why (not); loads the kernel on the first call that can."""
    reason = refusal(call, MAX_HEAD_SIZE)
    if reason:
        return False, reason
    function, reason = _load(*_settings())
    return function is not None, reason


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for a plain call that is not empty."""
    function, reason = _load(*_settings())
    assert function is not None, reason
    q, k, v = rows_first(call)
    out, lse, *_ = function(q, k, v, softmax_scale=call.scale, causal=call.mask is not None, return_attn_probs=True)
    return normalise(out.transpose(1, 2)[..., : call.q.shape[3]], lse, call.q.shape[2], None)


def _settings() -> tuple[str, bool]:
    """Returns the path of a local copy, or "", and whether a download is allowed."""
    return os.environ.get(LOCAL, ""), os.environ.get(ALLOW) == "1"


@functools.cache
def _load(path: str, allowed: bool) -> tuple[Callable[..., Any] | None, str]:
    """Loads `flash_attn_func` from a local copy or the hub, once per setting; or returns None and why not."""
    ok, reason = usable()
    if not ok:
        return None, reason
    try:
        kernels = importlib.import_module("kernels")
        module = kernels.get_local_kernel(Path(path)) if path else kernels.get_kernel(REPOSITORY, version=VERSION)
        return module.flash_attn_func, f"FlashAttention-3 from {path or REPOSITORY}"
    except Exception as error:  # noqa: BLE001 - a foreign loader, over the network: whatever it raises, another kernel runs
        return None, f"{path or REPOSITORY} does not load: {type(error).__name__}: {error}"
