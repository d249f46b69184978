"""Registers partsong's attention with PyTorch's flash attention implementations, which replace a CUDA operator.

This is what replacing it means, and what keeps it sound:

- It holds for the whole process. Other implementations (FA3, FA4) are switched off meanwhile and on again by the undo.
- partsong may itself choose the operator that is replaced. A call that comes back through the replacement goes to the
  kernel that was there before. So does a call that partsong cannot compute.
- Its gradient stays PyTorch's own. That formula gets the output and the log-sum-exp, which is natural log and float32
  on both sides, so it need not know who computed them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.attend import attention
from partsong.kernels.library_calls import NAME
from partsong.kernels.masks import Causal

__all__ = ["install_torch"]

_OPERATOR = "_scaled_dot_product_flash_attention"
_KEY = "CUDA"
_INSIDE: ContextVar[bool] = ContextVar("partsong_inside_sdpa", default=False)


def install_torch() -> Callable[[], None]:
    """Puts partsong's attention in the place of PyTorch's flash kernel and returns what takes it out again.

    Raises:
        ArgumentError: it is there already.
        UnsupportedError: this PyTorch has no registry for it, or finds no CUDA device.
    """
    registry = _registry()
    if NAME in registry._FLASH_ATTENTION_IMPLS:
        raise ArgumentError(f"PyTorch has a flash attention called {NAME!r} already: undo that one first")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"install(torch_sdpa=True) replaces a CUDA kernel, and torch {torch.__version__} finds no CUDA device: "
            "on the CPU register with transformers or diffusers instead"
        )
    before = registry.current_flash_attention_impl()
    registry.register_flash_attention_impl(NAME, register_fn=_replace)
    try:
        registry.activate_flash_attention_impl(NAME)
    except BaseException:
        registry._FLASH_ATTENTION_IMPLS.pop(NAME, None)
        raise

    def undo() -> None:
        # Somebody may have activated another implementation since; then ours is out already.
        if registry.current_flash_attention_impl() == NAME:
            registry.restore_flash_attention_impl()
            if before is not None:
                registry.activate_flash_attention_impl(before)
        registry._FLASH_ATTENTION_IMPLS.pop(NAME, None)

    return undo


def _registry() -> Any:
    """Returns `torch.nn.attention._registry`; nothing public removes a name again."""
    registry = getattr(torch.nn.attention, "_registry", None)
    functions = ("register", "activate", "current", "restore")
    if not isinstance(getattr(registry, "_FLASH_ATTENTION_IMPLS", None), dict) or not all(
        hasattr(registry, f"{name}_flash_attention_impl") for name in functions
    ):
        raise UnsupportedError(
            f"install(torch_sdpa=True) knows the registry of torch 2.13, found {torch.__version__}: "
            "the installed version has no registry of flash attention implementations that could be undone"
        )
    return registry


class _Replacement:
    """Holds the replaced operator, as the registry keeps it."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def remove(self) -> None:
        """Puts the operator's own kernel back."""
        self._library._destroy()


def _replace() -> _Replacement:
    # The kernel is fetched before it is replaced: afterwards, its name leads here.
    original = torch.library.get_kernel(f"aten::{_OPERATOR}", _KEY)
    library = Library("aten", "IMPL", _KEY)
    library.impl(_OPERATOR, functools.partial(_flash_attention, original), with_keyset=True)
    return _Replacement(library)


def _flash_attention(
    original: Any,
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Replaces `aten::_scaled_dot_product_flash_attention`: q, k, v `[B, H, L, D]` to its nine results."""
    queries, keys = query.shape[2], key.shape[2]
    askew = is_causal and queries != keys  # the operator aligns that mask at the last key
    if _INSIDE.get() or dropout_p or return_debug_mask or askew or not query.numel() or not key.numel():
        return original.call_boxed(keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
    token = _INSIDE.set(True)
    try:
        with torch.no_grad():  # the gradient is taken of the operator, not of what happens in it
            out, lse = attention(query, key, value, mask=Causal() if is_causal else None, scale=scale)
    finally:
        _INSIDE.reset(token)
    laid_out = torch.empty_like(query)  # the layout compiled graphs were promised
    if out.stride() != laid_out.stride():
        out = laid_out.copy_(out)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, queries, keys, seed, offset, query.new_empty(0)
