"""Registers partsong's attention with diffusers, as one more backend of its attention dispatcher.

The dispatcher takes only members of its enum `AttentionBackendName`, so one is added and removed again. These are
private names: unless all of them have the form known from diffusers 0.40 to 0.42, nothing is changed.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.library_calls import NAME, attend, unsupported
from partsong.kernels.masks import Causal

__all__ = ["diffusers_attention", "install_diffusers"]

_TABLES = ("_backends", "_constraints", "_supported_arg_names")
_MAPS = (("_member_map_", dict), ("_member_names_", list), ("_value2member_map_", dict))


def install_diffusers() -> Callable[[], None]:
    """Registers `diffusers_attention` and returns what unregisters it.

    Raises:
        ArgumentError: the name is taken.
        UnsupportedError: diffusers is missing, or its dispatcher differs from that of 0.40 to 0.42.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise UnsupportedError("install(diffusers=True) needs diffusers, which is not installed")
    names, registry = _dispatcher()
    if NAME in names._value2member_map_:
        raise ArgumentError(f"diffusers has an attention backend called {NAME!r} already: undo that one first")
    before = registry._active_backend
    member = _add_member(names)
    registry.register(member)(diffusers_attention)

    def undo() -> None:
        # `set_attention_backend` on one model makes its backend that of the whole process.
        if registry._active_backend is member:
            registry.set_active_backend(before)
        for table in _TABLES:
            getattr(registry, table).pop(member, None)
        _remove_member(names, member)

    return undo


def diffusers_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention in the form of diffusers' ``dispatch_attention_fn``.

    Args:
        query: `[B, Lq, Hq, D]`.
        key: `[B, Lk, Hkv, D]`.
        value: `[B, Lk, Hkv, Dv]`.
        attn_mask: bool (True = attend) or float, broadcasting to `[B, Hq, Lq, Lk]`; or `[B, Lk]`.
        dropout_p: must be 0.
        is_causal: the causal mask aligned at the first key, as PyTorch has it; not together with `attn_mask`.
        scale: factor on q.k.
        enable_gqa: nothing to do: fewer key heads are always read as groups.
        return_lse: also return the log-sum-exp `[B, Lq, Hq]`, natural log.
        _parallel_config: diffusers' own context parallelism, must be None.

    Returns:
        out `[B, Lq, Hq, Dv]`, or (out, lse).

    Raises:
        ArgumentError: shapes, dtypes or masks that do not fit.
        UnsupportedError: dropout, a causal mask next to `attn_mask`, or diffusers' context parallelism.
    """
    if _parallel_config is not None:
        raise unsupported(
            "diffusers", "its own context parallelism", "use partsong.parallelize, or another backend with it"
        )
    if dropout_p:
        raise unsupported("diffusers", f"dropout {dropout_p}", "call transformer.eval()")
    if is_causal and attn_mask is not None:
        raise unsupported("diffusers", "is_causal next to attn_mask", "put the causal mask into attn_mask")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # before [Lq, Lk], which it might be too: diffusers reads it so
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = attend(q, k, v, mask=attn_mask, causal=Causal() if is_causal else None, scale=scale)
    out = out.transpose(1, 2)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _dispatcher() -> tuple[Any, Any]:
    """Returns the enum of names and the registry, once they have the form this file was written for."""
    diffusers = importlib.import_module("diffusers")
    try:
        module = importlib.import_module("diffusers.models.attention_dispatch")
        names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
        taken = inspect.signature(module.dispatch_attention_fn).parameters
        known = (
            issubclass(names, str)
            and issubclass(names, enum.Enum)
            and all(isinstance(getattr(names, name), kind) for name, kind in _MAPS)
            and all(set(getattr(registry, table)) <= set(names) for table in _TABLES)
            and names["NATIVE"] in registry._backends
            and isinstance(registry._active_backend, names)
            and callable(registry.set_active_backend)
            and {"query", "key", "value", "attn_mask", "backend", "parallel_config"} <= set(taken)
        )
    except (ImportError, AttributeError, KeyError, TypeError):
        known = False
    if not known:
        raise UnsupportedError(
            f"the attention dispatcher of diffusers {diffusers.__version__} does not have the form of 0.40 to 0.42, "
            "so nothing is added to it: use one of these versions"
        )
    return names, registry


def _add_member(names: Any) -> Any:
    """Adds PARTSONG to the enum, past the rule that an enum is closed."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    member.__objclass__, member._sort_order_ = names, len(names._member_names_)
    names._member_map_[NAME.upper()] = member
    names._member_names_.append(NAME.upper())
    names._value2member_map_[NAME] = member
    return member


def _remove_member(names: Any, member: Any) -> None:
    names._member_map_.pop(member.name, None)
    names._value2member_map_.pop(member.value, None)
    if member.name in names._member_names_:
        names._member_names_.remove(member.name)
